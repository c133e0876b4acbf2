"""Mixtures of experts: the router, dispatched tokens, each expert's MLP, shared experts.

Experts compute on rows that a token dispatcher sent from other ranks; taps route them back to their
tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Undo
from megatron_flex.adapters.megatron_core import dense_layers
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.adapters.megatron_core.site_builder import (
    Kind,
    Packing,
    ParameterKind,
    SiteBuilder,
    SiteForm,
    fused_part,
    used_on_local_tokens,
)
from megatron_flex.adapters.taps import (
    add_hook,
    intercept,
    join_undos,
    method_output,
    module_input,
    module_output,
)
from megatron_flex.collectives import Dispatch, Route
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap, TapCallbacks, model_order

DISPATCH_METHODS = ("dispatch_preprocess", "token_permutation")  # the second before megatron-core 0.14


def expert_rows(
    _: Any,
    callbacks: TapCallbacks,
    tap: Tap,
    layer: nn.Module,
    layout: Layout,
    home: Layout,
    stream: Layout,
    mesh: Mesh,
    expert: int | None = None,
    owned: bool = True,
) -> Undo:
    """A tensor of experts, routed back to its tokens; on ranks without the expert too, with no rows.

    Args:
        tap: access to the tensor, whose dim 0 has the rows of this rank's experts.
        layer: the layer of experts.
        layout: the layout of the tensor over `etp`.
        home: the layout of the tensor when its rows are with their tokens.
        stream: the layout of the tokens.
        mesh: the run's axes.
        expert: if given, the tensor has the rows of one expert only, on this rank or on another.
        owned: whether it is on this rank.
    """
    watch = _DispatchWatch.on(layer)
    unwatch = watch.add(stream, mesh)

    def run(local: Tensor, _: Layout | None = None, __: Any = None) -> Tensor:
        assert watch.dispatch is not None, "experts run after their dispatcher"
        route = Route(watch.dispatch, layout, home, expert)
        if owned:
            return cast(Tensor, callbacks.run(local, None, route))
        no_rows = local[:0]
        passed: Tensor = callbacks.run(no_rows, None, route)
        return local if passed is no_rows else torch.cat([local, passed])

    return join_undos([unwatch, tap.install(callbacks._replace(run=run))])


class RoutedRows(NamedTuple):
    """What tensors of experts have, for estimates.

    Attributes:
        layout: as in `expert_rows`.
        expert: as in `expert_rows`.
    """

    layout: Layout
    expert: int | None


def rows_of_experts(site: Site) -> RoutedRows | None:
    """The rows at a site; None if it has no tensor of experts."""
    if site.tap is None or site.tap.function is not expert_rows:
        return None
    arguments = site.tap.arguments
    return RoutedRows(arguments[2], arguments[6] if len(arguments) > 6 else None)


def expert_indices(module: nn.Module, callbacks: TapCallbacks, stream: Layout, mesh: Mesh) -> Undo:
    """The expert numbers of each token, in ascending order; -1 where there are fewer. An edit has no effect.

    Args:
        module: the layer of experts.
        stream: the layout of the tokens.
        mesh: the run's axes.
    """
    watch = _DispatchWatch.on(module)
    return watch.add(stream, mesh, lambda dispatch: callbacks.run(dispatch.indices))


def router_tokens(module: nn.Module, callbacks: TapCallbacks, tap: Tap) -> Undo:
    """A tensor of a router with one row for each token, viewed as `[s, b, ...]`."""
    token_shape: list[tuple[int, int]] = []

    def measure(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["input"]
        token_shape[:] = [tuple(tokens.shape[:2])]

    def run(local: Tensor, _: Layout | None = None, __: Any = None) -> Tensor:
        dense = local.view(*token_shape[0], *local.shape[1:])
        passed: Tensor = callbacks.run(dense)
        return local if passed is dense else passed.reshape(local.shape)

    unwatch = add_hook(module, measure, pre=True, with_kwargs=True)
    return join_undos([unwatch, tap.install(callbacks._replace(run=run))])


Notify = Callable[[Dispatch], Any]


class _DispatchWatch:
    """State shared by the taps of one layer: the dispatch of its current call."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.dispatch: Dispatch | None = None
        # By a key for each call of `add`: a hook and `verify()` may both install the same tap.
        self._users: dict[object, tuple[Layout, Mesh, Notify | None]] = {}
        dispatcher = layer.token_dispatcher
        method = next(m for m in DISPATCH_METHODS if hasattr(dispatcher, m))
        self._signature = inspect.signature(getattr(dispatcher, method))
        self._restore = intercept(dispatcher, method, self._around)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @staticmethod
    def on(layer: nn.Module) -> _DispatchWatch:
        """The layer's watch; created if it has none."""
        attributes = vars(layer)
        if attributes.get("_flex_watch") is None:  # a copy of a watched layer has None
            attributes["_flex_watch"] = _DispatchWatch(layer)
        return attributes["_flex_watch"]  # type: ignore[no-any-return]  # set above alone; vars() are of any type

    def add(self, stream: Layout, mesh: Mesh, notify: Notify | None = None) -> Undo:
        """Keep watching for a tap of tokens with the layout `stream`, and notify it of each dispatch."""
        user = object()
        self._users[user] = stream, mesh, notify

        def undo() -> None:
            del self._users[user]
            if not self._users:
                self._restore()
                del vars(self.layer)["_flex_watch"]

        return undo

    def _around(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        tokens, chosen = next(iter(given.values())), given["routing_map"]
        stream, mesh, _ = next(iter(self._users.values()))
        self.dispatch = Dispatch(
            chosen.detach(),
            (int(tokens.shape[0]), int(tokens.shape[1])),
            self.layer.config.moe_router_topk,
            stream,
            "AlltoAll" in type(self.layer.token_dispatcher).__name__,
            mesh,
        )
        for *_, notify in self._users.values():
            if notify is not None:
                notify(self.dispatch)
        return dispatch(*args, **kwargs)


FIXED_MAP = "the dispatcher sizes its buffers by it; edit router:logits or router:probs"
ADAPTED_ROUTER = "{kind} is around the router and adds to its logits inside its forward; hook router:probs"
FIXED_INDICES = "these are numbers read off the routing map; edit router:logits to choose other experts"
OTHER_DISPATCHER = (
    "moe_token_dispatcher_type={kind!r} orders tokens inside its kernels; use 'alltoall' or 'allgather' to "
    "have what experts compute on"
)
PADDED_ROWS = (
    "{name}={value} gives experts rows that belong to no token; turn it off to have what they compute on"
)
SHARED_EXPERT_OVERLAP = (
    "moe_shared_expert_overlap=True runs the shared experts piecemeal inside the dispatcher; set it to False "
    "(drop --moe-shared-expert-overlap)"
)
FUSED_EXPERTS = (
    "{kind} runs all experts in one kernel; leave out --moe-grouped-gemm to have single experts, or hook "
    "all of them together at experts:dispatched, experts.linear_fc1, experts.linear_fc2 and experts:output"
)
OP_FUSER_EXPERTS = (
    "use_transformer_engine_op_fuser=True keeps it inside one kernel; set it to False to have it as a tensor"
)

# Over `etp`: rows that are replicated (with partial gradients), sharded, and partial.
ROW_DIM = Dim("t")
ROW_WEIGHTS = Layout((ROW_DIM,), shared=("etp",))
FULL_ROWS = Layout((ROW_DIM, Dim("h")), shared=("etp",))
CUT_ROWS = Layout((ROW_DIM, Dim("f", (Cut("etp"),))))
PARTIAL_ROWS = Layout((ROW_DIM, Dim("h")), partial=("etp",))


def moe_layer(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A layer of experts: input and output on the residual stream, and the tensors between."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from _router(b, f"{path}.router", module.router)
    yield from _experts(b, f"{path}.experts", module)
    shared = getattr(module, "shared_experts", None)
    if shared is not None:
        width = b.config.moe_shared_expert_intermediate_size
        hidden = SHARED_EXPERT_OVERLAP if b.config.moe_shared_expert_overlap else ""
        yield from dense_layers.mlp(b, f"{path}.shared_experts", shared, width, hidden)


def _router(b: SiteBuilder, path: str, router: Any) -> Iterator[Site]:
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, router, (0, "input")))
    logits = b.of.per_token("e")
    hidden = "" if hasattr(router, "gating") else ADAPTED_ROUTER.format(kind=type(router).__name__)
    yield b.site(f"{path}:logits", logits, Tap(method_output, router, ("gating",)), hidden)
    yield b.site(f"{path}:probs", logits, Tap(module_output, router, (0,)).around(router_tokens))
    yield b.site(
        f"{path}:map",
        logits,
        Tap(module_output, router, (1,)).around(router_tokens),
        read_only_reason=FIXED_MAP,
    )


def _experts(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The input and output of all experts together, by token and slot."""
    experts, hidden, stream = module.experts, _why_hidden(b), b.of.stream()
    yield b.site(
        f"{path}:indices",
        b.of.per_token("k"),
        Tap(expert_indices, module, (stream, b.mesh)),
        hidden,
        read_only_reason=FIXED_INDICES,
    )
    for point, tap, layout in (
        ("weights", Tap(module_input, experts, (2, "permuted_probs")), ROW_WEIGHTS),
        ("dispatched", Tap(module_input, experts, (0, "permuted_local_hidden_states")), FULL_ROWS),
        ("output", Tap(module_output, experts), PARTIAL_ROWS),
    ):
        home = b.of.per_token("k", *(d.name for d in layout.dims[1:]))
        width = None if layout is ROW_WEIGHTS else _entry_width(b)
        rows = tap.around(expert_rows, module, layout, home, stream, b.mesh)
        yield b.site(f"{path}:{point}", home, rows, hidden, width)
    if is_megatron(experts, "TEGroupedMLP"):
        yield from _grouped_linears(b, path, module, hidden)
    yield from _expert_sites(b, path, module, hidden)


def _grouped_linears(b: SiteBuilder, path: str, module: Any, hidden: str) -> Iterator[Site]:
    """The two grouped linears of all experts, by token and slot."""
    fc1, fc2, stream = module.experts.linear_fc1, module.experts.linear_fc2, b.of.stream()
    if getattr(module.experts, "_with_fused_impl", False):
        hidden = hidden or OP_FUSER_EXPERTS
    hidden = hidden or _why_padded(b)
    width, wide, entry = _expert_width(b), _fc1_output_layout(b), _entry_width(b)
    for point, tap, layout, last in (
        ("linear_fc1:input", Tap(module_input, fc1, (0, "x")), FULL_ROWS, entry),
        ("linear_fc1:output", Tap(module_output, fc1), wide, width * (1 + bool(b.config.gated_linear_unit))),
        ("linear_fc2:input", Tap(module_input, fc2, (0, "x")), CUT_ROWS, width),
        ("linear_fc2:output", Tap(module_output, fc2), PARTIAL_ROWS, entry),
    ):
        home = b.of.per_token("k", layout.dims[-1].name)
        rows = tap.around(expert_rows, module, layout, home, stream, b.mesh)
        yield b.site(f"{path}.{point}", home, rows, hidden, last)


class _ExpertPoint(NamedTuple):
    """A hook point that each expert of a layer has, with what does not depend on the expert.

    Attributes:
        name: what follows the expert's path in the name.
        part: which module of the expert's MLP: 0 the MLP, 1 `linear_fc1`, 2 `linear_fc2`.
        function: the tap of that module's tensor.
        arguments: those of the tap.
        layout: the layout of the tensor over `etp`.
        home: the layout of the tensor when its rows are with their tokens.
        shape: the shape of the full tensor.
    """

    name: str
    part: int
    function: Callable[..., Undo]
    arguments: tuple[Any, ...]
    layout: Layout
    home: Layout
    shape: tuple[int | str, ...]


def _expert_points(b: SiteBuilder) -> list[_ExpertPoint]:
    """The hook points of an expert's MLP in the order of the data flow."""
    width, wide, entry = _expert_width(b), _fc1_output_layout(b), _entry_width(b)
    gated, halves = bool(b.config.gated_linear_unit), Packing(1, (1, 1))
    declared: list[tuple[str, int, Callable[..., Undo], tuple[Any, ...], Layout, int]] = [
        (":input", 0, module_input, (0, "hidden_states"), FULL_ROWS, entry),
        (".linear_fc1:input", 1, module_input, (0, "input_"), FULL_ROWS, entry),
        (".linear_fc1:output", 1, module_output, (), wide, width * (1 + gated)),
        (".linear_fc1:gate", 1, fused_part, (0, halves), CUT_ROWS, width),
        (".linear_fc1:up", 1, fused_part, (1, halves), CUT_ROWS, width),
        (".linear_fc2:input", 2, module_input, (0, "input_"), CUT_ROWS, width),
        (".linear_fc2:output", 2, module_output, (), PARTIAL_ROWS, entry),
        (":output", 0, module_output, (), PARTIAL_ROWS, entry),
    ]
    out = []
    for name, part, function, arguments, layout, last in declared:
        if gated or not name.endswith((":gate", ":up")):
            home = b.of.expert_rows(layout.dims[-1].name)
            shape = b.shape(home, last)
            out.append(_ExpertPoint(name, part, function, arguments, layout, home, shape))
    return out


def _expert_sites(b: SiteBuilder, path: str, module: Any, hidden: str) -> Iterator[Site]:
    """Each expert's MLP, with the rows of its tokens in their order; on ranks without the expert too."""
    local = getattr(module.experts, "local_experts", None)
    if local is None:
        hidden = hidden or FUSED_EXPERTS.format(kind=type(module.experts).__name__)
        local = [module.experts]
    hidden = hidden or _why_padded(b)
    parts = [(m, getattr(m, "linear_fc1", m), getattr(m, "linear_fc2", m)) for m in local]
    each, expert_rank, stream = len(module.local_expert_indices), b.mesh["ep"].coord, b.of.stream()
    points, mesh, stage = _expert_points(b), b.mesh, b.stage
    order = model_order(Site(f"{path}:output", stream, (), stage))
    common = {"stage": stage, "hidden": hidden, "order": order}
    forms = [(*point[:6], SiteForm(Site, layout=point.home, shape=point.shape, **common)) for point in points]
    for expert in range(b.config.num_moe_experts):
        expert_parts, owned = parts[expert % len(parts)], expert // each == expert_rank
        front = f"{path}.local_experts.{expert}"
        for name, part, function, arguments, layout, home, form in forms:
            tap = Tap(function, expert_parts[part], arguments)
            rows = (tap, module, layout, home, stream, mesh, expert, owned)
            yield form.make(name=front + name, tap=Tap(expert_rows, tap.module, rows))


def _entry_width(b: SiteBuilder) -> int:
    """The features of the experts' input and output: the hidden size, unless there are latents."""
    return int(getattr(b.config, "moe_latent_size", None) or b.config.hidden_size)


def _expert_width(b: SiteBuilder) -> int:
    return int(b.config.moe_ffn_hidden_size or b.config.ffn_hidden_size)


def _fc1_output_layout(b: SiteBuilder) -> Layout:
    gated = bool(b.config.gated_linear_unit)
    return Layout((ROW_DIM, Dim("gate|up" if gated else "f", (Cut("etp"),), (1, 1) if gated else (1,))))


def _why_padded(b: SiteBuilder) -> str:
    low = next((n for n in ("fp8", "fp4") if getattr(b.config, n, None)), "")
    return PADDED_ROWS.format(name=low, value=getattr(b.config, low)) if low else ""


def _why_hidden(b: SiteBuilder) -> str:
    kind = b.config.moe_token_dispatcher_type
    if kind not in ("alltoall", "allgather"):
        return OTHER_DISPATCHER.format(kind=kind)
    for name in (
        "moe_pad_expert_input_to_capacity",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
    ):
        if getattr(b.config, name, False):
            return PADDED_ROWS.format(name=name, value=True)
    return ""


# -- parameters ----------------------------------------------------------------------------------------


def _grouped_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """`weight0`, `bias0`, ... of the experts of a grouped linear."""
    if role == "linear_fc1":
        return of.rows_cut(parameter.ndim, (1, 1) if of.config.gated_linear_unit else (1,))
    return of.columns_cut() if parameter.ndim == 2 else of.replicated(1, shared=False)


MOE_KINDS = (Kind(moe_layer, ("MoELayer",), ("mlp",)),)
MOE_PARAMETERS = (
    ParameterKind(_grouped_layout, ("TEGroupedLinear",), ("linear_fc1", "linear_fc2")),
    ParameterKind(used_on_local_tokens, ("Router", "SharedExpertMLP")),
)
