"""What runs on shards equals what runs on the whole, with its gradients, under every layout; in float64."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import edits
from megatron_flex.collectives import enter, exit
from megatron_flex.layout import Cut, Layout
from megatron_flex.runtime.local_edits import plan_local_edits
from tests.support import shards
from tests.support.pool import run
from tests.support.ranks import counting

MESHES = [(1, 4), (2, 2), (2, 4)]  # of how many ranks the context parallel ones are, and of all
NAMES = "s b h"


def some(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Way:
    """An edit, by the length of the last dim.

    Attributes:
        make: the preset.
        over: the dims that it sums over.
        linear: whether it may run on summands.
        whole: the dim that must not be cut.
    """

    make: Callable[[int], Any]
    over: tuple[str, ...] = ()
    linear: bool = True
    whole: str = ""


WAYS = {
    "project out": Way(lambda n: edits.project_out(some(2, n), dims=NAMES), ("h",)),
    "project": Way(lambda n: edits.project(some(n), positions=[0, -1, 5], dims=NAMES), ("h",)),
    "low rank": Way(lambda n: edits.linear_map(some(n, 3), some(3, n), add=True, dims=NAMES), ("h",)),
    "square": Way(lambda n: edits.linear_map(some(n, n), dims=NAMES), whole="h"),
    "mean": Way(lambda n: edits.mean("s", features=slice(2, 9), dims=NAMES), ("s",)),
    "mean of features": Way(lambda n: edits.mean("h", samples=1, dims=NAMES), ("h",)),
    "mean of both": Way(lambda n: edits.mean("s h", dims=NAMES), ("s", "h")),
    "silent": Way(lambda n: edits.ablate_neurons([0, 7, -1], dims=NAMES)),
    "steer": Way(lambda n: edits.steer(some(n), 2.0, positions=slice(-4, None), dims=NAMES), linear=False),
    "patch": Way(lambda n: edits.patch(some(16, 2, n), features=[1, -2], dims=NAMES), linear=False),
    "swap": Way(lambda n: edits.swap(0, 1, dims=NAMES)),
    "resample": Way(lambda n: edits.resample("s", dims=NAMES), linear=False, whole="s"),
    "chain": Way(
        lambda n: edits.project_out(some(n), dims=NAMES) | edits.mean("s", positions=3, dims=NAMES),
        ("s", "h"),
    ),
}


def act(edit: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    made: Tensor = edit(None, x, Namespace(), nn.ModuleDict())
    return made


def on_ranks(cp: int) -> Any:
    """By layout and way: this rank's result, its gradient, and how many all-reduces there were."""
    mesh = shards.make_mesh(cp)
    out: dict[tuple[str, str], Any] = {}
    for name, layout in shards.fitting(mesh.sizes).items():
        for way, wanted in WAYS.items():
            whole = shards.whole(layout)
            local = shards.shard(layout, whole, mesh, -torch.inf).requires_grad_()
            hook = mf.HookFunction("", editing_function=wanted.make(whole.shape[-1]))
            here, _ = plan_local_edits({hook: hook.editing_function}, layout, tuple(local.shape), mesh, False)
            if here is None:
                out[name, way] = None
                continue
            with counting() as forward:
                entrance = enter(local, here.exchange)
                back = exit(act(here.edits[hook], entrance), entrance, local, here.exchange)
            grad = shards.shard(layout.gradient(), shards.whole(layout, 1), mesh, 0.0)
            with counting() as backward:
                back.backward(grad)
            assert local.grad is not None
            counts = forward["all_reduce"], backward["all_reduce"]
            assert counts == (forward.total(), backward.total())
            out[name, way] = back.detach(), local.grad, counts
    return dict(mesh.coords), dict(mesh.sizes), out


def cuts(layout: Layout, dims: tuple[str, ...], sizes: Any) -> list[Cut]:
    """What cuts one of these dims into more than one part."""
    return [c for d in layout.dims if d.name in dims for c in d.cuts if sizes[c.axis] > c.copies]


def refuses(way: Way, layout: Layout, sizes: Any) -> bool:
    summands = [c.axis for d in layout.dims for c in d.cuts if c.partial]
    summed = any(sizes[axis] > 1 for axis in [*summands, *layout.partial])
    padded = any(d.keep and d.name == way.whole for d in layout.dims)
    return (summed and not way.linear) or padded or bool(cuts(layout, (way.whole,), sizes))


@pytest.mark.parametrize(("cp", "world"), MESHES)
def test_on_shards_as_on_the_whole(cp: int, world: int) -> None:
    answers = run(world, on_ranks, cp)
    sizes = answers[0][1]
    refused = 0
    for name, layout in shards.fitting(sizes).items():
        for way, wanted in WAYS.items():
            found = [(a[0], a[2][name, way]) for a in answers]
            if refuses(wanted, layout, sizes):
                assert [f[1] for f in found] == [None] * world, (name, way)
                refused += 1
                continue
            whole = shards.whole(layout).requires_grad_()
            want = act(wanted.make(whole.shape[-1]), whole)
            want.backward(shards.whole(layout, 1))
            for index, of, true in ((0, layout, want.detach()), (1, layout.gradient(), whole.grad)):
                got = shards.together(of, [(coords, f[index]) for coords, f in found], sizes)
                assert torch.allclose(got, true, rtol=0, atol=1e-12), (name, way, index)
            once = len(cuts(layout, wanted.over, sizes))
            assert {f[2] for _, f in found} == {(once, once)}, (name, way)
    assert refused >= 5
