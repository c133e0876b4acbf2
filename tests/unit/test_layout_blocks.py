"""The blocks of all ranks are the full tensor: each entry once in each plane, at its place in the shard."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout, coordinates, count_parts, padded_shape, spans
from megatron_flex.layout.blocks import (
    Block,
    blocks,
    first_copy,
    is_partial,
    owned_blocks,
    partial_plane,
)
from tests.support.messages import raises
from tests.unit.test_layout import SIZES, layouts, make


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_blocks_are_what_each_entry_by_itself_is(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    """The index of an entry of the full tensor, looked up at its place in the shard, and the padding."""
    layout, shape = drawn
    _, local = make(layout, shape)
    full = padded_shape(layout, local, SIZES)
    kept = [n if d.keep is None else min(n, d.keep) for n, d in zip(full, layout.dims, strict=True)]
    for place in coordinates(layout, SIZES):
        indices = [
            torch.tensor([i for a, b in spans(d, n, place, SIZES) for i in range(a, b)])
            for d, n in zip(layout.dims, full, strict=True)
        ]
        covered = torch.zeros(local, dtype=torch.int64)
        for target, source in blocks(layout, place, SIZES, full):
            covered[source] += 1
            for index, there, here in zip(indices, target, source, strict=True):
                assert index[here].tolist() == list(range(there.start, there.stop))
                assert there.start < there.stop
        real = [index < n for index, n in zip(indices, kept, strict=True)]
        expected = torch.ones(local, dtype=torch.bool)
        for dim, row in enumerate(real):
            expected &= row.reshape([-1 if d == dim else 1 for d in range(len(real))])
        assert torch.equal(covered, expected.long())


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_each_entry_is_owned_once_in_each_plane(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    _, local = make(layout, shape)
    full = padded_shape(layout, local, SIZES)
    places = coordinates(layout, SIZES)
    planes = partial_plane(layout, places[0], SIZES)[0]
    assert is_partial(layout, SIZES) == (planes > 1)
    times = torch.zeros((planes, *shape), dtype=torch.int64)
    for owned in owned_blocks(layout, SIZES, full):
        assert owned.coords == places[owned.shard] == first_copy(layout, owned.coords, SIZES)
        assert owned.blocks == blocks(layout, owned.coords, SIZES, full)
        for target, _ in owned.blocks:
            times[owned.plane][target] += 1
    assert bool((times == 1).all())
    spare = [c for c in places if first_copy(layout, c, SIZES) != c]
    assert all(
        blocks(layout, c, SIZES, full) == blocks(layout, first_copy(layout, c, SIZES), SIZES, full)
        for c in spare
    )


def test_uneven_shards_follow_their_lengths() -> None:
    layout = Layout((Dim("t", (Cut("b"),), uneven=True), Dim("h")))
    found = [blocks(layout, {"b": c}, SIZES, (5, 2), {0: [2, 0, 3]}) for c in range(3)]
    assert found == [
        (Block((slice(0, 2), slice(0, 2)), (slice(0, 2), slice(0, 2))),),
        (),
        (Block((slice(2, 5), slice(0, 2)), (slice(0, 3), slice(0, 2))),),
    ]
    assert blocks(layout, {"b": 0}, SIZES, (5, 2), {0: [5, 0, 0]})[0].target[0] == slice(0, 5)
    with raises(LayoutError, "t", 5):
        blocks(layout, {"b": 0}, SIZES, (5, 2))


def test_padding_is_in_no_block() -> None:
    layout = Layout((Dim("v", (Cut("c"),), keep=5),))
    assert [blocks(layout, {"c": c}, SIZES, (8,)) for c in range(4)] == [
        (Block((slice(0, 2),), (slice(0, 2),)),),
        (Block((slice(2, 4),), (slice(0, 2),)),),
        (Block((slice(4, 5),), (slice(0, 1),)),),
        (),
    ]


def test_summands_are_counted_in_the_order_of_ranks() -> None:
    layout = Layout((Dim("h", (Cut("c", copies=2, partial=True),)),), partial=("a",))
    planes = [partial_plane(layout, {"c": c, "a": a}, SIZES) for c in range(4) for a in range(2)]
    assert planes == [(4, 0), (4, 1), (4, 2), (4, 3)] * 2
    assert partial_plane(layout, {"c": 1}, {"c": 1, "a": 1}) == (1, 0)
    assert first_copy(layout, {"c": 3, "a": 1}, SIZES) == {"c": 3, "a": 1}, "summands are no copies"
    assert count_parts(layout.dims[0], SIZES) == 2


def test_a_scalar_is_one_block() -> None:
    assert blocks(Layout(()), {}, SIZES, ()) == (Block((), ()),)
