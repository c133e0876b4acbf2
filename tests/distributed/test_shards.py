"""What runs on shards equals what runs on the whole, with its gradients, under every layout; in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.collectives import Shard
from tests.support import shards
from tests.support.pool import run
from tests.support.ranks import counting

BASIS = torch.linalg.qr(torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))[
    0
]
MESHES = [(1, 2), (1, 4), (2, 2), (2, 4)]  # of how many ranks the context parallel ones are, and of all
Way = Callable[[Tensor, Shard | None], Tensor]


def project_out(x: Tensor, shard: Shard | None) -> Tensor:
    basis = BASIS[: x.shape[-1]] if shard is None else shard.rows(BASIS[: shard.whole[-1]])
    real = None if shard is None else shard.real()
    seen = x if real is None else x.masked_fill(~real, 0)
    inside = seen @ basis if shard is None else shard.sum(seen @ basis, [-1])
    return x - inside @ basis.T


def mean(x: Tensor, shard: Shard | None) -> Tensor:
    """Less half the mean over the sequence: a summand's own values must stay in it."""
    count = x.shape[0] if shard is None else shard.whole[0]
    total = x.sum(0, keepdim=True)
    return x - (total if shard is None else shard.sum(total, [0])) / (2 * count)


def masked(x: Tensor, shard: Shard | None) -> Tensor:
    shape = x.shape if shard is None else shard.whole
    factor = torch.arange(shape[0] * shape[-1], dtype=x.dtype).view(shape[0], 1, shape[-1]).cos()
    if shard is None:
        return x * factor
    return (
        torch.where(real, x * shard.part(factor), x)
        if (real := shard.real()) is not None
        else (x * shard.part(factor))
    )


WAYS: dict[str, Way] = {"project out": project_out, "mean": mean, "mask": masked}


def on_ranks(cp: int) -> Any:
    """By way and layout: this rank's result, its gradient, and how many all-reduces there were."""
    mesh = shards.make_mesh(cp)
    out: dict[tuple[str, str], Any] = {}
    for name, layout in shards.fitting(mesh.sizes).items():
        for way, function in WAYS.items():
            local = shards.shard(layout, shards.whole(layout), mesh, -torch.inf).requires_grad_()
            here = Shard.of(local, layout, mesh)
            with counting() as forward:
                inside = local if layout.permute is None else local.permute(layout.permute)
                made = function(inside, here)
                back = made if layout.permute is None else made.permute(*map(layout.permute.index, range(3)))
            grad = shards.shard(layout.gradient(), shards.whole(layout, 1), mesh, 0.0)
            with counting() as backward:
                back.backward(grad)
            assert local.grad is not None
            counts = forward["all_reduce"], backward["all_reduce"]
            assert counts == (forward.total(), backward.total())
            out[name, way] = back.detach(), local.grad, counts
    return dict(mesh.coords), dict(mesh.sizes), out


def expected(way: str, layout: Any, sizes: Any) -> int:
    """How many axes cut the dim that is summed over into more than one part."""
    dims = {"project out": ["h"], "mean": ["s"], "mask": []}[way]
    return sum(sizes[c.axis] > c.copies for d in layout.dims if d.name in dims for c in d.cuts)


@pytest.mark.parametrize(("cp", "world"), MESHES)
def test_on_shards_as_on_the_whole(cp: int, world: int) -> None:
    answers = run(world, on_ranks, cp)
    sizes = answers[0][1]
    compared = 0
    for name, layout in shards.fitting(sizes).items():
        for way, function in WAYS.items():
            whole = shards.whole(layout).requires_grad_()
            wanted = function(whole, None)
            wanted.backward(shards.whole(layout, 1))
            found = [(a[0], *a[2][name, way]) for a in answers]
            for index, of, want in ((1, layout, wanted.detach()), (2, layout.gradient(), whole.grad)):
                got = shards.together(of, [(f[0], f[index]) for f in found], sizes)
                assert torch.allclose(got, want, rtol=0, atol=1e-12), (name, way, index)
                compared += 1
            once = expected(way, layout, sizes)
            assert {f[3] for f in found} == {(once, once)}, (name, way)
    assert compared == 2 * len(WAYS) * len(shards.fitting(sizes)) >= 60
