"""Mixtures of experts: the router, what is dispatched, each expert's MLP, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core import dense
from megatron_flex.adapters.megatron_core.build import Builder, Kind, ParameterKind
from megatron_flex.adapters.megatron_core.dispatch import Chosen, Rows, Tokens
from megatron_flex.adapters.megatron_core.fused import FusedPart, Packing
from megatron_flex.adapters.megatron_core.kinds import is_a
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.adapters.taps import MethodOutput, ModuleInput, ModuleOutput
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.sites import Site, Tap

MAP = "the dispatcher sizes its buffers by it; edit router:logits or router:probs"
INDICES = "these are numbers read off the routing map; edit router:logits to choose other experts"
FLEX = (
    "moe_token_dispatcher_type={kind!r} orders tokens inside its kernels; use 'alltoall' or 'allgather' to "
    "have what experts compute on"
)
PADDED = "{name}={value} gives experts rows that belong to no token; turn it off to have what they compute on"
OVERLAPPED = (
    "moe_shared_expert_overlap=True runs the shared experts piecemeal inside the dispatcher; set it to False "
    "(drop --moe-shared-expert-overlap)"
)
FUSED = (
    "{kind} runs all experts in one kernel; leave out --moe-grouped-gemm to have single experts, or hook "
    "all of them together at experts:dispatched, experts.linear_fc1, experts.linear_fc2 and experts:output"
)
OP_FUSER = (
    "use_transformer_engine_op_fuser=True keeps it inside one kernel; set it to False to have it as a tensor"
)

# Over `etp`: rows that are the same on all of it (each rank has a share of the gradient), cut, and summands.
ROW = Dim("t")
WEIGHTS = Layout((ROW,), shared=("etp",))
WHOLE = Layout((ROW, Dim("h")), shared=("etp",))
SPLIT = Layout((ROW, Dim("f", (Cut("etp"),))))
SUMMED = Layout((ROW, Dim("h")), partial=("etp",))


def layer(b: Builder, path: str, module: Any) -> Iterator[Site]:
    """A layer of experts: input and output on the residual stream, and what happens between."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from _router(b, f"{path}.router", module.router)
    yield from _experts(b, f"{path}.experts", module)
    shared = getattr(module, "shared_experts", None)
    if shared is not None:
        width = b.config.moe_shared_expert_intermediate_size
        hidden = OVERLAPPED if b.config.moe_shared_expert_overlap else ""
        yield from dense.mlp(b, f"{path}.shared_experts", shared, width, hidden)


def _router(b: Builder, path: str, router: Any) -> Iterator[Site]:
    yield b.site(f"{path}:input", b.of.stream(), ModuleInput(router, 0, "input"))
    logits = b.of.per_token("e")
    yield b.site(f"{path}:logits", logits, MethodOutput(router, "gating"))
    yield b.site(f"{path}:probs", logits, Tokens(router, ModuleOutput(router, 0)))
    yield b.site(f"{path}:map", logits, Tokens(router, ModuleOutput(router, 1)), fixed=MAP)


def _experts(b: Builder, path: str, module: Any) -> Iterator[Site]:
    """What all experts together get and give, by token and slot."""
    experts, no, stream = module.experts, _why_hidden(b), b.of.stream()
    yield b.site(f"{path}:indices", b.of.per_token("k"), Chosen(module, stream, b.mesh), no, fixed=INDICES)
    for point, tap, layout in (
        ("weights", ModuleInput(experts, 2, "permuted_probs"), WEIGHTS),
        ("dispatched", ModuleInput(experts, 0, "permuted_local_hidden_states"), WHOLE),
        ("output", ModuleOutput(experts), SUMMED),
    ):
        home = b.of.per_token("k", *(d.name for d in layout.dims[1:]))
        width = None if layout is WEIGHTS else _entry(b)
        yield b.site(f"{path}:{point}", home, Rows(tap, module, layout, home, stream, b.mesh), no, width)
    if is_a(experts, "TEGroupedMLP"):
        yield from _grouped(b, path, module, no)
    for expert in range(b.config.num_moe_experts):
        yield from _expert(b, f"{path}.local_experts.{expert}", module, expert, no)


def _grouped(b: Builder, path: str, module: Any, no: str) -> Iterator[Site]:
    """The two grouped linears of all experts, by token and slot."""
    fc1, fc2, stream = module.experts.linear_fc1, module.experts.linear_fc2, b.of.stream()
    if getattr(module.experts, "_with_fused_impl", False):
        no = no or OP_FUSER
    no = no or _why_padded(b)
    width, wide, entry = _width(b), _wide(b), _entry(b)
    for point, tap, layout, last in (
        ("linear_fc1:input", ModuleInput(fc1, 0, "x"), WHOLE, entry),
        ("linear_fc1:output", ModuleOutput(fc1), wide, width * (1 + bool(b.config.gated_linear_unit))),
        ("linear_fc2:input", ModuleInput(fc2, 0, "x"), SPLIT, width),
        ("linear_fc2:output", ModuleOutput(fc2), SUMMED, entry),
    ):
        home = b.of.per_token("k", layout.dims[-1].name)
        yield b.site(f"{path}.{point}", home, Rows(tap, module, layout, home, stream, b.mesh), no, last)


def _expert(b: Builder, path: str, module: Any, expert: int, no: str) -> Iterator[Site]:
    """One expert's MLP, with the rows of its tokens in their order; on ranks without it too."""
    local = getattr(module.experts, "local_experts", None)
    if local is None:
        no = no or FUSED.format(kind=type(module.experts).__name__)
        local = [module.experts]
    owned = expert // len(module.local_expert_indices) == b.mesh["ep"].coord
    mlp = local[expert % len(local)]
    fc1, fc2 = getattr(mlp, "linear_fc1", mlp), getattr(mlp, "linear_fc2", mlp)
    no = no or _why_padded(b)
    width, wide, entry, stream = _width(b), _wide(b), _entry(b), b.of.stream()
    halves: list[tuple[str, Tap, Layout, int]] = [
        (f".linear_fc1:{name}", FusedPart(fc1, index, Packing(1, (1, 1))), SPLIT, width)
        for index, name in enumerate(("gate", "up"))
        if b.config.gated_linear_unit
    ]
    for point, tap, layout, last in (
        *halves,
        (":input", ModuleInput(mlp, 0, "hidden_states"), WHOLE, entry),
        (".linear_fc1:input", ModuleInput(fc1, 0, "input_"), WHOLE, entry),
        (".linear_fc1:output", ModuleOutput(fc1), wide, width * (1 + bool(b.config.gated_linear_unit))),
        (".linear_fc2:input", ModuleInput(fc2, 0, "input_"), SPLIT, width),
        (".linear_fc2:output", ModuleOutput(fc2), SUMMED, entry),
        (":output", ModuleOutput(mlp), SUMMED, entry),
    ):
        home = b.of.rows_of_one(layout.dims[-1].name)
        rows = Rows(tap, module, layout, home, stream, b.mesh, expert, owned)
        yield b.site(f"{path}{point}", home, rows, no, last)


def _entry(b: Builder) -> int:
    """The features that experts get and give: the hidden size, unless latents go round."""
    return int(getattr(b.config, "moe_latent_size", None) or b.config.hidden_size)


def _width(b: Builder) -> int:
    return int(b.config.moe_ffn_hidden_size or b.config.ffn_hidden_size)


def _wide(b: Builder) -> Layout:
    gated = bool(b.config.gated_linear_unit)
    return Layout((ROW, Dim("gate|up" if gated else "f", (Cut("etp"),), (1, 1) if gated else (1,))))


def _why_padded(b: Builder) -> str:
    low = next((n for n in ("fp8", "fp4") if getattr(b.config, n, None)), "")
    return PADDED.format(name=low, value=getattr(b.config, low)) if low else ""


def _why_hidden(b: Builder) -> str:
    kind = b.config.moe_token_dispatcher_type
    if kind not in ("alltoall", "allgather"):
        return FLEX.format(kind=kind)
    for name in (
        "moe_pad_expert_input_to_capacity",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
    ):
        if getattr(b.config, name, False):
            return PADDED.format(name=name, value=True)
    return ""


# -- parameters ----------------------------------------------------------------------------------------


def _router_parameter(of: Layouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=of.sequence_parallel)


def _grouped_parameter(of: Layouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """`weight0`, `bias0`, ... of the experts of a grouped linear."""
    if role == "linear_fc1":
        return of.rows_cut(parameter.ndim, (1, 1) if of.config.gated_linear_unit else (1,))
    return of.columns_cut() if parameter.ndim == 2 else of.uncut(1, shared=False)


KINDS = (Kind(layer, ("MoELayer",), ("mlp",)),)
PARAMETERS = (
    ParameterKind(_grouped_parameter, ("TEGroupedLinear",), ("linear_fc1", "linear_fc2")),
    ParameterKind(_router_parameter, ("Router",)),
    ParameterKind(_router_parameter, ("SharedExpertMLP",)),
)
