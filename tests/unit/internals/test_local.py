"""Edits on ranks' parts: what the parts make is what the edit makes of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_flex as mf
from megatron_flex import edits
from megatron_flex.collectives import Shard, enter, exit
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, extract, replicated
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.function_analysis import computes_only, unwrap_function
from megatron_flex.runtime.local_edits import LocalEditPlan, plan_local_edits
from megatron_flex.runtime.model_verification import measure_difference
from megatron_flex.sites import Site
from tests.support.messages import assert_names, raises
from tests.unit.test_layout import SIZES, layouts, make

FILLING = 7.0  # what padding has


@st.composite
def named(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout whose dims are a sequence, a batch and heads, in some order, and the shape of its whole."""
    layout, shape = draw(layouts())
    names = draw(st.permutations(["s", "b", draw(st.sampled_from(["n", "n*d"]))]))
    dims = tuple(replace(d, name=n) for d, n in zip(layout.dims, names, strict=False))
    return replace(layout, dims=dims), shape


def mesh(coords: dict[str, int]) -> Mesh:
    axes = (Axis(n, size, coords.get(n, 0), ranks=tuple(range(size))) for n, size in SIZES.items())
    return Mesh(tuple(axes))


def site(layout: Layout) -> Site:
    order = layout.permute or range(len(layout.dims))
    return Site("decoder.layers.0:mid", layout, tuple(layout.dims[i].name for i in order))


def ways(
    layout: Layout, local: tuple[int, ...], edit: Any
) -> Iterator[tuple[dict[str, int], Any, LocalEditPlan | None]]:
    for coords in coordinates(layout, SIZES):
        hook = mf.HookFunction("x", editing_function=edit)
        way, why = plan_local_edits({hook: edit}, layout, local, mesh(coords), False)
        assert bool(why) == (way is None)
        yield coords, hook, way


def on_parts(layout: Layout, whole: Tensor, local: tuple[int, ...], edit: Any) -> list[Tensor] | None:
    """What each rank makes of its part; None where the whole is needed, on all of them."""
    out: list[Tensor | None] = []
    for coords, hook, way in ways(layout, local, edit):
        part = extract(layout, whole, coords, SIZES, torch.full(local, FILLING, dtype=whole.dtype))
        if way is None:
            out.append(None)
            continue
        before = part.clone()
        torch.manual_seed(3)
        made = way.exchange.exit(way.edits[hook](None, way.exchange.enter(part), None, None), part)
        assert torch.equal(part, before), "the framework's tensor is as it was"
        assert made.is_contiguous()
        assert made.shape == part.shape
        assert made.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        out.append(made)
    needs_whole = [m is None for m in out]
    assert all(needs_whole) or not any(needs_whole), "all ranks decide alike"
    return None if needs_whole[0] else [m for m in out if m is not None]


def presets(layout: Layout, whole: Tensor) -> dict[str, Any]:
    at = site(layout)
    last = whole.shape[-1]
    vector = torch.linspace(-2, 2, last, dtype=whole.dtype)
    found: dict[str, Any] = {
        "scale": edits.scale(3.0),
        "zero": edits.zero(features=[0, -1]),
        "clamp": edits.clamp(0.2, 0.5),
        "noise": edits.noise(0.5),
        "neurons": edits.ablate_neurons([0, last // 2]),
        "neurons kept": edits.ablate_neurons(slice(0, None, 2), keep=True),
        "mean": edits.mean(value=vector),
        "chain": edits.scale(2.0, features=0) | edits.clamp(-1, 1) | edits.ablate_neurons(-1),
        "marked": mf.local()(squared),
        "marked, in place": mf.local()(doubled_in_place),
    }
    if "s" in at.dims:
        found["positions"] = edits.scale(2.0, positions=[0, -1])
    if "b" in at.dims:
        found["samples"] = edits.zero(samples=-1) | edits.scale(0.5, samples=0)
    if "n" in at.dims and whole.ndim > 1:
        found["heads"] = edits.ablate_heads([0, -1])
    if "n*d" in at.dims:
        found["heads side by side"] = edits.ablate_heads(
            [0], keep=True, of=next(n for n in (3, 2, 1) if whole.shape[at.dims.index("n*d")] % n == 0)
        )
    return {n: e.for_site(at) for n, e in found.items()}


def squared(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * inputs + 1


def doubled_in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.view(-1).mul_(2).view(inputs.shape)


def is_sum(layout: Layout) -> bool:
    return bool(layout.partial) or any(c.partial for d in layout.dims for c in d.cuts)


# One entry on the first of four ranks, and padding on the others.
ONE_ENTRY = Layout((Dim("s", (Cut("c"),), keep=1),)), (1,)
# One entry and padding beside it, on all of four ranks alike.
ONE_PADDED_ENTRY = Layout((Dim("s", (Cut("c", order="zigzag", copies=4),), keep=1),)), (1,)


@settings(max_examples=25, deadline=None)
@given(named())
@example(ONE_ENTRY)
@example(ONE_PADDED_ENTRY)
def test_parts_make_what_the_whole_makes(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    for name, edit in presets(layout, whole).items():
        parts = on_parts(layout, whole, local, edit)
        torch.manual_seed(3)
        want = edit(None, whole.clone(), None, None)
        if is_sum(layout) and not edit.edit_traits.linear:
            assert parts is None, name
            continue
        assert parts is not None, name
        assert torch.equal(assemble(layout, parts, SIZES), want), name
        padding = torch.full(local, FILLING, dtype=whole.dtype)
        for coords, part in zip(coordinates(layout, SIZES), parts, strict=True):
            again = extract(layout, want, coords, SIZES, padding)
            if not is_sum(layout):
                assert torch.equal(part, again), f"{name}: padding stays"


@settings(max_examples=80, deadline=None)
@given(named(), st.data())
def test_a_constant_is_cut_like_the_tensor_that_it_is_added_to(
    drawn: tuple[Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    layout, shape = drawn
    layout = replace(layout, partial=())
    whole, local = make(layout, shape)
    first = data.draw(st.integers(0, whole.ndim))
    kept = [n if data.draw(st.booleans()) else 1 for n in whole.shape[first:]]
    constant = torch.randn(kept, dtype=whole.dtype)
    equal = tuple(replace(d, cuts=tuple(replace(c, partial=False) for c in d.cuts)) for d in layout.dims)
    inner = replace(layout, dims=equal)
    order = layout.permute or tuple(range(len(shape)))
    for coords in coordinates(layout, SIZES):
        shard = Shard.from_local(torch.empty(local), layout, mesh(coords))
        part = shard.part(constant)
        # Beside padding a constant that stands for all entries does so for those of the padding, too.
        want = extract(inner, constant.expand(whole.shape), coords, SIZES, local).permute(order)
        real = extract(inner, torch.ones(whole.shape), coords, SIZES, local).permute(order).bool()
        assert torch.equal(part.expand(want.shape)[real], want[real])


def test_what_needs_the_whole_says_why() -> None:
    cut = Layout((Dim("s", (Cut("a"),)), Dim("b"), Dim("h")))
    at, two = site(cut), mesh({})

    def why(edit: Any, layout: Layout = cut, trains: bool = False, **kwargs: Any) -> str:
        hook = mf.HookFunction("x", editing_function=edit, **kwargs)
        bound = edit.for_site(at) if hasattr(edit, "for_site") else edit
        return plan_local_edits({hook: bound}, layout, (4, 2, 6), two, trains)[1]

    assert why(edits.scale(2.0)) == ""
    assert_names(why(squared), "squared", "@mf.local")
    assert why(squared, replicated("s", "b", "h")) == "", "each rank has all of it"
    assert_names(why(edits.resample("s")), "resample('s')", "s", "a")
    assert_names(why(edits.scale(2.0), run="once"), "scale(2.0)", "run='once'")
    assert "clamp" in why(edits.clamp(0.0, 1.0), Layout(cut.dims, partial=("b",)))
    assert why(edits.scale(2.0), Layout(cut.dims, partial=("b",))) == ""
    assert why(mf.local(dims=("s", "b"))(squared)) == ""
    assert_names(why(mf.local(dims="b h")(squared)), "squared", "s", "a")
    assert "save_ctx" in why(mf.local()(saving))
    assert_names(why(mf.local()(training), trains=True), "training")
    uneven = Layout((Dim("s", (Cut("a"),), uneven=True), *cut.dims[1:]))
    assert_names(why(edits.scale(2.0), uneven), "'s'", "a")
    mixed = edits.scale(2.0) | squared
    assert_names(why(mixed), "squared")  # a chain with one that needs it
    assert why(edits.scale(2.0) | mf.local()(squared)) == ""


def saving(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.it = inputs
    return inputs


def training(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return modules["adapter"](inputs)


def test_a_marked_function_is_the_function() -> None:
    marked = mf.local(dims="s b")(squared)
    assert marked.__name__ == "squared"
    assert_names(repr(marked), "squared", "s, b")
    x = torch.randn(3, 2)
    assert torch.equal(marked(None, x, None, None), x * x + 1)
    assert unwrap_function(marked) is squared
    assert computes_only(marked)
    assert torch.equal((marked | edits.scale(2.0))(None, x, None, None), 2 * (x * x + 1))
    mf.HookFunction("x", editing_function=marked)

    class Mine:
        by = 3.0

        @mf.local()
        def scaled(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
            return self.by * inputs

    assert torch.equal(Mine().scaled(None, x, None, None), 3 * x)
    assert isinstance(mf.edits.parse("scale=2") | marked, edits.chain)


def test_marks_that_cannot_be() -> None:
    here = site(replicated("s", "b", "h"))
    with raises(mf.HookError, "mf.local(dims=('s', 'n'))", "decoder.layers.0:mid", "[s, b, h]", "n"):
        mf.local(dims=("s", "n"))(squared).for_site(here)
    for wrong in ("", (), (3,), squared):
        with raises(mf.HookError, "mf.local"):
            mf.local(dims=wrong)  # type: ignore[arg-type]


def test_a_parameter_gets_no_share_of_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(6))
    edit = mf.local()(lambda module, inputs, save_ctx, modules: inputs * weight)
    layout = Layout((Dim("s", (Cut("a"),)), Dim("h")))
    bound = edit.on_shard(Shard.from_local(torch.empty(2, 6), layout, mesh({})))
    assert bound is not None
    inputs = torch.ones(2, 6, requires_grad=True)
    with raises(
        mf.HookError, "test_a_parameter_gets_no_share_of_its_gradient.<locals>.<lambda>", "@mf.local"
    ):
        bound(None, inputs * 2, None, None)
    with torch.no_grad():
        assert torch.equal(bound(None, torch.ones(2, 6), None, None), torch.ones(2, 6))


def test_what_a_person_derives_from_a_preset_is_given_the_whole() -> None:
    class soft(edits.scale):
        def declare(self) -> edits.EditTraits:
            return edits.EditTraits(unsharded_dims="*")

        def edit(self, inputs: Tensor, module: Any, modules: Any) -> Tensor:
            return inputs.softmax(-1) * self.factor

    layout = Layout((Dim("s"), Dim("h", (Cut("a"),))))
    shard = Shard.from_local(torch.empty(2, 6), layout, mesh({}))
    assert soft(2.0).for_site(site(layout)).on_shard(shard) is None
    assert edits.scale(2.0).for_site(site(layout)).on_shard(shard) is not None


def test_what_does_not_depend_on_the_tensor_goes_on_in_its_place() -> None:
    layout = replicated("s", "h")
    hook = mf.HookFunction("x", editing_function=edits.zero())
    way, _ = plan_local_edits({hook: edits.zero()}, layout, (2, 3), Mesh(), False)
    assert way is not None
    leaf = torch.ones(2, 3, requires_grad=True)
    local = leaf * 1
    entrance = enter(local, way.exchange)
    out = exit(torch.zeros_like(entrance), entrance, local, way.exchange)
    assert out.requires_grad
    assert not out._is_view()
    out.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 3))


def test_differences_are_told_with_what_is_no_number() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf, -2.0])
    assert measure_difference(x, x) == (0.0, 2.0)
    assert measure_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])) == (0.5, 2.0)
    assert measure_difference(torch.tensor([nan]), torch.tensor([1.0]))[0] == inf
    assert measure_difference(torch.tensor([1, 2]), torch.tensor([1, 3]))[0] == 1.0
