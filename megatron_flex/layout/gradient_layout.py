"""Which layout a gradient has: the only module that decides it, for activations, expert rows and parameters.

`Layout.gradient()` is the algebra: sums and shared tensors change places. Only this module calls it; its
result is the conjugate. What decides is the tensor, and how its framework gets its gradient:

- activation of a site whose layout its framework declares: the conjugate (`find_activation_gradient`);
- activation between modules, whose layout is propagated: the conjugate, summed over the axes of its uses too,
  or the reason where uses differ; the tap's `Tap.uses` gives the uses;
- DTensor, and input of a module with a rule: the conjugate; `Tap.uses` gives None there;
- full tensor after a gather or before a scatter: the conjugate, as autograd needs it
  (`conjugate_layout`);
- expert rows: the conjugate, and the layout of their tokens as it is (`find_route_gradient`);
- parameter, in one backward pass, which is what its hooks get: the conjugate, or by its uses as above
  (`find_parameter_gradient`);
- parameter, after the step (`find_stored_gradient`): the parameter's own layout once the framework has
  reduced the gradient, and the conjugate before that; in both cases summed over the axes that nothing has
  added up (`find_unsummed_axes`, `Adapter.gradient_partial_axes`);
- activation before a run, in plans, estimates and figures: the conjugate of its declared layout
  (`layout_in_pass`).

How a framework stores gradients over data parallel ranks (buckets, ZeRO, ShardedDDP, DTensors) is not part of
this: `Adapter.gradient` gives the local tensor, or this rank's flat part of it, in one of the layouts above.
Adapters give facts only: which uses a tensor had, and which gradients a module sums by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from megatron_flex.layout.algebra import Layout

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation.layout_propagation import PropagatedParameter
    from megatron_flex.sites import Tap

Axes = frozenset[str]
# What the uses of a tensor leave of its gradient on a rank: axes to sum over, and reasons against a layout.
GradientEnds = frozenset[Axes | str]
# The ends of each pass that was observed; or the reason why none was.
GradientUses = frozenset[GradientEnds] | str

MAX_CACHED_LAYOUTS = 4096
USES_DIFFER = "it is used differently each time that the module runs"
PARTS_DIFFER = (
    "parts of it are full on each rank and others are partial, since it is used both with tensors that are "
    "cut and with others"
)


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The layout of a gradient, or why it is not known.

    Attributes:
        layout: None where it is not known.
        reason: in words why; empty where it is known.
    """

    layout: Layout | None
    reason: str = ""


@lru_cache(MAX_CACHED_LAYOUTS)
def conjugate_layout(layout: Layout) -> Layout:
    """The layout of the gradient that autograd gives a tensor in this layout."""
    return layout.gradient()


def layout_in_pass(layout: Layout, backward: bool) -> Layout:
    """The layout of what a hook gets of an activation with this declared layout.

    Args:
        layout: of the activation, as its framework declares it.
        backward: whether the hook gets its gradient.
    """
    return conjugate_layout(layout) if backward else layout


def find_activation_gradient(tap: Tap | None, layout: Layout) -> Callable[[], GradientLayout]:
    """What finds the gradient's layout of an activation that passes a tap now, once the forward pass is over.

    Args:
        tap: of its site, which tells what uses the activation, where that decides.
        layout: of the activation.
    """
    uses = None if tap is None or tap.uses is None else tap.uses(tap.index)
    if uses is None:
        return partial(_find_conjugate, layout)
    return partial(_find_by_uses, uses, layout)


def find_parameter_gradient(uses: PropagatedParameter | None, layout: Layout) -> GradientLayout:
    """The layout in which the gradient of one backward pass comes to a parameter.

    Args:
        uses: what knows how the model uses it; None where its own layout decides.
        layout: the parameter's.
    """
    return _find_conjugate(layout) if uses is None else _find_by_uses(uses.gradient_uses, layout)


def find_stored_gradient(layout: Layout, reduced: bool, unsummed: tuple[str, ...] = ()) -> Layout:
    """The layout of a parameter's gradient as its framework stores it when the step is over.

    Args:
        layout: the parameter's.
        reduced: whether the framework has summed over the axes that the layout shares.
        unsummed: the axes over which no code sums it, `Adapter.gradient_partial_axes`.
    """
    stored = layout if reduced else conjugate_layout(layout)
    summed_axes = {*stored.axes, *stored.shared}
    more = tuple(a for a in unsummed if a not in summed_axes)
    return replace(stored, partial=(*stored.partial, *more)) if more else stored


def find_route_gradient(layout: Layout, token_layout: Layout) -> tuple[Layout, Layout]:
    """The layouts of the gradient of expert rows: of the rows, and of the tensor with its tokens.

    The rows are summed before they go to their tokens, as tensors and as gradients: there each rank has the
    rows of its own tokens, so that the second stays.

    Args:
        layout: of the rows, over `etp`.
        token_layout: of the tensor with its tokens.
    """
    return conjugate_layout(layout), token_layout


def find_unsummed_axes(ends: GradientEnds) -> tuple[str, ...] | None:
    """The axes over which each rank has a share of the gradient of what is used so; None if they differ."""
    if any(isinstance(e, str) for e in ends) or len(ends) > 1:
        return None
    return tuple(sorted(axis for end in ends for axis in end))


def explain_unlike_conjugate(gradient_layout: GradientLayout, layout: Layout) -> str:
    """Why ranks do not get the gradient in the conjugate of `layout`; empty if they do."""
    if gradient_layout.layout == conjugate_layout(layout):
        return ""
    if gradient_layout.layout is None:
        return gradient_layout.reason
    return f"it is partial over {', '.join(gradient_layout.layout.partial)}"


@lru_cache(MAX_CACHED_LAYOUTS)
def _find_conjugate(layout: Layout, more: tuple[str, ...] = ()) -> GradientLayout:
    """The conjugate, with a sum over `more` axes."""
    if more:
        layout = replace(layout, shared=layout.shared + more)
    return GradientLayout(conjugate_layout(layout))


def _find_by_uses(find: Callable[[], GradientUses], layout: Layout) -> GradientLayout:
    """The layout of the gradient of what is used in the ways that `find` gives."""
    uses = find()
    if isinstance(uses, str):
        return GradientLayout(None, uses)
    if len(uses) > 1:
        return GradientLayout(None, USES_DIFFER)
    axes: set[Axes] = set()
    for end in next(iter(uses), frozenset()):
        if isinstance(end, str):
            return GradientLayout(None, end)
        axes.add(end)
    if len(axes) > 1:
        return GradientLayout(None, PARTS_DIFFER)
    summed_axes = layout.axes + layout.shared
    more = tuple([a for a in sorted(next(iter(axes), ())) if a not in summed_axes])
    return _find_conjugate(layout, more)
