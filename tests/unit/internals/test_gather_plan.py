"""Plans of gathers to the leader: what it reads out of the messages of all ranks, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_flex.collectives import leader_gather
from megatron_flex.collectives.gather_plan import SMALL_MESSAGE_BYTES, CapturedShard, GatherPlan, plan_gather
from megatron_flex.collectives.leader_gather import ShardGather
from megatron_flex.collectives.messages import BufferPool, PendingMessages, align_size, pack
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout, extract, full_shape, replicated
from megatron_flex.mesh import Axis, Mesh
from tests.support.messages import raises

TP = Cut("tp")
LAST = Layout((Dim("s"), Dim("b"), Dim("h", (TP,))))
MIDDLE = Layout((Dim("s"), Dim("b", (TP,)), Dim("h")))
FIRST = Layout((Dim("s", (TP,)), Dim("b"), Dim("h")))
FULL = replicated("s", "b", "h")
PADDED = Layout((Dim("s"), Dim("b"), Dim("h", (TP,), keep=11)))
SEGMENTS = Layout((Dim("s"), Dim("b"), Dim("h", (TP,), (1, 1, 1))))
TRANSPOSED = replace(MIDDLE, permute=(1, 0, 2))
COPIES = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp", copies=2),))))
UNEVEN = Layout((Dim("s"), Dim("b"), Dim("h", (TP,), uneven=True)))
SHAPE = (4, 8, 12)
MOST = 1 << 20


def mesh_of(size: int, coord: int = 0) -> Mesh:
    return Mesh((Axis("tp", size, coord, None, tuple(range(size))),))


def full_tensor(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 100, SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard_of(layout: Layout, whole: Tensor, mesh: Mesh) -> Tensor:
    padded = [12 // mesh["tp"].size if d.keep else n for n, d in zip(whole.shape, layout.dims, strict=True)]
    return extract(layout, whole, mesh.coords, mesh.sizes, padded if layout is PADDED else None)


def planned(shards: list[tuple[Layout, Tensor]], mesh: Mesh, most: int = MOST) -> GatherPlan:
    described = tuple(CapturedShard.from_layout(layout, t.shape, t.dtype, mesh) for layout, t in shards)
    return plan_gather(described, mesh, most)


@pytest.mark.parametrize("kept", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_leader_reads_what_was_cut(size: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr("megatron_flex.collectives.gather_plan.SMALL_MESSAGE_BYTES", 0)
    layouts = [LAST, FULL, FIRST, MIDDLE, PADDED, SEGMENTS, TRANSPOSED, COPIES, LAST]
    dtypes = [torch.float32, torch.float16, torch.bool, torch.float64, torch.bfloat16]
    wholes = [full_tensor(n, dtypes[n % len(dtypes)]) for n in range(len(layouts))]
    wholes[4] = wholes[4][..., :11]
    wholes[6] = wholes[6].transpose(0, 1).contiguous()
    messages = []
    for coord in reversed(range(size)):
        mesh = mesh_of(size, coord)
        shards = [(x, shard_of(x, w, mesh)) for x, w in zip(layouts, wholes, strict=True)]
        plan = planned(shards, mesh)
        ((message,),) = plan.messages
        assert [n for n, _ in message.captures] == [0, 2, 3, 4, 5, 6, 7, 8]
        assert message.kept == kept
        assert any(plan.reads) == (coord == 0), "the leader alone reads"
        messages.append(pack([shards[n][1] for n, _ in message.captures], message.widths))

    def receive(mine: Tensor, rows: list[Tensor], axis: Axis, tag: int) -> PendingMessages:
        assert torch.equal(mine, messages[-1])
        for row, arrived in zip(rows, reversed(messages[:-1]), strict=True):
            row.copy_(arrived)
        return PendingMessages()

    monkeypatch.setattr(leader_gather, "begin_gather_to_first", receive)
    gather = ShardGather(plan, [tensor for _, tensor in shards], mesh)
    received = {b.untyped_storage().data_ptr() for b in gather._buffers}
    for got, whole in zip(gather.wait(), wholes, strict=True):
        assert got is not None
        assert torch.equal(got, whole)
        assert got.is_contiguous()
        assert got.untyped_storage().data_ptr() not in received


def test_plans_are_found_by_value() -> None:
    transport = ProcessGroupTransport(mesh_of(2))
    shards = [(layout, torch.Size((4, 8, 6)), torch.float32) for layout in (LAST, FULL)]
    again = [(replace(x, dims=tuple(replace(d) for d in x.dims)), *rest) for x, *rest in shards]
    others = [(layout, shape, torch.float16) for layout, shape, _ in shards]
    plans = [
        transport._plan(tuple(transport._shard_of(*a) for a in given), most=most)
        for given, most in ((shards, MOST), (again, MOST), (others, MOST), (shards, 1))
    ]
    assert plans[1] is plans[0]
    assert plans[2] is not plans[0]
    assert plans[3] is not plans[0]


def test_messages_of_at_most_so_many_bytes() -> None:
    width = align_size(4 * 8 * 6 * 4)
    shards = [(LAST, torch.empty(4, 8, 6))] * 4
    for most, count in ((4 * width, 1), (4 * width - 1, 2), (2 * width, 2), (width, 4), (0, 4)):
        (messages,) = planned(shards, mesh_of(2), most).messages
        assert len(messages) == count
        assert [n for m in messages for n, _ in m.captures] == [0, 1, 2, 3]
    large = torch.empty(SMALL_MESSAGE_BYTES // 4 + 1, 1, 1, device="meta")
    (((message,),),) = [planned([(LAST, large)], mesh_of(2), 1 << 30).messages]
    assert not message.kept


def test_nothing_to_send_needs_no_other_rank() -> None:
    tensors = [torch.ones(2, 1, 1), torch.zeros(3, 1, 1)]
    plan = planned([(FULL, t) for t in tensors], mesh_of(2))
    assert plan.messages == ()
    got = ShardGather(plan, tensors, mesh_of(2)).wait()
    assert [g is t for g, t in zip(got, tensors, strict=True)] == [True, True]
    plan = planned([(FULL, tensors[0])], mesh_of(2, 1))
    assert ShardGather(plan, [None], mesh_of(2, 1)).wait() == [None]


def test_shards_of_other_lengths() -> None:
    shards = tuple(
        replace(
            CapturedShard.from_layout(UNEVEN, (4, 8, n), torch.float32, mesh_of(2)),
            shapes=((4, 8, 5), (4, 8, 7)),
        )
        for n in (5, 7)
    )
    assert shards[0].full_bytes is None, "before the ranks exchange their lengths"
    plan = plan_gather(shards, mesh_of(2), MOST)
    (((message,),), reads) = plan.messages, plan.reads
    assert message.widths == (4 * 8 * 7 * 4,) * 2
    assert [r.shape for r in reads if r is not None] == [(4, 8, 12)] * 2


def test_a_shape_that_does_not_fit() -> None:
    with raises(LayoutError, (4, 8)):
        CapturedShard.from_layout(LAST, (4, 8), torch.float32, mesh_of(2))
    shard = CapturedShard.from_layout(PADDED, (4, 8, 6), torch.bfloat16, mesh_of(2))
    assert shard.full_bytes == 2 * 4 * 8 * 11
    assert full_shape(PADDED, shard.shape, mesh_of(2).sizes) == (4, 8, 11)


def test_memory_of_small_gathers() -> None:
    pool, like = BufferPool(), torch.ones(2, 3)
    received, shards = pool.find_receiver(2, like)
    assert received.shape == (4, 3)
    assert [s.data_ptr() for s in shards] == [received.data_ptr(), received[2:].data_ptr()]
    assert pool.find_receiver(2, torch.zeros(2, 3)).received is received, "kept"
    for other in (like.half(), torch.ones(3, 2)):
        found = pool.find_receiver(2, other)
        assert (found.received.dtype, found.received.shape[1:]) == (other.dtype, other.shape[1:])
    with torch.inference_mode():
        assert not pool.find_receiver(3, torch.ones(2, 3)).received.is_inference()
