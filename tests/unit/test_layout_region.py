"""A region of the whole is what `assemble` has there, for every layout, and nothing else is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout import (
    Coords,
    Cut,
    Dim,
    DimIndex,
    Layout,
    RegionIndex,
    assemble,
    assemble_region,
    compact_index,
    coordinates,
    extract,
    find_region,
    first_copy,
    padded_shape,
    take_entries,
    uneven_lengths,
)
from tests.support.messages import raises
from tests.unit.test_layout import SIZES, layouts, make, scatter


@st.composite
def indices(draw: st.DrawFn, length: int) -> DimIndex:
    """Entries of a dim: a range, or a list in any order, also with repeats or empty."""
    if draw(st.booleans()):
        ends = sorted([draw(st.integers(0, length)), draw(st.integers(0, length))])
        return compact_index(range(*ends, draw(st.integers(1, 4))))
    return compact_index(draw(st.lists(st.integers(0, length - 1), max_size=6)) if length else [])


def chosen(whole: Tensor, wanted: list[DimIndex]) -> Tensor:
    for dim, index in enumerate(wanted):
        whole = whole.index_select(dim, torch.tensor(list(index), dtype=torch.int64))
    return whole


class Shards:
    """Shards that count what is asked of them."""

    def __init__(self, layout: Layout, shards: list[Tensor]) -> None:
        self.by = {tuple(c.values()): s for c, s in zip(coordinates(layout, SIZES), shards, strict=True)}
        self.asked = 0

    def __call__(self, coords: Coords, where: RegionIndex) -> Tensor:
        out = take_entries(self.by[tuple(coords.values())], where).clone()
        self.asked += out.numel()
        return out


def test_region_is_what_assemble_has_there() -> None:
    cases: list[Layout] = []
    in_one_shard = [0, 0]

    @settings(max_examples=500, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        layout, shape = data.draw(layouts())
        whole, local = make(layout, shape)
        shards = scatter(layout, whole, local)
        wanted = [data.draw(indices(n)) for n in whole.shape]
        held = Shards(layout, shards)
        found = assemble_region(layout, held, padded_shape(layout, local, SIZES), SIZES, wanted)
        expected = chosen(assemble(layout, shards, SIZES), wanted)
        assert torch.equal(found, expected)
        one = find_region(layout, Shards(layout, shards), padded_shape(layout, local, SIZES), SIZES, wanted)
        in_one_shard[one is not None] += 1
        assert one is None or torch.equal(one, expected)
        room = torch.full([2 * n for n in expected.shape], 7.0)
        out = room[tuple(slice(None, None, 2) for _ in expected.shape)]
        assemble_region(layout, held, padded_shape(layout, local, SIZES), SIZES, wanted, out=out)
        assert torch.equal(out, expected.float())
        assert int((room == 7.0).sum()) >= room.numel() - out.numel()
        held.asked //= 2
        summands = 1
        for axis in layout.partial:
            summands *= SIZES[axis]
        for cut in (c for d in layout.dims for c in d.cuts if c.partial):
            summands *= cut.copies
        assert held.asked == expected.numel() * summands
        cases.append(layout)

    check()
    assert min(in_one_shard) > 20
    cuts = [cut for layout in cases for dim in layout.dims for cut in dim.cuts]
    assert any(cut.order == "zigzag" for cut in cuts)
    assert any(cut.copies > 1 and not cut.partial for cut in cuts)
    assert any(cut.partial for cut in cuts)
    assert any(dim.segments for layout in cases for dim in layout.dims)
    assert any(layout.partial for layout in cases)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_region_of_uneven_parts(data: st.DataObject) -> None:
    layout, _ = data.draw(layouts(uneven=True))
    dims = tuple(replace(d, uneven=bool(d.cuts)) for d in layout.dims)
    layout = replace(layout, dims=dims)
    lengths: dict[int, list[int]] = {}
    full: list[int] = []
    for index, dim in enumerate(dims):
        count = 1
        for cut in dim.cuts:
            count *= SIZES[cut.axis]
        if dim.uneven:
            lengths[index] = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        full.append(sum(lengths[index]) if dim.uneven else data.draw(st.integers(1, 3)))
    order = layout.permute or tuple(range(len(dims)))
    whole = torch.randn([full[i] for i in order], dtype=torch.float64)
    shards = [extract(layout, whole, c, SIZES, lengths=lengths) for c in coordinates(layout, SIZES)]
    assert uneven_lengths(layout, [s.shape for s in shards], SIZES) == lengths
    wanted = [data.draw(indices(n)) for n in whole.shape]
    found = assemble_region(layout, Shards(layout, shards), full, SIZES, wanted, lengths)
    assert torch.equal(found, chosen(whole, wanted))


def test_half_precision_summands_are_rounded_once() -> None:
    layout = Layout((Dim("h"),), partial=("c",))
    shards = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
    found = assemble_region(layout, Shards(layout, shards), [1], SIZES, [range(1)])
    assert found.dtype == torch.bfloat16
    assert found.item() == 260.0  # 259, rounded; in bfloat16 each 256 + 1 is 256 again


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layout = Layout((Dim("s", (Cut("a", "zigzag"),)), Dim("h", (Cut("b"),))))
    whole = torch.arange(8 * 6).reshape(8, 6).remainder(3).to(dtype)
    shards = [extract(layout, whole, c, SIZES) for c in coordinates(layout, SIZES)]
    wanted: list[Any] = [[7, 0, 0], range(1, 6, 2)]
    assert torch.equal(
        assemble_region(layout, Shards(layout, shards), [8, 6], SIZES, wanted), chosen(whole, wanted)
    )


def test_entries_outside_are_refused() -> None:
    layout = Layout((Dim("v", (Cut("a"),), keep=3),))
    shards = [torch.arange(2), torch.arange(2)]
    with raises(LayoutError, "0 to 3", "dim v", 3):
        assemble_region(layout, Shards(layout, shards), [4], SIZES, [range(4)])
    with raises(LayoutError, 2, 1):
        assemble_region(layout, Shards(layout, shards), [4], SIZES, [range(3), range(1)])


def test_first_copy_is_one_of_the_ranks_that_hold_the_same() -> None:
    layout = Layout((Dim("h", (Cut("c", copies=2),)),), partial=("a",))
    assert first_copy(layout, {"c": 3, "a": 1, "b": 2}, SIZES) == {"c": 2, "a": 1}
