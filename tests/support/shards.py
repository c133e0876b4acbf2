"""Layouts of every kind, tensors cut to shards under them, and what comes of shards put together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, extract
from megatron_flex.mesh import Axis, Mesh

WHOLE = (16, 2, 24)
KEPT = 21  # entries of the last dim that are real, where it is padded


def dim(name: str, *cuts: Cut, **more: Any) -> Dim:
    return Dim(name, cuts, **more)


S, B, H = dim("s"), dim("b"), dim("h")
TP, CP = Cut("tp"), Cut("cp", "zigzag")
LAYOUTS = {
    "replicated": Layout((S, B, H)),
    "features": Layout((S, B, dim("h", TP))),
    "segments": Layout((S, B, dim("h", TP, segments=(1, 1)))),
    "sequence": Layout((dim("s", CP, TP), B, H)),
    "sequence and features": Layout((dim("s", CP), B, dim("h", TP))),
    "padded": Layout((S, B, dim("h", TP, keep=KEPT))),
    "padded sequence parallel": Layout((dim("s", TP), B, dim("h", keep=KEPT))),
    "copies": Layout((S, B, dim("h", Cut("tp", copies=2)))),
    "copies in a zigzag": Layout((dim("s", CP), B, dim("h", Cut("tp", copies=2), segments=(1, 2)))),
    "copies of the sequence": Layout((dim("s", Cut("tp", copies=2)), B, dim("h", Cut("cp")))),
    "summands": Layout((S, B, H), partial=("tp",)),
    "summands of features": Layout((S, B, dim("h", Cut("cp"))), partial=("tp",)),
    "shared": Layout((S, B, dim("h", Cut("cp"))), shared=("tp",)),
    "batch first": Layout((B, dim("s", CP), dim("h", TP)), permute=(1, 0, 2)),
    "features first": Layout((dim("h", TP), B, S), permute=(2, 1, 0)),
}
LAYOUTS |= {f"gradient of {n}": v.gradient() for n, v in LAYOUTS.items() if v.gradient() != v}


def fitting(sizes: Any) -> dict[str, Layout]:
    """The layouts that a mesh of these sizes can have."""
    copies = {n: [c for d in v.dims for c in d.cuts if c.copies > 1] for n, v in LAYOUTS.items()}
    return {n: v for n, v in LAYOUTS.items() if all(sizes[c.axis] % c.copies == 0 for c in copies[n])}


def make_mesh(cp: int) -> Mesh:
    """All ranks, over `cp` and then over `tp`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    tp = world // cp
    grid = torch.arange(world).view(cp, tp)
    axes = []
    for name, groups in (("cp", grid.T.tolist()), ("tp", grid.tolist())):
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                axes.append(Axis(name, len(ranks), ranks.index(rank), group, tuple(ranks)))
    return Mesh(tuple(axes))


def whole(layout: Layout, seed: int = 0) -> Tensor:
    """A random whole, padding stripped."""
    shape = [KEPT if any(d.keep for d in layout.dims) and n == WHOLE[-1] else n for n in WHOLE]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shard(layout: Layout, of: Tensor, mesh: Mesh, beside: float) -> Tensor:
    """This rank's part: of a sum a summand that tells nothing of the whole; `beside` is the padding."""
    order = layout.permute or (0, 1, 2)
    padded = [WHOLE[order.index(i)] for i in range(3)]
    bare = replace(_unsummed(layout), permute=None)
    full = replace(bare, dims=tuple(replace(d, keep=None) for d in bare.dims))
    shape = extract(full, torch.empty(padded), mesh.coords, mesh.sizes).shape
    out = extract(layout, of, mesh.coords, mesh.sizes, shape)
    for size, coord, seed in _sums(layout, mesh):
        for at, sign in ((coord, 1), ((coord + 1) % size, -1)):
            generator = torch.Generator().manual_seed(100 * seed + at)
            noise = torch.randn(padded, dtype=of.dtype, generator=generator)
            out += sign * extract(full, noise, mesh.coords, mesh.sizes)
    ones = torch.ones(of.shape, dtype=torch.bool)
    padding = ~extract(_unsummed(layout), ones, mesh.coords, mesh.sizes, shape)
    return out.masked_fill(padding, beside)


def _unsummed(layout: Layout) -> Layout:
    cuts = [tuple(replace(c, partial=False) for c in d.cuts) for d in layout.dims]
    dims = tuple(replace(d, cuts=c) for d, c in zip(layout.dims, cuts, strict=True))
    return replace(layout, dims=dims, partial=(), shared=())


def _sums(layout: Layout, mesh: Mesh) -> Iterator[tuple[int, int, int]]:
    """How many summands there are along an axis, which one this rank has, and a seed."""
    for n, name in enumerate(layout.partial):
        if mesh[name].size > 1:
            yield mesh[name].size, mesh[name].coord, n + 1
    for d in layout.dims:
        for c in d.cuts:
            if c.partial and mesh[c.axis].size > 1:
                yield c.copies, mesh[c.axis].coord % c.copies, 9


def together(layout: Layout, found: list[tuple[dict[str, int], Tensor]], sizes: Any) -> Tensor:
    """The whole of all ranks' shards, each with its coordinates."""
    shards = [
        next(t for coords, t in found if all(coords.get(a, 0) == c for a, c in place.items()))
        for place in coordinates(layout, sizes)
    ]
    return assemble(layout, shards, sizes)
