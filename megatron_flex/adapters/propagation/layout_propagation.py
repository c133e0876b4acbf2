"""Follows how tensors lie on the ranks through ordinary operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.adapters.base import Undo, replaying
from megatron_flex.adapters.following.trace import LayoutTrace
from megatron_flex.adapters.following.windows import GradientEnds, UseWindow
from megatron_flex.adapters.leaves import LayoutFire
from megatron_flex.adapters.module_names import named_parameters
from megatron_flex.adapters.rules import Rule
from megatron_flex.adapters.spread import WHOLE, Spread, SpreadOrUnknown, Unknown
from megatron_flex.adapters.taps import intercept
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import TapCallback

TensorPlace = tuple[str, int]  # a site, and which of the tensors that pass there
PARAMETER_INDEX = -1  # in place of that number: the site is a parameter


@dataclass
class ObservedSpread:
    """What was found at a place in a call that was followed.

    Attributes:
        told: how the tensor lies on the ranks.
        dims: how many it has.
        ends: what its uses make of its gradient; None until the call is over.
        window: those uses, until then.
    """

    told: SpreadOrUnknown
    dims: int
    ends: GradientEnds | None = None
    window: UseWindow | None = None


@dataclass(eq=False)
class PropagatedTap:
    """Another tap, whose tensors' layouts are followed.

    Attributes:
        tap: the other tap.
        follower: whom it asks.
        site: its name.
        rule: what the module's rule says of the first tensor there.
        gets: the module that gets the tensor; None where one returned it.
        index: which of the tensors.
        beside: what the rule says of those behind the first.
    """

    tap: Any
    follower: LayoutPropagator
    site: str
    rule: Spread | None = None
    gets: nn.Module | None = None
    index: int = 0
    beside: tuple[Spread, ...] = ()

    @property
    def module(self) -> nn.Module | None:
        """The module that the other tap stands at."""
        return getattr(self.tap, "module", None)

    @property
    def place(self) -> TensorPlace:
        """What it is called among places."""
        return self.site, self.index

    def leaf(self, index: int) -> PropagatedTap:
        """The tap at another tensor of the same call."""
        told = (self.rule, *self.beside)
        rule = told[index] if 0 <= index < len(told) else None
        return PropagatedTap(self.tap.leaf(index), self.follower, self.site, rule, self.gets, index)

    def tell(self, local: Tensor) -> SpreadOrUnknown:
        """How a tensor that passes lies on the ranks."""
        return self.follower.record_tensor(self, local)

    def passed(self, local: Tensor, new: Tensor, told: SpreadOrUnknown) -> None:
        """Hooks have made another tensor of one."""
        self.follower.passed(self, local, new, told)

    def gradient(self, layout: Layout) -> Callable[[], Layout | str]:
        """What tells, once the forward pass is over, the gradient's layout of what passes now in a layout."""
        return self.follower.turned(self, layout)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        undo = cast(Undo, self.tap.install(LayoutFire(fire, self)))
        forget = self.follower.want(self.place)

        def remove() -> None:
            undo()
            forget()

        return remove


@dataclass(frozen=True, eq=False)
class PropagatedParameter:
    """A parameter between parallel modules, whose uses say of what kind its gradient is.

    Attributes:
        follower: whom it asks.
        name: the parameter's.
    """

    follower: LayoutPropagator
    name: str

    @property
    def place(self) -> TensorPlace:
        """What it is called among places."""
        return self.name, PARAMETER_INDEX

    def want(self) -> Undo:
        """Have calls followed until the returned function is called."""
        return self.follower.want(self.place)

    def gradient(self, layout: Layout) -> Layout | str:
        """The layout in which the gradient of one backward pass comes, or why it is not known."""
        return self.follower.parameter_uses(self.place, layout)


class LayoutPropagator:
    """Knows how the tensors of one model lie on the ranks.

    While a place is hooked of which that is not known yet, torch functions are followed through a call of the
    model. What was found there holds for all calls with the same kind of arguments.

    Attributes:
        root: the model.
        known: the modules of which rules tell.
        wanted: the places that are hooked.
        shared: the parameters of which each rank has a share of the gradient, and over which axes; None of
            those whose uses do not tell. As far as calls were followed.
        calls: how many were.
        entering: what is told of the first tensors that the model is called with; those that nobody tells of
            all ranks of a sample have alike.
        left: what was found of the tensors that it returned; None to have the next call followed for that.
    """

    def __init__(self, root: nn.Module, known: Mapping[nn.Module, Rule], mesh: Mesh) -> None:
        self.root, self.known, self.mesh = root, known, mesh
        self.wanted: Counter[TensorPlace] = Counter()
        self.shared: dict[str, tuple[str, ...] | None] = {}
        self.calls = 0
        self._answers: dict[Hashable, dict[TensorPlace, list[ObservedSpread]]] = {}
        self._now: dict[TensorPlace, list[ObservedSpread]] = {}  # of this kind of call, or the last one
        self._passes: Counter[TensorPlace] = Counter()  # in this call
        self._trace: LayoutTrace | None = None
        self._calls = 0  # of the model, within each other
        self.entering: list[SpreadOrUnknown] = []
        self.left: list[SpreadOrUnknown] | None = []

    def tap(
        self,
        site: str,
        tap: Any,
        rule: Spread | None,
        gets: nn.Module | None,
        beside: tuple[Spread, ...] = (),
    ) -> PropagatedTap:
        """Another tap, followed.

        Args:
            site: its name.
            tap: it.
            rule: what the module's rule says of its first tensor.
            gets: the module that gets what passes there, if it is an input.
            beside: what that rule says of the tensors behind the first.
        """
        return PropagatedTap(tap, self, site, rule, gets, beside=beside)

    def want(self, place: TensorPlace) -> Undo:
        """Have calls followed that pass a place, until the returned function is called."""
        self.wanted[place] += 1

        def forget() -> None:
            self.wanted[place] -= 1
            self.wanted += Counter()  # drops what is not wanted any more

        return forget

    # -- at a place ------------------------------------------------------------------------------------

    def tell(self, site: str, rule: Spread | None, tensor: Tensor) -> SpreadOrUnknown:
        """How a tensor that passes a site lies on the ranks; `rule` is what its module's rule says."""
        return rule or self._told((site, 0), tensor)

    def record_tensor(self, tap: PropagatedTap, local: Tensor) -> SpreadOrUnknown:
        """Likewise, and have its uses followed."""
        place = tap.place
        number = self._passes[place]
        self._passes[place] += 1
        trace = self._trace
        if trace is None:
            return tap.rule or self._told(place, local, number)
        mark = trace.mark(local)
        told = tap.rule or mark.told
        answer = ObservedSpread(told, local.ndim, window=trace.window(local, tap.gets))
        self._now.setdefault(place, []).append(answer)
        trace.opaque += 1  # what hooks do is not the model's
        return told

    def passed(self, tap: PropagatedTap, local: Tensor, new: Tensor, told: SpreadOrUnknown) -> None:
        """Hooks have made another tensor of one."""
        if self._trace is None:
            return
        self._trace.opaque -= 1
        if new is local:
            return
        self._trace.pass_on(local, new, told)
        self._now[tap.place][-1].window = self._trace.window(new, None)

    def _told(self, place: TensorPlace, local: Tensor, number: int = 0) -> SpreadOrUnknown:
        here = self._all(place) if replaying() or not self._calls else self._now
        found = here.get(place, [])
        fitting = [a for a in found if a.dims == local.ndim]
        if not fitting:
            return Unknown(
                "it passed in a call that was not followed, of a part of the model by itself or in another "
                "thread; call the model"
            )
        if all(a.told == fitting[0].told for a in fitting):
            return fitting[0].told
        if here is self._now and number < len(found) and found[number].dims == local.ndim:
            return found[number].told
        return Unknown("it lies differently on the ranks each time that the module runs")

    def turned(self, tap: PropagatedTap, layout: Layout) -> Callable[[], Layout | str]:
        """What tells the gradient's layout of what passes in a layout, or why it is not known."""
        if tap.rule is not None and tap.gets is not None:
            return layout.gradient
        here = self._all(tap.place) if replaying() or not self._calls else self._now

        return partial(_gradient_layout_at, here, tap.place, layout)

    def parameter_uses(self, place: TensorPlace, layout: Layout) -> Layout | str:
        """Likewise of a parameter, in the backward pass of calls that were followed."""
        here = self._all(place)
        if not here[place]:
            return "the model was called before the hook was there, or a part of it by itself; call the model"
        return _gradient_layout_at(here, place, layout)

    def _all(self, place: TensorPlace) -> dict[TensorPlace, list[ObservedSpread]]:
        """What was found at a place in all kinds of calls: recomputation does not tell of which it is."""
        return {place: [a for answers in self._answers.values() for a in answers.get(place, [])]}

    # -- around calls ----------------------------------------------------------------------------------

    def watch(self) -> Undo:
        """Follow in every call of the model that passes a place not yet known, until that is undone."""
        return intercept(self.root, "_call_impl", self._around)

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._calls or not (self.wanted or self.left is None) or replaying():
            return call(*args, **kwargs)
        self._calls += 1
        self._passes.clear()
        kind = self.root.training, *_call_signature(args), *_call_signature(kwargs)
        self._now = self._answers.setdefault(kind, {})
        try:
            if self.left is not None and self.wanted.keys() <= self._now.keys():
                return call(*args, **kwargs)
            return self._followed(kind, call, *args, **kwargs)
        finally:
            self._calls -= 1

    def _followed(self, kind: Hashable, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._now = self._answers[kind] = {}
        spreads = spreads_of_held_tensors(self.root, self.known)
        self._trace = trace = LayoutTrace(self.root, self.known, self.mesh, spreads)
        good = False
        try:
            output = trace.run(self.entering, call, *args, **kwargs)
            good, self.left = True, trace.left
        finally:
            self._trace = None
            if not good:
                self._answers.pop(kind, None)
        self.calls += 1
        for name, tensor in named_parameters(self.root):
            ends = trace.mark(tensor).node.found()
            if (name, PARAMETER_INDEX) in self.wanted:
                self._now[name, PARAMETER_INDEX] = [ObservedSpread(WHOLE, tensor.ndim, ends)]
            found = turned(ends, Layout(()))
            if isinstance(found, str):
                self.shared[name] = None
            elif found.partial:
                self.shared[name] = found.partial
        for answers in self._now.values():
            for answer in answers:
                if answer.window is not None:
                    answer.ends, answer.window = answer.window.found(), None
        return output


def _gradient_layout_at(here: Mapping[TensorPlace, list[ObservedSpread]], place: TensorPlace, layout: Layout) -> Layout | str:
    kinds = {a.ends or frozenset() for a in here.get(place, [])}
    if len(kinds) > 1:
        return "it is used differently each time that the module runs"
    return turned(next(iter(kinds), frozenset()), layout)


def turned(ends: GradientEnds, layout: Layout) -> Layout | str:
    """The layout of the gradient of what is used in ways that make these ends of it."""
    wrong = next((e for e in ends if isinstance(e, str)), None)
    if wrong is not None:
        return wrong
    kinds = {frozenset(e) for e in ends}
    if len(kinds) > 1:
        return (
            "parts of it are whole on each rank and others are summands, since it is used both with tensors "
            "that are cut and with others"
        )
    more = tuple(a for a in sorted(next(iter(kinds), frozenset())) if a not in layout.axes + layout.shared)
    return Layout(layout.dims, layout.partial, layout.shared + more, layout.permute).gradient()


def spreads_of_held_tensors(root: nn.Module, known: Mapping[nn.Module, Rule]) -> dict[int, SpreadOrUnknown]:
    """How the tensors that modules hold lie on the ranks, by identity: parameters, buffers and others."""
    out: dict[int, SpreadOrUnknown] = {}
    for module in root.modules():
        own = known[module].parameters if module in known else {}
        for tensor in (*module.buffers(recurse=False), *_attribute_tensors(module)):
            out.setdefault(id(tensor), WHOLE)
        for name, parameter in module.named_parameters(recurse=False):
            told: SpreadOrUnknown = layout_to_spread(own[name]) if name in own else WHOLE
            if out.get(id(parameter), WHOLE) == WHOLE:
                out[id(parameter)] = told
    return out


def _attribute_tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in vars(module).values() if isinstance(t, Tensor)]


def layout_to_spread(layout: Layout) -> SpreadOrUnknown:
    """What a parameter's layout says, if it is one of equal contiguous parts."""
    for dim in layout.dims:
        plain = all(c.order == "contiguous" and c.copies == 1 for c in dim.cuts)
        if dim.cuts and (dim.segments != (1,) or dim.keep is not None or not plain):
            return Unknown(f"a parameter in the layout {layout.describe()} was used outside of its module")
    cuts = tuple((i, c.axis) for i, d in enumerate(layout.dims) for c in d.cuts)
    return Spread(cuts, layout.partial, layout.shared, any(d.uneven for d in layout.dims))


def _call_signature(tree: Any) -> list[Hashable]:
    """What may decide on the way that a call takes: types, dims, which have one entry, what is said."""
    if isinstance(tree, Tensor):
        return [(tree.dtype, tuple(n == 1 for n in tree.shape))]
    if isinstance(tree, (tuple, list)):
        return [type(tree), *(kind for item in tree for kind in _call_signature(item))]
    if isinstance(tree, dict):
        return [kind for key, item in tree.items() for kind in (str(key), *_call_signature(item))]
    return [repr(tree) if isinstance(tree, (bool, str, type(None))) else type(tree).__qualname__]


__all__ = ["ObservedSpread", "PropagatedTap", "LayoutPropagator", "layout_to_spread", "spreads_of_held_tensors", "turned"]
