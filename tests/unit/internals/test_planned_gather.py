"""Plans of gathers to the leader: what it reads out of the messages of all ranks, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_flex.collectives.messages import BufferPool, align_size, pack
from megatron_flex.collectives.planned_gather import (
    GatheredShard,
    GatherPlan,
    PlannedGather,
    plan_gather,
)
from megatron_flex.layout import Cut, Dim, Layout, extract, replicated
from megatron_flex.mesh import Axis, Mesh

LAST = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),))))
MIDDLE = Layout((Dim("s"), Dim("b", (Cut("tp"),)), Dim("h")))
FIRST = Layout((Dim("s", (Cut("tp"),)), Dim("b"), Dim("h")))
FULL = replicated("s", "b", "h")
SHAPE = (4, 8, 12)
MOST = 1 << 20


def mesh_of(size: int, coord: int = 0) -> Mesh:
    return Mesh((Axis("tp", size, coord, None, tuple(range(size))),))


def full_tensor(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 100, SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_the_leader_reads_what_was_cut(size: int) -> None:
    layouts = [LAST, FULL, FIRST, MIDDLE, LAST]
    dtypes = [torch.float32, torch.float16, torch.bool, torch.float64, torch.bfloat16]
    wholes = [full_tensor(seed, dtype) for seed, dtype in enumerate(dtypes)]
    messages = []
    for coord in reversed(range(size)):
        mesh = mesh_of(size, coord)
        shards = [extract(x, w, mesh.coords, mesh.sizes) for x, w in zip(layouts, wholes, strict=True)]
        needed = [layout is not FULL or coord == 0 for layout in layouts]
        captures = [
            GatheredShard(layout, shard.shape, shard.dtype, need)
            for layout, shard, need in zip(layouts, shards, needed, strict=True)
        ]
        plan = plan_gather(captures, mesh, MOST)
        assert plan is not None
        assert plan.sent == (0, 2, 3, 4)
        assert (plan.reads[0] is None) == (coord > 0), "the leader alone reads"
        messages.append(pack([shards[n] for n in plan.sent], plan.widths))
    rows = torch.stack([torch.nn.functional.pad(m, (0, plan.row - len(m))) for m in reversed(messages)])
    for read, whole in zip(plan.reads, wholes, strict=True):
        if read is not None:
            got = read.read(rows.flatten().view(read.dtype))
            assert torch.equal(got, whole)
            assert got.is_contiguous()
            assert got.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


def test_a_message_that_is_the_full_tensor_is_copied() -> None:
    shape = torch.Size((2, 8))
    layout = Layout((Dim("s", (Cut("tp"),)), Dim("h")))
    plan = plan_gather([GatheredShard(layout, shape, torch.float32, True)], mesh_of(2), MOST)
    assert plan is not None
    assert plan.reads[0] is not None
    rows = torch.arange(32.0).view(torch.uint8)
    got = plan.reads[0].read(rows.view(torch.float32))
    rows.zero_()
    assert got.tolist() == torch.arange(32.0).view(4, 8).tolist()


def capture(layout: Layout, shape: tuple[int, ...] = (4, 8, 6), needed: bool = True) -> GatheredShard:
    return GatheredShard(layout, torch.Size(shape), torch.float32, needed)


UNEVEN = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),), uneven=True)))
PADDED = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),), keep=11)))
SEGMENTS = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),), (1, 1))))
TRANSPOSED = replace(LAST, permute=(1, 0, 2))
PARTIAL = Layout((Dim("s"), Dim("b"), Dim("h")), partial=("tp",))


@pytest.mark.parametrize("layout", [UNEVEN, PADDED, SEGMENTS, TRANSPOSED, PARTIAL])
def test_others_have_no_plan(layout: Layout) -> None:
    assert plan_gather([capture(LAST), capture(layout)], mesh_of(2), MOST) is None


def test_large_and_empty_captures_have_no_plan() -> None:
    assert plan_gather([capture(LAST)] * 2, mesh_of(2), align_size(4 * 8 * 6 * 4) * 2) is not None
    assert plan_gather([capture(LAST)] * 2, mesh_of(2), align_size(4 * 8 * 6 * 4) * 2 - 1) is None
    assert plan_gather([capture(LAST, (4, 8, 1 << 14))], mesh_of(2), 1 << 30) is None
    assert plan_gather([capture(LAST, (4, 0, 6))], mesh_of(2), MOST) is None


def test_nothing_to_send_needs_no_other_rank() -> None:
    plan = plan_gather([capture(FULL), capture(FULL)], mesh_of(2), MOST)
    assert plan == GatherPlan(None, (), (), 0, (None, None), True)
    tensors = [torch.ones(2), torch.zeros(3)]
    assert PlannedGather(plan, tensors).wait() == tensors
    plan = plan_gather([capture(FULL, needed=False)], mesh_of(2, 1), MOST)
    assert plan is not None
    assert PlannedGather(plan, [None]).wait() == [None]


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
