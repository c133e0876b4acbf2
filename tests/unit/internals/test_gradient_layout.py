"""Which layout a gradient has: each answer."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.adapters.taps import any_output
from megatron_flex.layout import Cut, Dim, Layout, assemble, replicated
from megatron_flex.layout.gradient_layout import (
    PARTS_DIFFER,
    USES_DIFFER,
    GradientLayout,
    GradientUses,
    conjugate_layout,
    explain_unlike_conjugate,
    find_activation_gradient,
    find_parameter_gradient,
    find_route_gradient,
    find_stored_gradient,
    find_unsummed_axes,
    layout_in_pass,
)
from megatron_flex.sites import Tap
from tests.support.messages import assert_names

FULL = replicated("s", "h")
CUT = Layout((Dim("s", (Cut("tp"),)), Dim("h")))
PARTIAL = Layout((Dim("s"), Dim("h")), partial=("tp",))
SHARED = Layout((Dim("s"), Dim("h")), shared=("tp",))
COPIES = Layout((Dim("g", (Cut("tp", copies=2),)),))
SUMS = Layout((Dim("g", (Cut("tp", copies=2, partial=True),)),))
CONJUGATES = [(FULL, FULL), (CUT, CUT), (PARTIAL, SHARED), (SHARED, PARTIAL), (COPIES, SUMS), (SUMS, COPIES)]

ONE_USE: GradientUses = frozenset({frozenset({frozenset[str]()})})
TP_USE: GradientUses = frozenset({frozenset({frozenset({"tp"})})})
TP_AND_CP: GradientUses = frozenset({frozenset({frozenset({"tp", "cp"})})})
BOTH: GradientUses = frozenset({frozenset({frozenset({"tp"}), frozenset[str]()})})
REASON: GradientUses = frozenset({frozenset({"no rule for sort", frozenset[str]()})})
TWO_PASSES: GradientUses = frozenset({frozenset({frozenset({"tp"})}), frozenset({frozenset[str]()})})
NO_USE: GradientUses = frozenset()
USES = [
    (CUT, NO_USE, CUT, ""),
    (CUT, ONE_USE, CUT, ""),
    (FULL, ONE_USE, FULL, ""),
    (FULL, TP_USE, PARTIAL, ""),
    (CUT, TP_USE, CUT, ""),  # its own axis cuts it: each rank has the gradient of its part
    (CUT, TP_AND_CP, Layout(CUT.dims, partial=("cp",)), ""),
    (FULL, TP_AND_CP, Layout(FULL.dims, partial=("cp", "tp")), ""),
    (SHARED, TP_USE, PARTIAL, ""),
    (PARTIAL, ONE_USE, SHARED, ""),
    (FULL, BOTH, None, PARTS_DIFFER),
    (FULL, REASON, None, "no rule for sort"),
    (FULL, TWO_PASSES, None, USES_DIFFER),
    (FULL, "the model was called before", None, "the model was called before"),
]


def _tap(uses: GradientUses | None) -> Tap:
    return Tap(any_output, None, uses=lambda index: None if uses is None else lambda: uses)


class _Parameter:
    def __init__(self, uses: GradientUses) -> None:
        self.uses = uses

    def gradient_uses(self) -> GradientUses:
        return self.uses


@pytest.mark.parametrize(("layout", "gradient"), CONJUGATES)
def test_where_the_layout_alone_decides(layout: Layout, gradient: Layout) -> None:
    assert conjugate_layout(layout) == gradient
    assert conjugate_layout(layout) is conjugate_layout(layout)  # plans are found by identity
    assert layout_in_pass(layout, backward=True) == gradient
    assert layout_in_pass(layout, backward=False) is layout
    for tap in (None, Tap(any_output, None), _tap(None)):
        assert find_activation_gradient(tap, layout)() == GradientLayout(gradient)
    assert find_parameter_gradient(None, layout) == GradientLayout(gradient)
    assert find_route_gradient(layout, CUT) == (gradient, CUT)


@pytest.mark.parametrize(("layout", "uses", "gradient", "reason"), USES)
def test_where_uses_decide(layout: Layout, uses: GradientUses, gradient: Layout | None, reason: str) -> None:
    for found in (
        find_activation_gradient(_tap(uses), layout)(),
        find_parameter_gradient(_Parameter(uses), layout),
    ):
        assert found.layout == gradient
        assert reason in found.reason
        assert bool(found.reason) == (found.layout is None)


def test_uses_are_asked_for_when_they_are_over() -> None:
    found: list[GradientUses] = [ONE_USE]
    tap = Tap(any_output, None, uses=lambda index: lambda: found[-1])
    find = find_activation_gradient(tap, FULL)
    found.append(TP_USE)
    assert find().layout == PARTIAL


@pytest.mark.parametrize(
    ("layout", "reduced", "unsummed", "gradient"),
    [
        (FULL, True, (), FULL),
        (SHARED, True, (), SHARED),
        (SHARED, False, (), PARTIAL),
        (COPIES, True, (), COPIES),
        (COPIES, False, (), SUMS),
        (CUT, True, ("tp",), CUT),
        (CUT, False, ("cp",), Layout(CUT.dims, partial=("cp",))),
        (FULL, True, ("tp",), PARTIAL),
        (SHARED, True, ("tp",), SHARED),
        (SHARED, False, ("tp",), PARTIAL),
    ],
)
def test_after_the_step(layout: Layout, reduced: bool, unsummed: tuple[str, ...], gradient: Layout) -> None:
    assert find_stored_gradient(layout, reduced, unsummed) == gradient


def test_axes_that_nothing_sums() -> None:
    assert find_unsummed_axes(frozenset()) == ()
    assert find_unsummed_axes(frozenset({frozenset[str]()})) == ()
    assert find_unsummed_axes(frozenset({frozenset({"tp", "cp"})})) == ("cp", "tp")
    assert find_unsummed_axes(frozenset({frozenset({"tp"}), frozenset[str]()})) is None
    assert find_unsummed_axes(frozenset({"no rule"})) is None


def test_trainable_modules_need_the_conjugate() -> None:
    assert explain_unlike_conjugate(GradientLayout(SHARED), PARTIAL) == ""
    assert_names(explain_unlike_conjugate(GradientLayout(PARTIAL), FULL), "tp")
    assert explain_unlike_conjugate(GradientLayout(None, "why"), FULL) == "why"


def test_an_answer_keeps_its_layout_while_others_come() -> None:
    """Layouts are remembered by identity: one that is gone must not answer for another in its place."""
    for number in range(5000):
        layout = Layout((Dim(f"d{number}"),), *((("tp",), ()) if number % 2 else ((), ("tp",))))
        assert conjugate_layout(layout) == layout.gradient()


def test_the_gradient_of_replicated_values_with_uses_is_their_sum() -> None:
    """Two ranks use half of a replicated tensor each: what they have of its gradient adds up to it."""
    tensor = torch.arange(4.0).requires_grad_(True)
    halves = [torch.autograd.grad((tensor[at] ** 2).sum(), tensor)[0] for at in (slice(2), slice(2, 4))]
    layout = find_activation_gradient(_tap(TP_USE), replicated("h"))().layout
    assert layout is not None
    assert torch.equal(assemble(layout, halves, {"tp": 2}), 2 * tensor.detach())
