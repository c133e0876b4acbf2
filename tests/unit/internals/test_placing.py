"""Placing: all ranks' blocks written to one tensor make what `assemble` makes of their shards."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megatron_flex.collectives.transport import segments
from megatron_flex.collectives.transport.device_copies import _even_rows
from megatron_flex.collectives.transport.segments import SLOT_ROUNDING, Segment, SlotRing
from megatron_flex.collectives.transport.shard_placement import place_shard, sum_planes
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates
from tests.unit.test_layout import SIZES, layouts, make, scatter


def placed(layout: Layout, shards: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the planes that all ranks of the mesh write, and how often each entry was written."""
    everywhere = coordinates(Layout((), tuple(SIZES)), SIZES)
    first = place_shard(layout, tuple(shards[0].shape), everywhere[0], SIZES)
    planes = torch.full((first.planes, *first.shape), float("nan"), dtype=shards[0].dtype)
    times = torch.zeros(planes.shape, dtype=torch.int64)
    order = coordinates(layout, SIZES)
    for coords in everywhere:
        mine = place_shard(layout, tuple(shards[0].shape), coords, SIZES)
        assert (mine.shape, mine.planes) == (first.shape, first.planes)
        mine.write(shards[order.index({a: coords[a] for a in layout.axes})], planes)
        for target, _ in mine.targets(times):
            target += 1
    sum_planes(planes)
    return planes[0], times


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_blocks_of_all_ranks_make_the_whole(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    # Not zeros, as `extract` has them: every summand counts.
    shards = [torch.randn_like(s) if layout.partial else s for s in scatter(layout, whole, local)]
    if layout.partial:
        shards = _equal_copies(layout, shards)
    got, times = placed(layout, shards)
    torch.testing.assert_close(got, assemble(layout, shards, SIZES), rtol=1e-12, atol=1e-12)
    assert got.is_contiguous()
    assert bool((times == 1).all()), "each entry of each plane is written by one rank"


def _equal_copies(layout: Layout, shards: list[Tensor]) -> list[Tensor]:
    copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if not c.partial}
    order = coordinates(layout, SIZES)
    return [shards[order.index({a: n - n % copies.get(a, 1) for a, n in at.items()})] for at in order]


def test_halves_are_added_in_fp32_and_rounded_once() -> None:
    planes = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    sum_planes(planes)
    assert planes[0].item() == 258


def test_rows_of_a_pitched_copy() -> None:
    whole = torch.empty(4, 6, 8)
    assert _even_rows(whole[:, :, 2:5]) == (24, 3, 8)
    assert _even_rows(whole[:, 1:3]) == (4, 16, 48)
    assert _even_rows(whole) == (1, 192, 192)
    assert _even_rows(whole[:, 1:3, 2:5]) is None


# -- memory ------------------------------------------------------------------------------------------------


def test_a_slot_is_written_again_only_when_nobody_has_a_tensor_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FIRST", SLOT_ROUNDING)
    ring = SlotRing(str(tmp_path), 2 * SLOT_ROUNDING)
    first = ring.take(SLOT_ROUNDING)
    assert first is not None
    x, y = first.segment.give([(0, (4,), torch.float32), (64, (2, 3), torch.bfloat16)])
    flat = y.flatten()[2:]
    second = ring.take(SLOT_ROUNDING)
    assert second is not None
    assert second is not first
    del x, y
    gc.collect()
    held = second.segment.give([(0, (4,), torch.float32)])
    assert ring.take(SLOT_ROUNDING) is None, "a view of a view still looks at the first"
    assert "FLEX_SHARED_BYTES" in ring.lacking
    assert ring.taken(second, SLOT_ROUNDING) is None
    del flat
    assert ring.take(SLOT_ROUNDING) is first
    del held
    assert len(ring.slots) == 2


def test_what_is_saved_of_a_tensor_is_that_tensor(tmp_path: Path) -> None:
    slot = SlotRing(str(tmp_path), SLOT_ROUNDING).take(SLOT_ROUNDING)
    assert slot is not None
    slot.segment.tensor(64, (3,), torch.float64).copy_(torch.tensor([1.0, 2.0, 3.0]))
    (given_,) = slot.segment.give([(64, (3,), torch.float64)])
    saved = pickle.dumps(given_)
    assert len(saved) < 1000
    assert pickle.loads(saved).tolist() == [1.0, 2.0, 3.0]


def test_a_forked_process_keeps_what_it_saw(tmp_path: Path) -> None:
    ring = SlotRing(str(tmp_path), 64 << 20)
    slot = ring.take(SLOT_ROUNDING)
    assert slot is not None
    (kept,) = slot.segment.give([(0, (4,), torch.int32)])
    kept.fill_(7)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0 if kept.tolist() == [7] * 4 else 1)
    del kept
    again = ring.take(SLOT_ROUNDING)
    assert again is not None
    assert again is not slot
    again.segment.tensor(0, (4,), torch.int32).fill_(9)
    os.write(theirs, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_room_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SlotRing(str(tmp_path / "absent"), 1 << 30).take(1) is None
    full = SlotRing(str(tmp_path), 1 << 30)

    def fails(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    assert full.take(1) is None
    assert "No space left" in full.lacking


def test_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Segment(segments.create_segment_file(str(tmp_path), SLOT_ROUNDING), SLOT_ROUNDING)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "O_TMPFILE", 0)  # a file system that cannot do so: the folder itself is opened
    Segment(segments.create_segment_file(str(tmp_path), SLOT_ROUNDING), SLOT_ROUNDING)
    assert not list(tmp_path.iterdir())


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
    last = place_shard(layout, (4,), {"a": 1, "b": 0, "c": 0}, SIZES)
    assert last.shape == (5,)
    assert last.blocks == (((slice(4, 5),), (slice(0, 1),)),)
