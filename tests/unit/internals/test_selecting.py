"""Selections pushed down: of every layout the parts give what plain code takes from the whole."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_flex as mf
from megatron_flex.errors import HookError, LayoutError
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, count_parts, extract, is_partial
from megatron_flex.runtime.selection import INDICES, CaptureSelection, SelectionPlan, plan_selection
from tests.support.messages import raises
from tests.unit.test_layout import SIZES, layouts, make

CPU = torch.device("cpu")
Drawn = tuple[Layout, tuple[int, ...]]


def entries(draw: st.DrawFn, length: int) -> Any:
    """What a person may say of a dim of that length, so that something is left."""
    kind = draw(st.sampled_from(["int", "list", "slice"]))
    if kind == "int":
        return draw(st.integers(-length, length - 1))
    if kind == "list":
        return draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=6))
    found = slice(
        draw(st.none() | st.integers(-length, length)),
        draw(st.none() | st.integers(-length, length)),
        draw(st.none() | st.sampled_from([1, 2, 3, -1, -2])),
    )
    return found if len(range(length)[found]) else slice(None)


def plainly(tensor: Tensor, dim: int, said: Any) -> Tensor:
    """One device's selection, by numpy's rules."""
    if isinstance(said, slice):
        said = list(range(tensor.shape[dim]))[said]
    said = [said] if isinstance(said, int) else list(said)
    return tensor.index_select(dim, torch.tensor([i % tensor.shape[dim] for i in said]))


def ranked(tensor: Tensor, dim: int, k: int, largest: bool) -> dict[str, Tensor]:
    """One device's choice: sorted, equal ones by their index."""
    found = tensor.sort(dim=dim, descending=largest, stable=True)
    return {"": found.values.narrow(dim, 0, k), INDICES: found.indices.narrow(dim, 0, k)}


@st.composite
def wishes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[CaptureSelection, Any]:
    """A wish for a tensor of that shape, and the plain code that fulfils it."""
    dims = [d for d in range(len(shape)) if draw(st.booleans())]
    said = {d: entries(draw, shape[d]) for d in dims}
    empty = torch.empty(shape)
    for d, e in said.items():
        empty = plainly(empty, d, e)
    left, last = tuple(empty.shape), len(shape) - 1
    kind = draw(st.sampled_from(["none", "sum", "mean", "norm", "topk", "dot", "dots"]))
    along = tuple(draw(st.lists(st.integers(0, last), min_size=1, unique=True)))
    k, largest = draw(st.integers(1, left[along[0]])), draw(st.booleans())
    direction = torch.randn(left[-1]) if kind == "dot" else torch.randn(3, left[-1])
    reduction = {
        "none": lambda: None,
        "sum": lambda: mf.reduce.sum(*along),
        "mean": lambda: mf.reduce.mean(*along),
        "norm": lambda: mf.reduce.norm(*along),
        "topk": lambda: mf.reduce.topk(k, along[0], largest),
        "dot": lambda: mf.reduce.dot(direction),
        "dots": lambda: mf.reduce.dot(direction),
    }[kind]()

    def truth(whole: Tensor) -> dict[str, Tensor]:
        for d, e in said.items():
            whole = plainly(whole, d, e)
        return {
            "none": lambda: {"": whole},
            "sum": lambda: {"": whole.sum(along)},
            "mean": lambda: {"": whole.mean(along)},
            "norm": lambda: {"": torch.linalg.vector_norm(whole, 2, along)},
            "topk": lambda: ranked(whole, along[0], k, largest),
            "dot": lambda: {"": whole @ direction.to(whole.dtype)},
            "dots": lambda: {"": whole @ direction.to(whole.dtype).T},
        }[kind]()

    return CaptureSelection(mf.Select(dims=said), reduction), truth


def planned(wanted: CaptureSelection, layout: Layout, shards: list[Tensor]) -> list[SelectionPlan]:
    return [
        plan_selection(wanted, layout, s.shape, s.dtype, CPU, SIZES, c)
        for s, c in zip(shards, coordinates(layout, SIZES), strict=True)
    ]


def fulfilled(wanted: CaptureSelection, layout: Layout, shards: list[Tensor]) -> dict[str, Tensor]:
    """As it goes on the ranks: each its part, one puts them together and finishes."""
    plans = planned(wanted, layout, shards)
    assert len({p.layout for p in plans}) == 1
    return together(plans, layout, shards)


def together(plans: list[SelectionPlan], layout: Layout, shards: list[Tensor]) -> dict[str, Tensor]:
    """What all ranks made of their parts, put together and finished."""
    made = plans[0].layout
    places = coordinates(layout, SIZES)
    order = [places.index(c) for c in coordinates(made, SIZES)]
    small = [plans[n].local(shards[n]) for n in order]
    return dict(plans[0].finish(assemble(made, small, SIZES)))


def compared(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


@settings(max_examples=250, deadline=None)
@given(st.data(), layouts(), st.sampled_from([torch.float32, torch.float64]))
def test_parts_give_what_the_whole_gives(data: Any, drawn: Drawn, dtype: torch.dtype) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    wanted, truth = data.draw(wishes(tuple(whole.shape)))
    # Few values, so that many are equal, and every sum is exact.
    whole = torch.randint(-3, 4, whole.shape).to(dtype)
    shards = [extract(layout, whole, c, SIZES, local) for c in coordinates(layout, SIZES)]
    for shard in shards:  # padding is nothing that counts
        assert shard.shape == shards[0].shape
    compared(fulfilled(wanted, layout, shards), truth(whole))


@settings(max_examples=100, deadline=None)
@given(st.data(), layouts())
def test_summands_and_padding_of_any_value(data: Any, drawn: Drawn) -> None:
    """Ranks of a sum all have something, and what lies in the padding is never seen."""
    layout, shape = drawn
    whole, local = make(layout, shape)
    wanted, truth = data.draw(wishes(tuple(whole.shape)))
    places = coordinates(layout, SIZES)
    shards = [extract(layout, whole, c, SIZES, torch.full(local, 1e9, dtype=whole.dtype)) for c in places]
    if is_partial(layout, SIZES):
        shards = (
            [
                s + n
                for n, s in enumerate(torch.randn(len(shards), *local, dtype=whole.dtype) + s for s in shards)
            ]
            if False
            else [torch.randn(local, dtype=whole.dtype) for _ in shards]
        )
        copies = [c for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial]
        for n, c in enumerate(places):  # equal copies are equal
            first = {**c, **{x.axis: c[x.axis] - c[x.axis] % x.copies for x in copies}}
            shards[n] = shards[places.index(first)]
        whole = assembled(layout, shards, places)
    compared(fulfilled(wanted, layout, shards), truth(whole))


def assembled(layout: Layout, shards: list[Tensor], places: list[dict[str, int]]) -> Tensor:
    """The whole of a sum, by brute force."""
    cut = replace(layout, partial=())
    total: Tensor | None = None
    for at in coordinates(Layout((), layout.partial), SIZES):
        these = [s for s, c in zip(shards, places, strict=True) if all(c[a] == n for a, n in at.items())]
        found = assemble(cut, these, SIZES)
        total = found.clone() if total is None else total + found
    assert total is not None
    return total


ZIGZAG = Dim("s", (Cut("b", "zigzag"), Cut("a")))
SEQUENCE = Layout((ZIGZAG, Dim("b"), Dim("h")))


@pytest.mark.parametrize(
    ("select", "reduction", "each"),
    [
        (mf.Select(positions=-1), None, 1 * 2 * 8),
        (mf.Select(positions=slice(0, 12)), None, 4 * 2 * 8),
        (mf.Select(positions=slice(0, 12, 6), neurons=3), None, 1 * 2 * 1),
        (mf.Select(samples=1), None, 4 * 1 * 8),
        (mf.Select(), mf.reduce.mean("s"), 1 * 2 * 8),
        (mf.Select(), mf.reduce.norm("h"), 4 * 2 * 1),
        (mf.Select(), mf.reduce.topk(2, "s"), 2 * 2 * 8),
        (mf.Select(), mf.reduce.topk(9, "s"), 4 * 2 * 8),
        (mf.Select(), mf.reduce.dot(torch.ones(8)), 4 * 2),
        (mf.Select(positions=[0, 1]), mf.reduce.dot(torch.ones(5, 8)), 2 * 2 * 5),
    ],
)
def test_no_rank_sends_more_than_it_has_of_it(select: Any, reduction: Any, each: int) -> None:
    plans = planned(CaptureSelection(select, reduction), SEQUENCE, [torch.ones(4, 2, 8)] * 6)
    assert [p.local(torch.ones(4, 2, 8)).numel() for p in plans] == [each] * 6


def test_one_position_is_a_view() -> None:
    local = torch.randn(4, 2, 8)
    for at in coordinates(SEQUENCE, SIZES):
        plan = plan_selection(
            CaptureSelection(mf.Select(positions=-1)), SEQUENCE, local.shape, local.dtype, CPU, SIZES, at
        )
        assert plan.local(local).untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layout = Layout((Dim("s", (Cut("a"),)), Dim("h", (Cut("b"),))))
    whole = (torch.randn(8, 6) * 10).to(dtype)
    shards = [extract(layout, whole, c, SIZES) for c in coordinates(layout, SIZES)]
    wide = whole.double() if dtype.is_floating_point else whole.long()
    for made, want in (
        (mf.reduce.sum("s"), wide.sum(0).to(dtype if dtype.is_floating_point else torch.int64)),
        (mf.reduce.mean("h"), whole.double().mean(1).to(dtype if dtype.is_floating_point else torch.float32)),
        (
            mf.reduce.norm("s", "h"),
            whole.double().norm().to(dtype if dtype.is_floating_point else torch.float32),
        ),
    ):
        compared(fulfilled(CaptureSelection(reduce=made), layout, shards), {"": want})
    got = fulfilled(CaptureSelection(reduce=mf.reduce.topk(4, "h")), layout, shards)
    compared(got, ranked(whole, 1, 4, True))


@pytest.mark.parametrize("largest", [True, False])
def test_the_order_of_odd_numbers(largest: bool) -> None:
    """NaN is the greatest, as in torch; zeros of either sign are equal, and the first one counts."""
    layout = Layout((Dim("h", (Cut("a"),)),))
    inf, nan = float("inf"), float("nan")
    whole = torch.tensor([0.0, -0.0, nan, -inf, 1e-45, inf, -nan, -1e-45])
    got = fulfilled(CaptureSelection(reduce=mf.reduce.topk(8, "h", largest)), layout, list(whole.chunk(2)))
    want = ranked(whole, 0, 8, largest)
    torch.testing.assert_close(got[""], want[""], equal_nan=True, rtol=0, atol=0)
    assert got[INDICES].tolist() == want[INDICES].tolist()


def test_uneven_dims() -> None:
    """What goes along other dims is pushed down; what is chosen of an uneven one, when it is together."""
    layout = Layout((Dim("s", (Cut("b"),)), Dim("b", (Cut("a"),), uneven=True), Dim("h")))
    whole = torch.randn(6, 5, 4)
    shards = [whole[s * 2 : s * 2 + 2, b] for s in range(3) for b in (slice(0, 3), slice(3, 5))]

    def check(wanted: CaptureSelection, want: Tensor, everywhere: bool) -> None:
        plans = planned(wanted, layout, shards)
        assert {p.everywhere for p in plans} == {everywhere}
        compared(together(plans, layout, shards), {"": want})

    check(CaptureSelection(mf.Select(positions=-1)), whole[-1:], False)
    check(CaptureSelection(mf.Select(samples=[4, 0], positions=1)), whole[1:2, [4, 0]], True)
    check(CaptureSelection(reduce=mf.reduce.norm("b")), whole.norm(dim=1), False)
    check(CaptureSelection(reduce=mf.reduce.sum("b", "s")), whole.sum((0, 1)), False)
    check(CaptureSelection(reduce=mf.reduce.mean("b")), whole.mean(1), False)
    check(CaptureSelection(mf.Select(samples=4), mf.reduce.mean("s")), whole[:, 4:].mean(0), True)
    check(CaptureSelection(mf.Select(samples=4), mf.reduce.mean("b")), whole[:, 4], True)
    plans = planned(CaptureSelection(mf.Select(samples=9)), layout, shards)
    with raises(HookError, "samples", 9, 5):
        plans[0].finish(whole)


@pytest.mark.parametrize("name", ["n*d", "nd"])  # the second in dumps of earlier versions
def test_heads_side_by_side_and_apart(name: str) -> None:
    x = torch.randn(4, 2, 12)
    packed = Layout((Dim("s"), Dim("b"), Dim(name, (Cut("a"),))))
    for said, heads in ((mf.Select(heads=[3, 0]), 4), (mf.Select(heads=[3, 0], of=4), 0)):
        plans = [
            plan_selection(CaptureSelection(said), packed, (4, 2, 6), x.dtype, CPU, SIZES, {"a": n}, heads)
            for n in range(2)
        ]
        small = [p.local(s) for p, s in zip(plans, x.chunk(2, -1), strict=True)]
        got = plans[0].finish(assemble(plans[0].layout, small, SIZES))[""]
        assert torch.equal(got.view(4, 2, 2, 3), x.view(4, 2, 4, 3)[:, :, [3, 0]])
    copied = Layout((Dim("s"), Dim("g", (Cut("c", copies=2),))))
    shards = [x[:, 0, n // 2 * 6 : n // 2 * 6 + 6] for n in range(4)]
    assert torch.equal(fulfilled(CaptureSelection(mf.Select(heads=-1)), copied, shards)[""], x[:, 0, -1:])
    with raises(HookError, "of=their"):
        plan_selection(CaptureSelection(mf.Select(heads=0)), packed, (4, 2, 6), x.dtype, CPU, SIZES, {})
    with raises(HookError, "12", "5", "of=their"):
        plan_selection(CaptureSelection(mf.Select(heads=0, of=5)), packed, (4, 2, 6), x.dtype, CPU, SIZES, {})


def site(*dims: Dim, shape: tuple[int | str, ...]) -> mf.Site:
    return mf.Site("m:output", Layout(dims), shape)


STREAM = site(Dim("s"), Dim("b"), Dim("h"), shape=("s", "b", 8))
QUERY = site(Dim("s"), Dim("b"), Dim("n"), Dim("d"), shape=("s", "b", 4, 2))


@pytest.mark.parametrize(
    ("wanted", "where", "words"),
    [
        (CaptureSelection(mf.Select(positions=64)), STREAM, ()),  # only the data tell
        (CaptureSelection(mf.Select(heads=3), mf.reduce.mean("s")), QUERY, ()),
        (CaptureSelection(mf.Select(heads=4)), QUERY, ("heads", 4, -4, 3)),
        (CaptureSelection(mf.Select(neurons=[1, 8])), STREAM, ("neurons", 8)),
        (CaptureSelection(mf.Select(dims={"n": 1})), STREAM, ("dims", "m:output", "[s, b, h]", "n")),
    ],
)
def test_what_is_wrong_before_a_step(
    wanted: CaptureSelection, where: mf.Site, words: tuple[object, ...]
) -> None:
    with raises(HookError, *words) if words else nullcontext():
        wanted.check(where)


@pytest.mark.parametrize(
    ("wanted", "where", "told"),
    [
        (
            CaptureSelection(mf.Select(heads=0)),
            STREAM,
            ("heads", "m:output", "[s, b, h]"),
        ),
        (
            CaptureSelection(mf.Select(heads=4)),
            QUERY,
            ("heads", 4, -4, 3),
        ),
        (CaptureSelection(mf.Select(neurons=8)), STREAM, ("neurons", 8)),
        (CaptureSelection(mf.Select(neurons=slice(9, None))), STREAM, ("neurons", 9, 8)),
        (CaptureSelection(mf.Select(dims={"x": 0})), STREAM, ("dims", "m:output", "[s, b, h]", "x")),
        (
            CaptureSelection(mf.Select(neurons=0, dims={"h": 0})),
            STREAM,
            ("neurons 0", "h 0", "dims['h']", "m:output"),
        ),
        (
            CaptureSelection(reduce=mf.reduce.mean("t")),
            STREAM,
            ("mean(t)", "m:output", "[s, b, h]", "t"),
        ),
        (CaptureSelection(reduce=mf.reduce.mean("h", -1)), STREAM, ("mean(h, -1)", "m:output")),
        (
            CaptureSelection(reduce=mf.reduce.topk(9, "h")),
            STREAM,
            ("topk(9, h)", "9", "8"),
        ),
        (
            CaptureSelection(reduce=mf.reduce.dot(torch.ones(7))),
            STREAM,
            ("dot(7", 7, 8),
        ),
        (
            CaptureSelection(mf.Select(neurons=[0, 1]), mf.reduce.dot(torch.ones(8))),
            STREAM,
            ("dot(8", 8, 2),
        ),
    ],
)
def test_what_is_wrong_is_said_where_the_hook_stands(
    wanted: CaptureSelection, where: mf.Site, told: tuple[object, ...]
) -> None:
    with raises(HookError, *told):
        wanted.check(where)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: mf.Select(positions="last"), ("Select", "positions='last'")),
        (lambda: mf.Select(positions=True), ("Select", "positions=True")),
        (lambda: mf.Select(positions=slice(0, 4, 0)), ("Select", "positions=slice(0, 4, 0)", 0)),
        (lambda: mf.Select(of=0), ("Select", "of=0", 1)),
        (lambda: mf.reduce.topk(0, "h"), ("topk(0)", "k", 1)),
        (lambda: mf.reduce.mean(), ("mean()",)),
        (lambda: mf.reduce.sum("s", "s"), ("sum(s, s)",)),
        (lambda: mf.reduce.dot(torch.ones(2, 2, 2)), ("[h]", "[k, h]", "(2, 2, 2)")),
        (lambda: mf.reduce.dot([1.0]), ("[h]", "[k, h]", "list")),
        (lambda: mf.HookFunction("m", select=-1), ("select=-1", "Select(positions=-1)")),
        (lambda: mf.HookFunction("m", reduce="mean"), ("reduce='mean'", "reduce.mean")),
        (lambda: mf.HookFunction("m", keep_as="a b"), ("keep_as='a b'",)),
        (lambda: mf.HookFunction("m", keep_as="grad"), ("keep_as='grad'", "edited", "indices")),
        (
            lambda: mf.HookFunction("m", lambda m, x, c, t: x, save=False, select=mf.Select()),
            ("save=False",),
        ),
    ],
)
def test_what_cannot_be_understood(call: Any, told: tuple[object, ...]) -> None:
    with raises(HookError, *told):
        call()


def test_a_tensor_that_does_not_fit_its_layout() -> None:
    with raises(LayoutError, "(4, 2)", 2, "[s/b zigzag/a, b, h]", 3):
        plan_selection(
            CaptureSelection(mf.Select(positions=0)), SEQUENCE, (4, 2), torch.float32, CPU, SIZES, {}
        )


def test_in_words() -> None:
    hook = mf.HookFunction(
        "m",
        select=mf.Select(positions=-1, heads=[0, 2], neurons=slice(0, 64)),
        reduce=mf.reduce.topk(3, "s", largest=False),
        keep_as="last",
    )
    assert hook.describe() == (
        "forward on m keeping positions -1, heads [0, 2], neurons 0:64, then topk(3, s, smallest) as last"
    )
    one, other = (mf.HookFunction("m", reduce=mf.reduce.dot(torch.full((4,), v))) for v in (1.0, 2.0))
    assert one.describe() != other.describe()


def test_parts_of_the_drawn_layouts_are_many() -> None:
    """What the tests above draw does cut."""
    assert count_parts(ZIGZAG, SIZES) == 6
