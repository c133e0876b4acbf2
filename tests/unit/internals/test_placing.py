"""Places of shards in shared memory: all ranks' blocks written to one tensor make the full tensor."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings

from megatron_flex.collectives.transport import segments
from megatron_flex.collectives.transport.device_copies import _even_rows
from megatron_flex.collectives.transport.segments import ROUNDING, SegmentPool, SharedSegment, map_segment
from megatron_flex.collectives.transport.shard_targets import find_targets
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, is_partial
from tests.unit.test_layout import SIZES, layouts, make, scatter


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_blocks_of_all_ranks_make_the_whole(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    assume(not is_partial(layout, SIZES))
    whole, local = make(layout, shape)
    shards = scatter(layout, whole, local)
    wanted = assemble(layout, shards, SIZES)
    entries, times = (
        torch.full((wanted.numel() + 3,), float("nan"), dtype=wanted.dtype),
        torch.zeros(wanted.numel() + 3, dtype=torch.int64),
    )
    order, sizes = coordinates(layout, SIZES), tuple(SIZES.items())
    for coords in coordinates(Layout((), tuple(SIZES)), SIZES):
        shard = shards[order.index({a: coords[a] for a in layout.axes})]
        for target in find_targets(layout, shard.shape, tuple(coords.items()), sizes):
            target.view(entries, 3).copy_(shard if target.source is None else shard[target.source])
            target.view(times, 3).add_(1)
    assert torch.equal(entries[3:].view(wanted.shape), wanted)
    assert bool((times[3:] == 1).all()), "each entry is written by one rank"
    assert bool((times[:3] == 0).all())


def test_rows_of_a_pitched_copy() -> None:
    whole = torch.empty(4, 6, 8)
    assert _even_rows(whole[:, :, 2:5]) == (24, 3, 8)
    assert _even_rows(whole[:, 1:3]) == (4, 16, 48)
    assert _even_rows(whole) == (1, 192, 192)
    assert _even_rows(whole[:, 1:3, 2:5]) is None


# -- memory ------------------------------------------------------------------------------------------------


def test_a_segment_is_written_again_only_when_nobody_has_a_tensor_of_it(tmp_path: Path) -> None:
    pool = SegmentPool(str(tmp_path), 2 * ROUNDING)
    first = pool.make(ROUNDING)
    assert first is not None
    x, y = pool.segments[first].segment.lend([(0, (4,), torch.float32), (64, (2, 3), torch.bfloat16)])
    flat = y.flatten()[2:]
    assert pool.find_free(1) == []
    second = pool.make(ROUNDING)
    assert second is not None
    assert pool.find_free(1) == [second]
    assert pool.find_free(1, besides=second) == []
    del x, y
    gc.collect()
    assert pool.find_free(1) == [second], "a view of a view still looks at the first"
    assert pool.make(1) is None
    assert "FLEX_SHARED_BYTES" in pool.lacking
    del flat
    assert pool.find_free(ROUNDING) == [first, second]
    assert pool.find_free(ROUNDING + 1) == []
    assert [*pool.segments] == [first, second], "ranks may still look for their files"
    pool.unlink([first, second])  # all ranks have mapped them
    assert pool.find_free(ROUNDING + 1) == []
    assert pool.segments == {}
    assert pool.make(1) not in (first, second), "other ranks may have those mapped"


def test_a_pool_has_few_segments(tmp_path: Path) -> None:
    pool = SegmentPool(str(tmp_path), 1 << 30)
    assert [pool.make(1) for _ in range(segments.MAX_SEGMENTS + 1)] == [*range(segments.MAX_SEGMENTS), None]
    assert str(segments.MAX_SEGMENTS) in pool.lacking


def test_what_is_saved_of_a_tensor_is_that_tensor(tmp_path: Path) -> None:
    segment = SharedSegment(tmp_path / "file", ROUNDING).segment
    segment.entries(torch.float64)[8:11].copy_(torch.tensor([1.0, 2.0, 3.0]))
    (lent,) = segment.lend([(64, (3,), torch.float64)])
    saved = pickle.dumps(lent)
    assert len(saved) < 1000
    assert pickle.loads(saved).tolist() == [1.0, 2.0, 3.0]


def test_no_room_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SegmentPool(str(tmp_path / "absent"), 1 << 30).make(1) is None
    full = SegmentPool(str(tmp_path), 1 << 30)

    def fails(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    assert full.make(1) is None
    assert "No space left" in full.lacking
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_a_name_until_it_is_mapped(tmp_path: Path) -> None:
    shared = SharedSegment(tmp_path / "file", ROUNDING)
    other = map_segment(tmp_path / "file")
    shared.unlink()
    assert list(tmp_path.iterdir()) == []
    shared.segment.entries(torch.int64)[:2] = torch.tensor([5, 6])
    assert other.entries(torch.int64)[:2].tolist() == [5, 6]
    SharedSegment(tmp_path / "forgotten", ROUNDING)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    names = {
        "dead": f"{segments.PREFIX}{os.getuid()}-{child}-00ff",
        "alive": f"{segments.PREFIX}{os.getuid()}-{os.getpid()}-00ff",
        "another user's": f"{segments.PREFIX}{os.getuid() + 1}-{child}-00ff",
        "another program's": "sem.mp-0",
    }
    for name in names.values():
        (tmp_path / name).write_bytes(b"x")
    segments.remove_stale_files(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == set(names.values()) - {names["dead"]}


def test_a_layout_with_padding_is_cut_at_what_is_real() -> None:
    layout = Layout((Dim("v", (Cut("a"),), keep=5),))
    coords = (("a", 1), ("b", 0), ("c", 0))
    (target,) = find_targets(layout, torch.Size((4,)), coords, tuple(SIZES.items()))
    assert (target.shape, target.offset, target.source) == ((1,), 4, (slice(0, 1),))
