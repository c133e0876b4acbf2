"""Propagates the sharding of tensors through ordinary operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Undo, is_recomputing
from megatron_flex.adapters.layout_rules import FULL, Rule, Spread, SpreadOrUnknown, UnknownLayout
from megatron_flex.adapters.model_calls import (
    CompiledCaller,
    CompiledRegion,
    exclude_from_compilation,
)
from megatron_flex.adapters.module_names import named_parameters
from megatron_flex.adapters.named_inputs import count_cached_tokens, find_named_models
from megatron_flex.adapters.propagation.dim_names import describe_dims
from megatron_flex.adapters.propagation.layout_trace import LayoutTrace, UseWindow
from megatron_flex.adapters.taps import add_hook, intercept, join_undos, with_layouts
from megatron_flex.layout import Layout, is_plain
from megatron_flex.layout.gradient_layout import GradientEnds, GradientUses, find_unsummed_axes
from megatron_flex.mesh import Mesh
from megatron_flex.sites import DimNames, Tap, TapCallbacks

TensorPlace = tuple[str, int]  # a site, and the index of a tensor there
CALL_HOOK: dict[str, Any] = {"with_kwargs": True, "prepend": True}  # before the hooks of a session
PARAMETER_INDEX = -1  # instead of that index: the site is a parameter


@dataclass
class ObservedSpread:
    """The result of tracing at a hook point in one call.

    Attributes:
        spread: the sharding of the tensor.
        dims: its number of dims.
        ends: the effect of its uses on its gradient; None until the call has ended.
        window: those uses, until then.
    """

    spread: SpreadOrUnknown
    dims: int
    ends: GradientEnds | None = None
    window: UseWindow | None = None


def _propagated(
    _: Any,
    callbacks: TapCallbacks,
    tap: Tap,
    propagator: LayoutPropagator,
    site: str,
    rules: tuple[Spread | None, ...],
    receiver: nn.Module | None,
    leaf: int = 0,
) -> Undo:
    """A tap whose tensors' layouts are propagated; the arguments are those of `LayoutPropagator.tap`."""
    place, rule = (site, leaf), _rule_at(rules, leaf)
    spread_of = partial(propagator.record_tensor, place, rule, receiver)
    undo = with_layouts(None, callbacks, tap, spread_of, partial(propagator.passed, place), leaf)
    return join_undos([propagator.want(place), undo])


def _rule_at(rules: tuple[Spread | None, ...], index: int) -> Spread | None:
    return rules[index] if 0 <= index < len(rules) else None


@dataclass(frozen=True, eq=False)
class PropagatedParameter:
    """A parameter between parallel modules, whose uses determine the layout of its gradient.

    Attributes:
        propagator: the propagator.
        name: the parameter's name.
    """

    propagator: LayoutPropagator
    name: str

    @property
    def place(self) -> TensorPlace:
        """Its key among hook points."""
        return self.name, PARAMETER_INDEX

    def want(self) -> Undo:
        """Trace calls until the returned function is called."""
        return self.propagator.want(self.place)

    def gradient_uses(self) -> GradientUses:
        """The effect of the traced calls on its gradient, or the reason why no call was traced."""
        return self.propagator.parameter_uses(self.place)


@dataclass(frozen=True, eq=False)
class PropagatedNames:
    """The source of the names of the dims of a site's tensors.

    Attributes:
        propagator: the propagator.
        place: the site and the index of the tensor.
    """

    propagator: LayoutPropagator
    place: TensorPlace

    def leaf(self, index: int) -> PropagatedNames:
        """The names of another tensor of the same call."""
        return PropagatedNames(self.propagator, (self.place[0], index))

    def want(self) -> Undo:
        """Trace calls of which the names are not known, until the returned function is called."""
        return self.propagator.want_names(self.place)

    def find(self, local: Tensor) -> DimNames:
        """The names of the dims of the current tensor."""
        return self.propagator.find_names(self.place, local)


class LayoutPropagator:
    """Knows the sharding of one model's tensors.

    While a hook point of unknown layout has a hook, torch functions are traced in a call of the model. The
    result holds for all calls with the same kind of arguments.

    Attributes:
        root: the model.
        known: the modules with rules.
        requested: the hook points with hooks.
        shared: the parameters with partial gradients, and over which axes; None for those whose uses do not
            determine it. For traced calls only.
        calls: the number of traced calls.
        entering: the shardings of the model's first inputs; others are replicated over all ranks of a sample.
        handed: tensors that the model's next call gets in another way than as arguments; then `entering` is
            about these.
        left: the shardings of the tensors that the model returned; None to trace the next call for that.
        named: the modules whose inputs have dims with known names.
        regions: the parts of the model that are compiled, which a traced call runs uncompiled.
    """

    def __init__(
        self,
        root: nn.Module,
        known: Mapping[nn.Module, Rule],
        mesh: Mesh,
        regions: Sequence[CompiledRegion | CompiledCaller] = (),
    ) -> None:
        self.root, self.known, self.mesh, self.regions = root, known, mesh, regions
        self.named = find_named_models(root)
        self._names_requested: Counter[TensorPlace] = Counter()
        self._names: dict[Hashable, dict[TensorPlace, set[tuple[tuple[str, ...], int]]]] = {}
        self._names_now: dict[TensorPlace, set[tuple[tuple[str, ...], int]]] = {}
        self._cached_tokens = 0  # tokens of the text in earlier calls
        self._watched = False
        self._naming: list[Undo] = []  # what is installed while names are wanted
        self.requested: Counter[TensorPlace] = Counter()
        self.shared: dict[str, tuple[str, ...] | None] = {}
        self.calls = 0
        self._answers: dict[Hashable, dict[TensorPlace, list[ObservedSpread]]] = {}
        self._now: dict[TensorPlace, list[ObservedSpread]] = {}  # of this kind of call, or the last one
        self._passes: Counter[TensorPlace] = Counter()  # in this call
        self._trace: LayoutTrace | None = None
        self._calls = 0  # nested calls of the model
        self.entering: list[SpreadOrUnknown] = []
        self.handed: list[Tensor] = []
        self.left: list[SpreadOrUnknown] | None = []

    def tap(
        self,
        site: str,
        tap: Tap,
        rules: tuple[Spread | None, ...],
        receiver: nn.Module | None,
    ) -> Tap:
        """A wrapper of a tap, with propagation.

        Args:
            site: the site's name.
            tap: the tap to wrap.
            rules: the shardings that the module's rule declares, of the first tensors of the call.
            receiver: the module whose input it is, if it is an input.
        """
        around = tap.around(_propagated, self, site, rules, receiver)
        around.uses = partial(self.observe_uses, site, rules, receiver)
        return around

    def want(self, place: TensorPlace) -> Undo:
        """Trace calls that reach a hook point, until the returned function is called."""
        self.requested[place] += 1

        def forget() -> None:
            self.requested[place] -= 1
            self.requested += Counter()  # drops entries with count zero

        return forget

    def want_names(self, place: TensorPlace) -> Undo:
        """Trace calls in which the names of the dims at a hook point are not known, until that is undone."""
        self._names_requested[place] += 1
        if not self._naming:
            self._naming = [add_hook(m, self._count_cached, pre=True, **CALL_HOOK) for m in self.named]
            if not self._watched:
                around = exclude_from_compilation(self._around)
                self._naming.append(intercept(self.root, "_call_impl", around))

        def forget() -> None:
            self._names_requested[place] -= 1
            self._names_requested += Counter()  # drops entries with count zero
            if not self._names_requested:
                for undo in self._naming:
                    undo()
                self._naming = []

        return forget

    def _count_cached(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            self._cached_tokens = count_cached_tokens(module, args, kwargs)

    # -- at a hook point -------------------------------------------------------------------------------

    def find_names(self, place: TensorPlace, local: Tensor) -> DimNames:
        """The names of the dims of the current tensor, as they were in the traced call of the same kind."""
        if self._trace is not None:
            dims = self._trace.names_of(local)
            known = (
                (("",) * local.ndim, 0) if dims is None else (describe_dims(dims), self._trace.heads(dims))
            )
            self._names_now.setdefault(place, set()).add(known)
        fitting = [(n, heads) for n, heads in self._names_now.get(place, ()) if len(n) == local.ndim]
        columns = zip(*(n for n, _ in fitting), strict=True)
        names = tuple(column[0] if len(set(column)) == 1 else "" for column in columns) or ("",) * local.ndim
        return DimNames(names, self._cached_tokens, fitting[0][1] if len(fitting) == 1 else 0)

    def spread_of(self, site: str, rule: Spread | None, tensor: Tensor) -> SpreadOrUnknown:
        """The sharding of a tensor at a site; `rule` is what its module's rule declares."""
        return rule or self._recorded_spread((site, 0), tensor)

    def record_tensor(
        self, place: TensorPlace, rule: Spread | None, receiver: nn.Module | None, local: Tensor
    ) -> SpreadOrUnknown:
        """The sharding of a tensor at a tap; also traces the tensor's uses."""
        number = self._passes[place]
        self._passes[place] += 1
        trace = self._trace
        if trace is None:
            return rule or self._recorded_spread(place, local, number)
        mark = trace.mark(local)
        spread = rule or mark.spread
        answer = ObservedSpread(spread, local.ndim, window=trace.window(local, receiver))
        self._now.setdefault(place, []).append(answer)
        trace.opaque += 1  # operations in hooks are not the model's
        return spread

    def passed(self, place: TensorPlace, local: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """Hooks have replaced a tensor."""
        if self._trace is None:
            return
        self._trace.opaque -= 1
        if new is local:
            return
        self._trace.pass_on(local, new, spread)
        self._now[place][-1].window = self._trace.window(new, None)

    def outside(self, local: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """The result of `run`, the hooks on a tensor of a declared layout; they are not the model's code."""
        trace = self._trace
        if trace is None or trace.opaque:
            return run()
        spread = trace.mark(local).spread
        trace.opaque += 1
        try:
            new = run()
        finally:
            trace.opaque -= 1
        trace.pass_on(local, new, spread)
        return new

    def _recorded_spread(self, place: TensorPlace, local: Tensor, number: int = 0) -> SpreadOrUnknown:
        by_place = self._all(place) if is_recomputing() or not self._calls else self._now
        observed = by_place.get(place, [])
        fitting = [a for a in observed if a.dims == local.ndim]
        if not fitting:
            return UnknownLayout(
                "it passed in a call that was not followed, of a part of the model by itself or in another "
                "thread; call the model"
            )
        if all(a.spread == fitting[0].spread for a in fitting):
            return fitting[0].spread
        if by_place is self._now and number < len(observed) and observed[number].dims == local.ndim:
            return observed[number].spread
        return UnknownLayout("it is sharded differently over the ranks each time that the module runs")

    def observe_uses(
        self, site: str, rules: tuple[Spread | None, ...], receiver: nn.Module | None, index: int
    ) -> Callable[[], GradientUses] | None:
        """A function that returns the uses of a tap's current tensor afterwards; None if a rule decides."""
        if receiver is not None and _rule_at(rules, index) is not None:
            return None
        place = site, index
        by_place = self._all(place) if is_recomputing() or not self._calls else self._now

        return partial(_collect_uses, by_place, place)

    def parameter_uses(self, place: TensorPlace) -> GradientUses:
        """The uses of a parameter in the traced calls, for their backward pass."""
        by_place = self._all(place)
        if not by_place[place]:
            return "the model was called before the hook was there, or a part of it by itself; call the model"
        return _collect_uses(by_place, place)

    def _all(self, place: TensorPlace) -> dict[TensorPlace, list[ObservedSpread]]:
        """The results at a hook point for all kinds of calls: the kind is unknown during recomputation."""
        return {place: [a for answers in self._answers.values() for a in answers.get(place, [])]}

    # -- around calls ----------------------------------------------------------------------------------

    def watch(self) -> Undo:
        """Trace calls while the layout at a wanted hook point is unknown, until the result is called."""
        self._watched = True
        return intercept(self.root, "_call_impl", self._around)

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (
            self._calls
            or not (self.requested or self._names_requested or self.left is None)
            or is_recomputing()
        ):
            return call(*args, **kwargs)
        self._calls += 1
        self._passes.clear()
        kind = self.root.training, *_call_signature(args), *_call_signature(kwargs)
        self._now = self._answers.setdefault(kind, {})
        self._names_now = self._names.setdefault(kind, {})
        self._cached_tokens = 0
        try:
            known = self.requested.keys() <= self._now.keys()
            if self.left is not None and known and self._names_requested.keys() <= self._names_now.keys():
                return call(*args, **kwargs)
            return self._propagate_call(kind, call, *args, **kwargs)
        finally:
            self._calls -= 1

    def _propagate_call(self, kind: Hashable, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._now = self._answers[kind] = {}
        self._names_now = self._names[kind] = {}
        spreads = spreads_of_held_tensors(self.root, self.known)
        spreads |= {id(tensor): spread for tensor, spread in zip(self.handed, self.entering, strict=False)}
        self._trace = trace = LayoutTrace(self.root, self.known, self.mesh, spreads, self.named)
        good = False
        for region in self.regions:
            region.enter()
        try:
            output = trace.run([] if self.handed else self.entering, call, *args, **kwargs)
            good, self.left = True, trace.left
        finally:
            self._trace = None
            for region in self.regions:
                region.leave()
            if not good:
                self._answers.pop(kind, None)
                self._names.pop(kind, None)
        self.calls += 1
        for place in self._names_requested:  # those that the call did not reach are not traced for again
            self._names_now.setdefault(place, set())
        for name, tensor in named_parameters(self.root):
            ends = trace.mark(tensor).node.find_ends()
            if (name, PARAMETER_INDEX) in self.requested:
                self._now[name, PARAMETER_INDEX] = [ObservedSpread(FULL, tensor.ndim, ends)]
            axes = find_unsummed_axes(ends)
            if axes != ():
                self.shared[name] = axes
        for answers in self._now.values():
            for answer in answers:
                if answer.window is not None:
                    answer.ends, answer.window = answer.window.find_ends(), None
        return output


def _collect_uses(
    by_place: Mapping[TensorPlace, list[ObservedSpread]], place: TensorPlace
) -> frozenset[GradientEnds]:
    """The effect of the uses at a hook point on its gradient, for each kind of call."""
    return frozenset({a.ends or frozenset() for a in by_place.get(place, [])})


def spreads_of_held_tensors(root: nn.Module, known: Mapping[nn.Module, Rule]) -> dict[int, SpreadOrUnknown]:
    """The shardings of tensors that modules own, by identity: parameters, buffers and others."""
    out: dict[int, SpreadOrUnknown] = {}
    for module in root.modules():
        layouts = known[module].parameters if module in known else {}
        attributes = (value for value in vars(module).values() if isinstance(value, Tensor))
        for tensor in (*module.buffers(recurse=False), *attributes):
            out.setdefault(id(tensor), FULL)
        for name, parameter in module.named_parameters(recurse=False):
            spread: SpreadOrUnknown = layout_to_spread(layouts[name]) if name in layouts else FULL
            if out.get(id(parameter), FULL) == FULL:
                out[id(parameter)] = spread
    return out


def layout_to_spread(layout: Layout) -> SpreadOrUnknown:
    """The sharding of a parameter's layout, if it has equal contiguous shards."""
    for dim in layout.dims:
        plain = all(is_plain(c) for c in dim.cuts)
        if dim.cuts and (dim.segments != (1,) or dim.keep is not None or not plain):
            return UnknownLayout(
                f"a parameter in the layout {layout.describe()} was used outside of its module"
            )
    cuts = tuple((i, c.axis) for i, d in enumerate(layout.dims) for c in d.cuts)
    return Spread(cuts, layout.partial, layout.shared, any(d.uneven for d in layout.dims))


def _call_signature(tree: Any) -> list[Hashable]:
    """Properties that may decide the path of a call: types, dims, dims of one entry, declared shardings."""
    if isinstance(tree, Tensor):
        return [(tree.dtype, tuple(n == 1 for n in tree.shape))]
    if isinstance(tree, (tuple, list)):
        return [type(tree), *(kind for item in tree for kind in _call_signature(item))]
    if isinstance(tree, dict):
        return [kind for key, item in tree.items() for kind in (str(key), *_call_signature(item))]
    return [repr(tree) if isinstance(tree, (bool, str, type(None))) else type(tree).__qualname__]


__all__ = [
    "LayoutPropagator",
    "ObservedSpread",
    "layout_to_spread",
    "spreads_of_held_tensors",
]
