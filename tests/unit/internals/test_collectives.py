"""Every pair of forward and backward collectives against one process; groups without rank 0; uneven parts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import (
    PipelineGather,
    choose_exchange,
    enter,
    exit,
    gather_objects,
    gather_to_leader,
    gather_up_pipeline,
    host_groups,
    is_leader,
    max_over_ranks,
    pipeline_gather,
    plan_read,
)
from megatron_flex.collectives.gather_scatter import GATHER
from megatron_flex.collectives.host_groups import device_of, open_host_group
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.config import flex_config
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, extract, replicated
from megatron_flex.mesh import Axis, Mesh
from tests.support.pool import run, run_alone
from tests.support.rank import changes

SEGMENTED = Layout((Dim("s"), Dim("f", (Cut("tp"),), (1, 1))))
LAYOUTS = {
    # first and last: ranks that hold no part of the one must agree with the others on the way of the other
    "context parallel alone": Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("h"))),
    "replicated": replicated("s", "h"),
    "contiguous": Layout((Dim("s", (Cut("tp"),)), Dim("h"))),
    "segments": SEGMENTED,
    "within context parallel": Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("h"))),
    "zigzag": Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("h", (Cut("tp"),)))),
    "padded": Layout((Dim("s"), Dim("v", (Cut("tp"),), keep=13))),
    "partial": Layout((Dim("s"), Dim("h")), partial=("tp",)),
    "partial within context parallel": Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("h")), partial=("tp",)),
    "shared": Layout((Dim("s"), Dim("h")), shared=("tp",)),
    "copies": Layout((Dim("s"), Dim("g", (Cut("tp", copies=2),)))),
    "transposed": Layout((Dim("s", (Cut("tp"),)), Dim("b")), permute=(1, 0)),
    "heads before the sequence": Layout((Dim("n", (Cut("tp"),)), Dim("s", (Cut("cp", "zigzag"),)))),
}
VOCABULARY = Dim("v", (Cut("tp"),), keep=13)
EDITED = LAYOUTS | {
    "padded summands": Layout((Dim("s"), VOCABULARY), partial=("cp",)),
    "padded with a partial gradient": Layout((Dim("s"), VOCABULARY), shared=("cp",)),
}
SHAPE = (16, 16)


def make_mesh(cp: int, offset: int = 0) -> Mesh:
    """Groups over all ranks, but that `offset` ranks at the start have a mesh of their own, without these."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inside = world - offset
    tp = inside // cp
    axes = []
    for name, groups in (
        ("cp", [[offset + t + tp * c for c in range(cp)] for t in range(tp)]),
        ("tp", [[offset + t + tp * c for t in range(tp)] for c in range(cp)]),
    ):
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                axes.append(Axis(name, len(ranks), ranks.index(rank), group, tuple(ranks)))
    return Mesh(tuple(axes))


def edit(whole: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(whole @ weight) + whole.roll(1, 0)


def truth(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = [SHAPE[i] if d.keep is None else d.keep for i, d in enumerate(layout.dims)]
    if layout.permute:
        shape = [shape[i] for i in layout.permute]
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    weight = torch.randn(shape[-1], shape[-1], dtype=torch.float64, generator=generator)
    out = torch.randn(shape, dtype=torch.float64, generator=generator)
    return whole, weight, out


def edits(cp: int, offset: int) -> Any:
    """For each layout: gather, edit with a weight, scatter, and all gradients."""
    mesh = make_mesh(cp, offset)
    if not mesh.axes:
        return None
    return dict(mesh.coords), dict(mesh.sizes), {n: one_edit(EDITED[n], mesh) for n in fitting(mesh.sizes)}


def fitting(sizes: Any) -> list[str]:
    return [n for n in EDITED if n != "copies" or sizes["tp"] % 2 == 0]


def one_edit(layout: Layout, mesh: Mesh) -> dict[str, Tensor]:
    whole, weight, out = truth(layout)
    weight.requires_grad_()
    padded = [n if d.keep is None else n // mesh["tp"].size for n, d in zip(SHAPE, layout.dims, strict=True)]
    shape = padded if any(d.keep for d in layout.dims) else None
    local = extract(layout, whole, mesh.coords, mesh.sizes, shape).requires_grad_()
    exchange = choose_exchange(layout, mesh, local)
    gathered = enter(local, exchange)
    back = exit(edit(gathered, weight), gathered, local, exchange)
    back.backward(extract(layout.gradient(), out, mesh.coords, mesh.sizes, shape))
    assert local.grad is not None
    assert weight.grad is not None
    return {
        "gathered": gathered.detach(),
        "back": back.detach(),
        "local gradient": local.grad,
        "weight gradient": weight.grad,
    }


@pytest.mark.parametrize(("cp", "world", "offset"), [(1, 2, 0), (2, 4, 0), (1, 3, 1), (1, 4, 0)])
def test_gather_edit_scatter(cp: int, world: int, offset: int) -> None:
    answers = [a for a in run(world, edits, cp, offset) if a is not None]
    sizes = answers[0][1]
    for name in fitting(sizes):
        layout = EDITED[name]
        whole, weight, out = truth(layout)
        whole.requires_grad_()
        weight.requires_grad_()
        wanted = edit(whole, weight)
        wanted.backward(out)

        def collect(what: str, of: Layout, name: str = name) -> Tensor:
            shards = [
                next(a[2][name][what] for a in answers if all(a[0].get(x, 0) == c for x, c in place.items()))
                for place in coordinates(of, sizes)
            ]
            return assemble(of, shards, sizes)

        assert all(torch.equal(a[2][name]["gathered"], whole) for a in answers), name
        assert torch.allclose(collect("back", layout), wanted), name
        assert torch.allclose(collect("local gradient", layout.gradient()), whole.grad), name
        assert all(torch.allclose(a[2][name]["weight gradient"], weight.grad) for a in answers), name


def uneven() -> Any:
    mesh = make_mesh(1)
    rank = mesh["tp"].coord
    layout = Layout((Dim("t", (Cut("tp"),), uneven=True), Dim("h")))
    local = (
        torch.arange(rank * 2 * 3, dtype=torch.float64).reshape(rank * 2, 3) + 100 * rank
    ).requires_grad_()
    exchange = choose_exchange(layout, mesh, local)
    whole = enter(local, exchange)
    back = exit(whole * torch.arange(len(whole)).unsqueeze(1), whole, local, exchange)
    back.backward(torch.ones_like(back))
    read = gather_to_leader([(layout, local.detach())], mesh, 1 << 20)
    return whole.detach(), back.detach(), local.grad, read[0], local.detach()


def test_uneven_parts_one_of_them_empty() -> None:
    answers = run(3, uneven)
    whole = torch.cat([a[4] for a in answers])
    assert len(whole) == 6
    factor = torch.arange(6.0, dtype=torch.float64).unsqueeze(1)
    assert all(torch.equal(a[0], whole) for a in answers)
    assert torch.equal(torch.cat([a[1] for a in answers]), whole * factor)
    assert torch.equal(torch.cat([a[2] for a in answers]), factor.expand(6, 3))
    assert torch.equal(answers[0][3], whole)
    assert answers[1][3] is None


def reads(cp: int, offset: int, bucket: int) -> Any:
    mesh = make_mesh(cp, offset)
    if not mesh.axes:
        return None
    counts: dict[str, int] = {}
    for name in ("gather", "reduce", "all_reduce", GATHER, "all_gather", "isend", "irecv"):
        changes.setattr(dist, name, _counted(getattr(dist, name), name, counts))
    shards, wholes = [], []
    for layout in LAYOUTS.values():
        if mesh["tp"].size % 2 and any(c.copies > 1 for d in layout.dims for c in d.cuts):
            continue
        whole = truth(layout)[0].to(torch.float32)
        padded = [16 // mesh["tp"].size if d.keep else n for n, d in zip(SHAPE, layout.dims, strict=True)]
        local = extract(
            layout, whole, mesh.coords, mesh.sizes, padded if layout is LAYOUTS["padded"] else None
        )
        shards.append((layout, local))
        wholes.append(whole)
    got = gather_to_leader(shards, mesh, bucket)
    return (
        is_leader(mesh),
        counts,
        [g is not None and torch.equal(g, w) for g, w in zip(got, wholes, strict=True)],
    )


def _counted(function: Any, name: str, counts: dict[str, int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(("cp", "world", "offset"), [(1, 2, 0), (2, 4, 0), (1, 3, 1)])
@pytest.mark.parametrize("bucket", [1 << 20, 0])
def test_reads_reach_the_leader_alone(cp: int, world: int, offset: int, bucket: int) -> None:
    answers = [a for a in run(world, reads, cp, offset, bucket) if a is not None]
    leaders = [a for a in answers if a[0]]
    assert len(leaders) == 1
    assert all(leaders[0][2])
    assert not any(any(a[2]) for a in answers if not a[0])
    assert leaders[0][1].get(GATHER, 0) == 0
    if bucket:  # everything that is cut over an axis travels together, and so do the sums
        assert leaders[0][1] == {"irecv": cp, "reduce": 1}


def up_the_pipeline() -> Any:
    rank = dist.get_rank()
    mesh = Mesh((Axis("pp", 3, rank, dist.group.WORLD, (0, 1, 2)),))
    items = [((rank, i), torch.full((rank, i + 1), rank, dtype=torch.bfloat16)) for i in range(rank + 1)]
    flags = max_over_ranks([rank == 2, 0], mesh)
    return gather_up_pipeline(items, mesh), flags, gather_objects(rank, mesh, ["pp"])


def steps_of_a_transport() -> Any:
    mesh, transport = make_mesh(1), ProcessGroupTransport(make_mesh(1))
    layouts, out = (
        [LAYOUTS["contiguous"], LAYOUTS["replicated"], Layout((Dim("s"), Dim("f", (Cut("tp"),))))],
        [],
    )
    for step, dtype in enumerate([torch.float32, torch.float32, torch.float64, torch.float32]):
        wholes = [torch.arange(256.0).view(SHAPE).to(dtype) + step for _ in layouts]
        for number, (layout, whole) in enumerate(zip(layouts, wholes, strict=True)):
            assert transport.submit(number, extract(layout, whole, mesh.coords, mesh.sizes), layout)
        got = transport.finish()
        right = [torch.equal(tensor, wholes[number]) and tensor.dtype == dtype for number, tensor in got]
        out.append((right, len({t.untyped_storage().data_ptr() for _, t in got})))
    return out


def test_a_step_like_the_last_and_one_of_another_dtype() -> None:
    leader, other = run(2, steps_of_a_transport)
    assert leader == [([True] * 3, 3)] * 4
    assert other == [([], 0)] * 4


LARGE = (1 << 14) + 1  # entries of fp32 that are more than one message packs
STEPS = ([2, 3], [2, 3], [2, 4], [2, LARGE], [])  # the lengths of the tensors of each step


def steps_up_the_pipeline() -> Any:
    rank = dist.get_rank()
    gather = PipelineGather(Mesh((Axis("pp", 2, rank, dist.group.WORLD, (0, 1)),)))
    counts: dict[str, int] = {}
    for name in ("gather", "isend"):
        changes.setattr(dist, name, _counted(getattr(dist, name), name, counts))

    def step(number: int, lengths: list[int]) -> Any:
        counts.clear()
        tensors = [torch.full((n,), number + rank / 2) for n in lengths] + [torch.zeros(0, 3)]
        items = [((f"site{i}", i), t) for i, t in enumerate(tensors)]
        came = gather.gather(items, (number, 10 * number + rank))
        return [(b, tag, tuple(t.shape), t.tolist()) for b, tag, t in came], dict(counts)

    return [step(number, lengths) for number, lengths in enumerate(STEPS)]


def test_up_the_pipeline_what_is_unchanged_is_not_described_again() -> None:
    first, second = run(2, steps_up_the_pipeline)
    for number, lengths in enumerate(STEPS):
        want: list[Any] = []
        for rank in range(2):
            base = number, 10 * number + rank
            values = [((n,), [number + rank / 2] * n) for n in lengths] + [((0, 3), [])]
            want += [(base, (f"site{i}", i), *value) for i, value in enumerate(values)]
        assert first[number][0] == want, number
    # One header; then the description, where it is new, one message of small tensors, and the large one.
    assert [count for _, count in second] == [{"isend": n} for n in (3, 2, 3, 4, 2)]


def windows_up_the_pipeline(most: int) -> Any:
    rank = dist.get_rank()
    flex_config.pending_bytes = most
    gather = PipelineGather(Mesh((Axis("pp", 3, rank, dist.group.WORLD, (0, 1, 2)),)))
    windows: list[int] = []
    wait = pipeline_gather._wait

    def counted(works: Any) -> None:
        windows.append(len(works))
        wait(works)

    changes.setattr(pipeline_gather, "_wait", counted)
    items = [(f"site{i}", torch.full((LARGE,), 10 * rank + i)) for i in range(4)]
    return [
        (tag, t.tolist() == [t[0].item()] * LARGE, t[0].item()) for _, tag, t in gather.gather(items)
    ], windows


@pytest.mark.parametrize("messages", [1, 3, 9])
def test_up_the_pipeline_in_windows(messages: int) -> None:
    first, *others = run(3, windows_up_the_pipeline, messages * LARGE * 8)
    assert first[0] == [(f"site{i}", True, 10 * rank + i) for rank in range(3) for i in range(4)]
    headers, descriptions, *windows = first[1]
    assert (headers, descriptions) == (2, 2)
    assert (sum(windows), max(windows)) == (8, min(messages, 8))
    for came, windows in others:
        assert came == []
        assert sum(windows) == 6
        assert max(windows) == min(messages + 1, 6), "with the header and the description"


def test_up_the_pipeline() -> None:
    answers = run(3, up_the_pipeline)
    got = answers[0][0]
    assert [tag for tag, _ in got] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert all(t.shape == (r, i + 1) and bool((t == r).all()) for (r, i), t in got)
    assert answers[1][0] == []
    assert all(a[1] == [1, 0] and a[2] == [0, 1, 2] for a in answers)


def test_the_plan_is_known_without_a_process() -> None:
    mesh = Mesh((Axis("cp", 2, ranks=(0, 1)), Axis("tp", 4, ranks=(0, 1, 2, 3))))
    plans = {n: [f"{s.op} {s.axis}" for s in plan_read(of, mesh)] for n, of in LAYOUTS.items()}
    assert plans["replicated"] == []
    assert plans["contiguous"] == ["gather tp"]
    assert plans["within context parallel"] == ["gather tp", "gather cp"]
    assert plans["partial within context parallel"] == ["sum tp", "gather cp"]


def devices_by_name() -> dict[str, str]:
    names = ("gloo", "cpu:gloo", "cuda:gloo", "cpu:gloo,cuda:gloo")
    return {name: device_of(dist.new_group(backend=name)) for name in names} | {"of the job": device_of(None)}


def test_the_device_of_a_groups_tensors_whatever_its_backend_is_called() -> None:
    """A backend for CUDA alone, as NCCL is, takes no tensor of the host."""
    (devices,) = run(1, devices_by_name, alone=True)
    hosts = dict.fromkeys(("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "of the job"), "cpu")
    assert devices == hosts | {"cuda:gloo": "cuda"}


def connecting_alone() -> float:
    """How long a rank waits for a host that never connects."""
    changes.setattr(host_groups, "JOIN_SECONDS", 1.0)
    if dist.get_rank():
        return 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        open_host_group("one of two", (0, 1), 0)
    return time.monotonic() - began


def test_a_host_that_does_not_connect_is_not_waited_for_as_long_as_a_collective() -> None:
    waited, _ = run_alone(2, connecting_alone)
    assert 0.5 < waited < 20
