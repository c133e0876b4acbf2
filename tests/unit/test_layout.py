"""Layouts: assembling and taking apart are inverse, and gradients are what brute force says."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout import (
    Cut,
    Dim,
    Layout,
    assemble,
    coordinates,
    count_parts,
    extract,
    find_joined_dim,
    first_copy,
    full_shape,
    padded_shape,
    replicated,
    spans,
)
from tests.support.messages import assert_names, raises

SIZES = {"a": 2, "b": 3, "c": 4}


@st.composite
def layouts(draw: st.DrawFn, uneven: bool = False) -> tuple[Layout, tuple[int, ...]]:
    """A layout over axes a, b, c with the shape of a whole that fits it."""
    free = draw(st.permutations(sorted(SIZES)))
    dims, shape = [], []
    for index in range(draw(st.integers(1, 3))):
        cuts, segments, keep = [], (1,), None
        for _ in range(draw(st.integers(0, min(2, len(free))))):
            axis = free.pop()
            copies = draw(st.sampled_from([n for n in (1, 2, SIZES[axis]) if SIZES[axis] % n == 0]))
            order = "contiguous" if uneven else draw(st.sampled_from(["contiguous", "zigzag"]))
            cuts.append(
                Cut(axis, order, 1 if uneven else copies, draw(st.booleans()) if copies > 1 else False)
            )
        if not uneven and draw(st.booleans()):
            segments = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
        dim = Dim(f"d{index}", tuple(cuts), segments, uneven=uneven)
        unit = count_parts(dim, SIZES) * 2 ** sum(c.order == "zigzag" for c in cuts)
        length = unit * sum(segments) * draw(st.integers(1, 2))
        if segments == (1,) and not uneven and len(cuts) == 1 and draw(st.booleans()):
            keep = draw(st.integers(1, length))
        dims.append(replace(dim, keep=keep))
        shape.append(keep or length)
    partial = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
    permute = tuple(draw(st.permutations(range(len(dims))))) if draw(st.booleans()) else None
    layout = Layout(tuple(dims), partial, permute=permute)
    full = [d * 1 for d in shape]
    return layout, tuple(full)


def scatter(layout: Layout, whole: Tensor, local_shape: tuple[int, ...]) -> list[Tensor]:
    return [extract(layout, whole, c, SIZES, local_shape) for c in coordinates(layout, SIZES)]


def make(layout: Layout, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """A whole in the single-device order of dims, and the shape of each padded shard."""
    ordered = shape if layout.permute is None else tuple(shape[i] for i in layout.permute)
    whole = torch.randn(ordered, dtype=torch.float64)
    local = []
    for dim, n in zip(layout.dims, shape, strict=True):
        count = count_parts(dim, SIZES) * 2 ** sum(c.order == "zigzag" for c in dim.cuts)
        local.append(-(-n // count) * count // count_parts(dim, SIZES))
    return whole, tuple(local)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_assemble_and_extract_are_inverse(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    shards = scatter(layout, whole, local)
    assert full_shape(layout, shards[0].shape, SIZES) == tuple(whole.shape)
    back = assemble(layout, shards, SIZES)
    assert torch.equal(back, whole)
    again = scatter(layout, back, local)
    assert all(torch.equal(x, y) for x, y in zip(shards, again, strict=True))


def by_entries(layout: Layout, shards: list[Tensor], sizes: dict[str, int]) -> Tensor:
    """The whole, each entry by itself: what `assemble` must give."""
    full = padded_shape(layout, shards[0].shape, sizes)
    whole = torch.zeros(full, dtype=shards[0].dtype)
    for shard, place in zip(shards, coordinates(layout, sizes), strict=True):
        if first_copy(layout, place, sizes) != place:
            continue
        rows = [
            torch.tensor([i for a, b in spans(d, n, place, sizes) for i in range(a, b)])
            for d, n in zip(layout.dims, full, strict=True)
        ]
        whole.index_put_(torch.meshgrid(*rows, indexing="ij"), shard, accumulate=True)
    for index, dim in enumerate(layout.dims):
        whole = whole.narrow(index, 0, min(full[index], dim.keep or full[index]))
    return whole if layout.permute is None else whole.permute(layout.permute)


@settings(max_examples=300, deadline=None)
@given(layouts(), st.booleans())
def test_assemble_into_a_given_tensor(drawn: tuple[Layout, tuple[int, ...]], strided: bool) -> None:
    layout, shape = drawn
    layout = replace(layout, partial=())
    whole, local = make(layout, shape)
    shards = [torch.randn(local, dtype=torch.float64) for _ in coordinates(layout, SIZES)]
    wanted = by_entries(layout, shards, SIZES)
    out = torch.full((*whole.shape, 2), torch.nan, dtype=torch.float64)[..., 0]
    out = out if strided else out.contiguous()
    given = assemble(layout, shards, SIZES, out=out)
    assert given is out
    assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-12)  # sums of several in any order
    assert torch.equal(assemble(layout, shards, SIZES), out)
    assert torch.equal(assemble(layout, torch.stack(shards), SIZES), out)
    if (dim := find_joined_dim(layout, local, SIZES)) is not None:
        assert torch.equal(torch.cat(shards, dim), out)
    if not any(c.partial for d in layout.dims for c in d.cuts):
        assert torch.equal(out, wanted)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_a_part_may_be_a_view_where_it_is_contiguous(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    for place in coordinates(layout, SIZES):
        part = extract(layout, whole, place, SIZES, local, alias=True)
        assert part.is_contiguous()
        assert torch.equal(part, extract(layout, whole, place, SIZES, local))
    alone = extract(replicated("s"), whole.flatten(), {}, SIZES, alias=True)
    assert alone.data_ptr() == whole.data_ptr()


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_every_entry_of_the_whole_lives_somewhere_once(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    _, local = make(layout, shape)
    full = padded_shape(layout, local, SIZES)
    for dim, length in zip(layout.dims, full, strict=True):
        plain = replace(dim, cuts=tuple(replace(c, copies=1, partial=False) for c in dim.cuts))
        if length % (count_parts(plain, SIZES) * 2 * sum(dim.segments)):
            continue
        axes = [c.axis for c in dim.cuts]
        seen = [
            i
            for place in coordinates(Layout((plain,)), SIZES)
            for a, b in spans(plain, length, place, SIZES)
            for i in range(a, b)
        ]
        assert sorted(seen) == list(range(length)), axes


@settings(max_examples=200, deadline=None)
@given(layouts(), st.booleans())
def test_gradient_layout_against_brute_force(drawn: tuple[Layout, tuple[int, ...]], share: bool) -> None:
    """Differentiate by every shard and assemble: the result is the whole's gradient.

    What a partial tensor's summands, or the copies of one part, mean for the loss follows from the layout:
    a summand enters through the sum; of equal copies each is used by its own rank, for its share of the loss.
    """
    layout, shape = drawn
    free = [a for a in SIZES if a not in layout.axes]
    if share and free:
        layout = replace(layout, shared=(free[0],))
    # tensors, not their gradients: here no copy is a summand
    dims = tuple(replace(d, cuts=tuple(replace(c, partial=False) for c in d.cuts)) for d in layout.dims)
    layout = replace(layout, dims=dims)
    whole, local = make(layout, shape)
    everyone = coordinates(replace(layout, partial=layout.partial + layout.shared, shared=()), SIZES)
    shards = [extract(layout, whole, c, SIZES, local).requires_grad_(True) for c in everyone]
    weights = [torch.randn_like(whole) for _ in everyone]
    copies = [c for d in layout.dims for c in d.cuts if c.copies > 1]
    total, true = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole)
    for index, place in enumerate(everyone):
        # the rank's own share of the loss: it reads its copy and, of all else, any rank's
        if any(place[a] for a in layout.axes if a not in [c.axis for c in copies]):
            continue
        if any(place[c.axis] >= c.copies for c in copies):
            continue
        seen = assemble(layout, _as_seen_from(layout, shards, everyone, place), SIZES)
        total = total + (seen * weights[index]).sum()
        true += weights[index]
    grads = torch.autograd.grad(total, shards, allow_unused=True)
    filled = [torch.zeros_like(s) if g is None else g for s, g in zip(shards, grads, strict=True)]
    gradient = layout.gradient()
    assert gradient.gradient() == layout
    chosen = [
        filled[everyone.index({**dict.fromkeys(everyone[0], 0), **c})] for c in coordinates(gradient, SIZES)
    ]
    assert torch.allclose(assemble(gradient, chosen, SIZES), true)


def _as_seen_from(
    layout: Layout, shards: list[Tensor], everyone: list[dict[str, int]], place: dict[str, int]
) -> list[Tensor]:
    """The shards that make the whole for the rank at `place`: of copies its own row, of shares its own."""
    out = []
    for coords in coordinates(layout, SIZES):
        at = {**coords, **{a: place[a] for a in layout.shared}}
        for cut in (c for d in layout.dims for c in d.cuts if c.copies > 1):
            at[cut.axis] = coords[cut.axis] // cut.copies * cut.copies + place[cut.axis] % cut.copies
        out.append(shards[everyone.index(at)])
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(1, 3))
def test_uneven_parts(lengths: list[int], width: int) -> None:
    layout = Layout((Dim("t", (Cut("b"),), uneven=True), Dim("h")))
    whole = torch.randn(sum(lengths), width)
    shards = [extract(layout, whole, {"b": c}, SIZES, lengths={0: lengths}) for c in range(3)]
    assert [len(s) for s in shards] == lengths
    assert torch.equal(assemble(layout, shards, SIZES), whole)
    equal = torch.randn(3, 2, width)
    assert torch.equal(assemble(layout, equal, SIZES), equal.reshape(6, width))


def test_gate_and_up_come_back_in_order() -> None:
    layout = Layout((Dim("gate|up", (Cut("a"),), (1, 1)),))
    shards = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]
    assert assemble(layout, shards, SIZES).tolist() == list(range(8))


def test_sequence_parallel_lies_within_context_parallel_zigzag() -> None:
    dim = Dim("s", (Cut("b", "zigzag"), Cut("a")))
    # context rank 1 of 3 holds parts 1 and 4 of 6; its tensor parallel rank 1 the latter half of those
    assert spans(dim, 24, {"b": 1, "a": 1}, SIZES) == [(16, 20)]
    assert spans(dim, 24, {"b": 1, "a": 0}, SIZES) == [(4, 8)]


def test_padding_is_stripped_and_put_back() -> None:
    layout = Layout((Dim("v", (Cut("c"),), keep=5),))
    shards = [
        torch.tensor([0.0, 1]),
        torch.tensor([2.0, 3]),
        torch.tensor([4.0, 90]),
        torch.tensor([91.0, 92]),
    ]
    whole = assemble(layout, shards, SIZES)
    assert whole.tolist() == [0, 1, 2, 3, 4]
    back = [extract(layout, whole + 10, {"c": c}, SIZES, s) for c, s in enumerate(shards)]
    assert [t.tolist() for t in back] == [[10, 11], [12, 13], [14, 90], [91, 92]]
    padded = [extract(layout, torch.arange(8), {"c": c}, SIZES).tolist() for c in range(4)]
    assert padded == [[0, 1], [2, 3], [4, 5], [6, 7]], "of a full tensor with its padding"


def test_copies_take_the_first_and_their_gradients_are_summed() -> None:
    layout = Layout((Dim("g", (Cut("c", copies=2),)),))
    assert assemble(layout, [torch.tensor([float(i)]) for i in (1, 1, 2, 2)], SIZES).tolist() == [1, 2]
    grads = [torch.tensor([float(i)]) for i in (1, 10, 2, 20)]
    assert assemble(layout.gradient(), grads, SIZES).tolist() == [11, 22]


def test_a_stack_may_have_gaps_between_shards_and_be_written_at_once() -> None:
    layout = Layout((Dim("s"), Dim("h", (Cut("a"),))))
    message = torch.arange(40)
    stack = message.as_strided((2, 4, 3), (20, 3, 1), 5)  # as shards of a message are
    assert torch.equal(assemble(layout, stack, SIZES), torch.cat([stack[0], stack[1]], 1))
    assert find_joined_dim(layout, (4, 3), SIZES) == 1
    assert find_joined_dim(Layout((Dim("t", (Cut("a"),), uneven=True), Dim("h"))), (4, 3), SIZES) == 0
    assert find_joined_dim(Layout((Dim("s", (Cut("a", "zigzag"),)),)), (4,), SIZES) is None
    assert find_joined_dim(Layout((Dim("h", (Cut("c", copies=2),)),)), (4,), SIZES) is None


def test_extract_shares_no_memory_and_is_contiguous() -> None:
    for layout in (
        replicated("s", "h"),
        Layout((Dim("s", (Cut("a"),)), Dim("h"))),
        Layout((Dim(), Dim()), ("a",)),
    ):
        whole = torch.randn(4, 4)
        part = extract(layout, whole, {"a": 0}, SIZES)
        assert part.is_contiguous()
        assert part._base is None
        part.fill_(7)
        assert not (whole == 7).any()


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: Layout((Dim(cuts=(Cut("a"),)), Dim(cuts=(Cut("a"),)))), ("['a', 'a']",)),
        (lambda: Layout((Dim(),), permute=(1,)), ("(1,)", 1)),
        (lambda: Dim("t", (Cut("a", "zigzag"),), uneven=True), ("t",)),
        (lambda: spans(Dim("s", (Cut("a"),)), 7, {}, SIZES), ("s", 7, 2, "a")),
        (lambda: spans(Dim("s", (Cut("a"),), (1, 2)), 7, {}, SIZES), ("s", 7, "(1, 2)")),
        (lambda: spans(Dim("s", (Cut("b", copies=2),)), 6, {}, SIZES), ("b", 3, 2)),
        (lambda: full_shape(replicated("s"), (3, 4), SIZES), ("(3, 4)", 2, "[s]", 1)),
        (lambda: assemble(Layout((Dim("s", (Cut("a"),)),)), [torch.ones(2)], SIZES), (1, "[s/a]", 2)),
        (
            lambda: assemble(Layout((Dim("s", (Cut("a"),)),)), [torch.ones(2), torch.ones(3)], SIZES),
            ("[2, 3]", "s"),
        ),
        (
            lambda: assemble(Layout((Dim("s", (Cut("a"),)),)), [torch.ones(2)] * 2, SIZES, torch.ones(3)),
            ("(4,)", "(3,)"),
        ),
    ],
)
def test_what_does_not_fit_is_told(make_it: object, words: tuple[object, ...]) -> None:
    with raises(LayoutError, *words):
        make_it()  # type: ignore[operator]


def test_equal_layouts_have_one_hash_that_is_not_sent() -> None:
    first, second = (Layout((Dim("s", (Cut("a", "zigzag"),)),), ("b",), permute=(0,)) for _ in range(2))
    assert hash(first) == hash(second)
    assert len({first, second, replace(first, partial=())}) == 2
    sent = pickle.loads(pickle.dumps(first))
    assert sent == first
    assert not hasattr(sent, "_hash"), "another process has other hashes"


def test_description_names_only_axes_that_split() -> None:
    layout = Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("b"), Dim("h")), partial=("dp",))
    assert_names(layout.describe(), "[s/cp zigzag/tp, b, h]", "dp")
    assert layout.describe({"tp": 2, "cp": 1, "dp": 1}) == "[s/tp, b, h]"
    assert prod(SIZES.values()) == 24
