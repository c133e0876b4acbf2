"""What is read goes to the leader in one message for each axis, whatever its site, dtype and layout."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import leader_gather
from megatron_flex.collectives import messages as messages_module
from megatron_flex.collectives.gather_scatter import GATHER
from megatron_flex.collectives.transport.process_group import CopyTapes, ProcessGroupTransport
from megatron_flex.config import flex_config
from megatron_flex.layout import Cut, Dim, Layout, coordinates, extract, replicated
from megatron_flex.mesh import Mesh
from megatron_flex.runtime import Key
from megatron_flex.runtime.recorder import Recorder
from tests.support.pool import run
from tests.support.rank import changes
from tests.unit.internals.test_collectives import _counted, make_mesh

CP, TP = Cut("cp", "zigzag"), Cut("tp")
SITES: list[tuple[Layout, torch.dtype]] = [
    (Layout((Dim("s", (CP, TP)), Dim("h"))), torch.float32),
    (Layout((Dim("s", (CP,)), Dim("h", (TP,), (1, 1)))), torch.bfloat16),
    (Layout((Dim("n", (TP,)), Dim("s", (CP,)))), torch.float64),
    (Layout((Dim("s", (TP,)), Dim("b")), permute=(1, 0)), torch.int64),
    (Layout((Dim("s", (CP,)), Dim("h"))), torch.bool),
    (replicated("s", "h"), torch.float32),
    (Layout((Dim("s"), Dim("v", (TP,), keep=13))), torch.float16),
    (Layout((Dim("s", (CP,)), Dim("h")), partial=("tp",)), torch.float32),
    (Layout((Dim("s"), Dim("h")), partial=("tp",)), torch.float32),
    (Layout((Dim("s"), Dim("h")), partial=("tp",)), torch.bfloat16),
    (Layout((Dim("s"), Dim("h")), partial=("cp",)), torch.float32),
    (Layout((Dim("s"), Dim("h")), partial=("tp", "cp")), torch.float32),
]
ROWS = Layout((Dim("t", (Cut("cp"), Cut("tp")), uneven=True), Dim("h")))
LARGE = [(Layout((Dim("s", (TP,)), Dim("h"))), torch.float32)]
UNEVEN: list[tuple[Layout, torch.dtype]] = [
    (ROWS, torch.float32),
    (Layout((Dim("t", (Cut("tp"),), uneven=True), Dim("h"))), torch.bfloat16),
]
OPS = ("gather", "reduce", "all_reduce", GATHER, "all_gather", "isend", "irecv", "broadcast")


class Kept(dict[Any, Tensor]):
    """Captures that only keep."""

    def add(self, key: Any, tensor: Tensor) -> None:
        self[key] = tensor


def make_recorder(mesh: Mesh, name: str = "session") -> tuple[Recorder, Kept]:
    kept = Kept()
    return Recorder(mesh, kept, name), kept  # type: ignore[arg-type]  # of Captures a recorder uses `add` alone


def whole_of(site: int, step: int, dtype: torch.dtype) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + site)
    return torch.randint(-100, 100, (16, 16), generator=seed).to(dtype)


def lengths_of(layout: Layout, sizes: Any, equal: bool) -> dict[int, list[int]]:
    count = len(coordinates(layout, sizes))
    if equal or not layout.dims[0].uneven:
        return {0: [16 // count] * count}
    odd = [0, 5, 1, 10] if count == 4 else [3, 13]  # one rank has nothing
    return {0: odd}


def key_of(step: int, number: int) -> Key:
    return Key(f"site {number}", step, step, 0, 0)


def read(recorder: Recorder, sites: list[tuple[Layout, torch.dtype]], step: int, equal: bool) -> None:
    mesh = recorder.mesh
    for number, (layout, dtype) in enumerate(sites):
        whole = whole_of(number, step, dtype)
        if layout.dims[-1].keep:
            whole = whole[:, :13]
        if layout.permute:
            whole = whole.T.contiguous()
        padded = (16, 16 // mesh["tp"].size) if layout.dims[-1].keep else None
        lengths = lengths_of(layout, mesh.sizes, equal)
        local = extract(layout, whole, mesh.coords, mesh.sizes, padded, lengths)
        recorder.shard(key_of(step, number), local, layout)
        local.fill_(1)  # a framework may do so


def right(kept: Kept, sites: list[tuple[Layout, torch.dtype]], steps: int) -> bool:
    for step in range(steps):
        for number, (layout, dtype) in enumerate(sites):
            whole = whole_of(number, step, dtype)
            whole = whole[:, :13] if layout.dims[-1].keep else whole.T if layout.permute else whole
            got = kept[key_of(step, number)]
            assert got.dtype == dtype
            assert torch.equal(got, whole), (step, layout.describe())
    return len(kept) == steps * len(sites)


def flushes(cp: int, uneven: bool, equal: bool, most: int, steps: int = 3) -> Any:
    """Counts of each flush, whether messages were sent from where they were recorded, and the leader's."""
    flex_config.bucket_bytes = most
    sites = SITES + (UNEVEN if uneven else [])
    recorder, kept = make_recorder(mesh := make_mesh(cp))
    views: list[bool] = []
    pack = leader_gather.pack

    def looked_at(tensors: Any, widths: Any) -> Tensor:
        out = pack(tensors, widths)
        views.append(out.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr())
        return out

    changes.setattr(leader_gather, "pack", looked_at)
    counts: list[dict[str, int]] = []
    found: dict[str, int] = {}
    for name in OPS:
        changes.setattr(dist, name, _counted(getattr(dist, name), name, found))
    for step in range(steps):
        read(recorder, sites, step, equal)
        assert found == {}, "recording sends nothing"
        views.clear()
        recorder.flush()
        counts.append(dict(found))
        found.clear()
    leads = all(a.coord == 0 for a in mesh)
    return dict(mesh.coords), counts, list(views), right(kept, sites, steps) if leads else not kept


MESSAGES = ("isend", "irecv")  # of two ranks one sends and the other receives


def messages(count: dict[str, int]) -> int:
    return sum(count.get(name, 0) for name in MESSAGES)


@pytest.mark.parametrize(("cp", "world"), [(1, 2), (2, 4)])
def test_one_message_for_each_axis(cp: int, world: int) -> None:
    answers = run(world, flushes, cp, False, False, 1 << 20)
    assert all(a[3] for a in answers)
    for coords, counts, views, _ in answers:
        first = coords["tp"] == 0
        reduces = 2 * (coords["cp"] == 0) + (cp > 1 and coords["cp"] > 0) + (cp > 1 and first)
        for count in counts:
            assert messages(count) == 1 + (cp > 1 and first), coords
            assert {n: c for n, c in count.items() if n not in MESSAGES} == {"reduce": reduces}, coords
        if cp == 1:
            assert all(views), "what was recorded is sent from where it lies"


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("cp", "world"), [(1, 2), (2, 4)])
def test_uneven_parts_travel_with_the_others(cp: int, world: int, equal: bool) -> None:
    answers = run(world, flushes, cp, True, equal, 1 << 20)
    assert all(a[3] for a in answers)
    for coords, counts, _, _ in answers:
        for count in counts:
            assert messages(count) == 1 + (cp > 1 and coords["tp"] == 0), coords
            assert count[GATHER] == cp, "shapes, all in one for each axis"


def test_messages_of_at_most_so_many_bytes() -> None:
    answers = run(2, flushes, 1, True, False, 1000)
    assert all(a[3] for a in answers)
    assert all(messages(count) > 2 for a in answers for count in a[1])


def posting() -> bool:
    """Send between microbatches, while the framework communicates too; flush at the end."""
    flex_config.pending_bytes = 0
    mesh = make_mesh(1)
    recorder, kept = make_recorder(mesh)
    other = torch.ones(1000)
    for step in range(5):
        read(recorder, SITES, step, True)
        recorder.gather_if_large()
        dist.all_reduce(other, group=mesh["tp"].group)
    assert bool((other == 2**5).all())
    recorder.flush()
    return right(kept, SITES, 5) if mesh["tp"].coord == 0 else not kept


def test_what_is_on_its_way_is_not_overwritten() -> None:
    assert all(run(2, posting))


def uneven_in_windows(steps: int) -> Any:
    """How many captures of other lengths wait after each, at two bytes less than two of them have."""
    mesh = make_mesh(1)
    recorder, kept = make_recorder(mesh)
    flex_config.pending_bytes = 2 * 16 * 16 * 4 - 2
    (transport,) = recorder._transports
    assert isinstance(transport, ProcessGroupTransport)
    waiting = []
    for step in range(steps):
        read(recorder, UNEVEN[:1], step, equal=False)
        recorder.gather_if_large()
        waiting.append(len(transport._pending))
    recorder.flush()
    return waiting, right(kept, UNEVEN[:1], steps) if mesh["tp"].coord == 0 else not kept


def test_uneven_parts_are_sent_in_windows() -> None:
    for waiting, good in run(2, uneven_in_windows, 6):
        assert waiting == [0, 1, 0, 1, 0, 1], "at first how long they are is not known"
        assert good


def dropped(failed_on: int) -> Any:
    """Ranks drop two steps, in the second of which one of them has sent nothing; then two that are good."""
    flex_config.pending_bytes = 0
    mesh = make_mesh(1)
    rank = mesh["tp"].coord
    recorder, kept = make_recorder(mesh)
    for step in (10, 11):
        if rank != failed_on or step == 10:
            read(recorder, LARGE, step, True)
            recorder.gather_if_large()
        recorder.drop()
    held = count_in_transit(mesh)
    dist.barrier()
    for step in range(2):
        read(recorder, LARGE, step, True)
        recorder.gather_if_large()
    recorder.flush()
    return held, count_in_transit(mesh), right(kept, LARGE, 2) if rank == 0 else not kept


def count_in_transit(mesh: Mesh) -> int:
    """How many messages over the group of tensor parallel ranks keep their memory."""
    return len(messages_module._in_transit.get(mesh["tp"].group, ()))


@pytest.mark.parametrize("failed_on", [0, 1, 2], ids=["leader", "other", "both alike"])
def test_messages_of_a_dropped_step_are_not_taken_for_others(failed_on: int) -> None:
    answers = run(2, dropped, failed_on)
    assert all(good for _, _, good in answers)
    assert [held for held, _, _ in answers] == [2 - (rank == failed_on) for rank in range(2)]
    assert [left for _, left, _ in answers] == [0, 0], "their memory is kept until later messages have come"


def dropped_with_its_session(sends: tuple[bool, bool]) -> Any:
    """A step is dropped with its session, before its messages meet; the same step of the next one is good.

    Args:
        sends: whether each rank sends or receives in the dropped step.
    """
    flex_config.pending_bytes = 0
    mesh = make_mesh(1)
    rank = mesh["tp"].coord
    for turn in range(2):
        if turn == rank and sends[rank]:
            recorder, _ = make_recorder(mesh, "first")
            read(recorder, LARGE, 0, True)
            recorder.gather_if_large()
            recorder.drop()
            del recorder
            gc.collect()
        dist.barrier()
    recorder, kept = make_recorder(mesh, "second")
    for step in range(2):
        read(recorder, LARGE, step, True)
        recorder.gather_if_large()
    recorder.flush()
    total = torch.ones(3)
    dist.all_reduce(total, group=mesh["tp"].group)  # of the framework, between the same ranks
    return bool((total == 2).all()) and (right(kept, LARGE, 2) if rank == 0 else not kept)


@pytest.mark.parametrize(
    "sends", [(True, True), (True, False), (False, True)], ids=["both", "leader", "other"]
)
def test_messages_of_a_session_that_ended_stop_no_others(sends: tuple[bool, bool]) -> None:
    assert run(2, dropped_with_its_session, sends, timeout=60) == [True, True]


def test_memory_of_a_tape() -> None:
    buffers, made = CopyTapes(), []
    for _ in range(4):
        copies = [buffers.copy(torch.full((n,), float(n)), "tape", 1 << 20) for n in (30000, 1, 70000, 5)]
        assert [c.tolist() == [float(len(c))] * len(c) for c in copies] == [True] * 4
        pieces = buffers.take()
        made.append([p.flat.data_ptr() for p in pieces])
        buffers.give_back(pieces)
    assert len(made[0]) > 1
    assert made[1] != made[0]
    assert made[1] == made[2] == made[3], "one piece, used again"
    assert len(made[1]) == 1
