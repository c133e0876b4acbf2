"""Which entries of its local tensor a rank counts, so that each of the whole is counted on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_flex.dump import list_replica_axes
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Dim, Layout, is_partial, count_parts, spans
from megatron_flex.mesh import Axis, Mesh

PARTIAL_SUM = "each rank holds a partial sum there; name a site after the reduction"


def select_counted(local: Tensor, layout: Layout, mesh: Mesh, over: Sequence[Axis] | None = None) -> Tensor:
    """The entries of a local tensor that this rank counts, in any order of dims.

    Ranks that hold the same entries divide them. Nothing is communicated.

    Args:
        local: the shard.
        layout: of it.
        mesh: the run's axes.
        over: the axes along which ranks may hold the same; None for those of a site.

    Raises:
        LayoutError: the tensor does not fit the layout, or is a summand.
    """
    _check_countable(local, layout, mesh)
    for index, dim in enumerate(layout.dims):
        kept = _find_unpadded(dim, local.shape[index], mesh)
        if kept is not None:
            local = torch.cat([local.narrow(index, *k) for k in kept], index)
    ways, mine = divide_copies(layout, mesh, over)
    if ways == 1 or not local.ndim:
        return local if mine == 0 else local.new_empty(0)
    lengths = list(local.shape)
    at = next((d for d, n in enumerate(lengths) if n and n % ways == 0), lengths.index(max(lengths)))
    first, last = (lengths[at] * n // ways for n in (mine, mine + 1))
    return local.narrow(at, first, last - first)


def select_counted_part(
    local: Tensor, part: tuple[int, int] | None, layout: Layout, mesh: Mesh, over: Sequence[Axis]
) -> Tensor:
    """Likewise of a tensor of which this rank has `part` alone, flattened. Arguments as for `select_counted`."""
    if part is None:
        return select_counted(local, layout, mesh, over)
    _check_countable(local, layout, mesh)
    real: Tensor | None = None  # only what is within every dim
    for index, dim in enumerate(layout.dims):
        kept = _find_unpadded(dim, local.shape[index], mesh)
        if kept is not None:
            here = torch.zeros(local.shape[index], dtype=torch.bool, device=local.device)
            for start, length in kept:
                here[start : start + length] = True
            here = here.view([-1 if d == index else 1 for d in range(local.ndim)])
            real = here if real is None else real & here
    flat = local.reshape(-1)[slice(*part)]
    flat = flat if real is None else flat[real.expand(local.shape).reshape(-1)[slice(*part)]]
    ways, mine = divide_copies(layout, mesh, over)
    return flat[len(flat) * mine // ways : len(flat) * (mine + 1) // ways]


def divide_copies(layout: Layout, mesh: Mesh, over: Sequence[Axis] | None = None) -> tuple[int, int]:
    """Among how many ranks what they all hold is divided, and this rank's place among them."""
    ways, mine = 1, 0
    for _, size, coord in list_replica_axes(mesh, layout, over=over):
        ways, mine = ways * size, mine * size + coord
    return ways, mine


def _check_countable(local: Tensor, layout: Layout, mesh: Mesh) -> None:
    if is_partial(layout, mesh.sizes):
        raise LayoutError(PARTIAL_SUM)
    if local.is_complex():
        raise LayoutError(f"it is of {local.dtype}, which has no order")
    if local.ndim != len(layout.dims):
        raise LayoutError(f"a tensor of shape {tuple(local.shape)} passed, and {layout.describe()} is known")


def _find_unpadded(dim: Dim, length: int, mesh: Mesh) -> list[tuple[int, int]] | None:
    """Where the entries lie that are no padding: starts and lengths; None if all are none."""
    full = length * count_parts(dim, mesh.sizes)
    if dim.keep is None or dim.keep >= full:
        return None
    out, at = [], 0
    for start, stop in spans(dim, full, mesh.coords, mesh.sizes):
        out.append((at, max(0, min(stop, dim.keep) - start)))
        at += stop - start
    return out
