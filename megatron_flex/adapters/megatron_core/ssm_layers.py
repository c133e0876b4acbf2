"""Layers without attention: Mamba's mixer and the gated delta net.

One projection computes several tensors at once. Each of them is sharded over tensor parallel ranks
separately, so that a rank holds `[z | x | B | C | dt]` of its own heads. The scan is one kernel; the sites
are its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.adapted_linears import packed_alike, unadapted
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import COLUMN_LINEARS, is_identity, is_megatron
from megatron_flex.adapters.megatron_core.site_builder import (
    Kind,
    OwnerKind,
    Packing,
    SiteBuilder,
    fused_part,
    norm_inside,
)
from megatron_flex.adapters.taps import method_input, method_output, module_input, module_output
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.sites import Site, Tap

PREPARE, DECAY, RULE = "_prepare_input_for_gated_delta_rule", "_compute_g_and_beta", "gated_delta_rule"
PackedWidths = dict[str, int]  # the packed tensors by name, with their widths in the full tensor


def refuse_context_parallel(root: nn.Module, context_parallel: int) -> None:
    """Raise where context parallelism exchanges sequence for heads inside these layers.

    Raises:
        FlexError: the model has such a layer and runs with context parallelism.
    """
    if context_parallel == 1:
        return
    for module in root.modules():
        if is_megatron(module, "MambaMixer", "GatedDeltaNet"):
            raise FlexError(
                f"context_parallel_size={context_parallel}: context parallel inside Mamba (and gated delta "
                "nets) is not supported; run models with such layers with a context parallel size of 1"
            )


# -- sites -------------------------------------------------------------------------------------------


def mamba_layer(b: SiteBuilder, path: str, layer: Any) -> Iterator[Site]:
    """A layer of one mixer: the residual stream before and after the mixer, and the norm."""
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, layer, (0, "hidden_states")))
    if not is_identity(layer.norm):
        yield from b.both(f"{path}.norm", layer.norm, b.of.stream(), "x")
    linear = getattr(layer.mixer, "in_proj", None)
    yield from norm_inside(b, f"{path}.norm", layer.norm, linear, b.of.stream())
    yield b.site(f"{path}:output", b.of.stream(), Tap(module_output, layer))


def mixer(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Mamba's mixer: the packed projection, the scan's output, the norm over groups, the output linear."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from _packed_linear(b, f"{path}.in_proj", module.in_proj, mamba_parts(module))
    norm = getattr(module, "norm", None) if module.rmsnorm else None
    if norm is not None:
        layout, width = b.of.features("z"), module.d_inner
        yield b.site(f"{path}.norm:input", layout, Tap(module_input, norm, (0, "x")), width=width)
        yield b.site(f"{path}.norm:output", layout, Tap(module_output, norm), width=width)
    yield from b.row(f"{path}.out_proj", module.out_proj, "z", module.d_inner)


def delta_net(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A gated delta net: the packed projection, the delta rule's inputs and output, the output linear."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from _packed_linear(b, f"{path}.in_proj", module.in_proj, delta_parts(module))
    for name, tap, layout, width in _delta_rule_taps(module):
        yield b.site(f"{path}:{name}", layout, tap, width=width)
    yield from b.row(f"{path}.out_proj", module.out_proj, "v", module.v_dim)


def _delta_rule_taps(module: Any) -> Iterator[tuple[str, Any, Layout, int]]:
    """The taps inside a delta net, by the methods of this version; `[b, s, ...]`, sharded over the heads.

    Each item includes the length of the full tensor's last dim.
    """
    rank = (Cut("tp"),)
    start = (Dim("b"), Dim("s"))
    each = Layout((*start, Dim("n", rank)))
    heads = Layout((*each.dims, Dim("d")))
    key, value = module.key_head_dim, module.value_head_dim
    if hasattr(module, PREPARE):
        widths = tuple(_convolved(delta_parts(module)).values())
        packed = Layout((*start, Dim("q|k|v", rank, widths)))
        yield "conv", Tap(method_input, module, (PREPARE, 0)), packed, sum(widths)
        for index, name in enumerate(("q", "k", "v", "gate")):
            size = key if name in "qk" else value
            yield name, Tap(method_output, module, (PREPARE, index)), heads, size
    if hasattr(module, DECAY):
        for index, name in enumerate(("g", "beta")):
            yield name, Tap(method_output, module, (DECAY, index)), each, module.num_value_heads
    if hasattr(module, RULE):
        yield "core", Tap(method_output, module, (RULE, 0)), heads, value


def _packed_linear(b: SiteBuilder, path: str, module: Any, parts: PackedWidths) -> Iterator[Site]:
    """The sites of a column-parallel linear that computes several packed tensors, and of each of them."""
    packed = b.of.features("|".join(parts), tuple(parts.values()))
    yield from b.column(path, module, packed, sum(parts.values()))
    hidden = b.no_rule(module, COLUMN_LINEARS)
    local = Packing(1, tuple(width // b.of.tp for width in parts.values()))
    for index, (name, width) in enumerate(parts.items()):
        tap = Tap(fused_part, module, (index, local))
        yield b.site(f"{path}:{name}", b.of.features(name), tap, hidden, width=width)


def mamba_parts(module: Any) -> PackedWidths:
    """The tensors in a mixer's `in_proj`: gate, input, the two projections of the state, the time step."""
    state = module.ngroups * module.d_state
    return {"z": module.d_inner, "x": module.d_inner, "B": state, "C": state, "dt": module.nheads}


def delta_parts(module: Any) -> PackedWidths:
    """The tensors in a gated delta net's `in_proj`."""
    qk, v, heads = module.qk_dim, module.v_dim, module.num_value_heads
    return {"q": qk, "k": qk, "v": v, "z": v, "beta": heads, "alpha": heads}


def _convolved(parts: PackedWidths) -> PackedWidths:
    """The packed tensors that are the input of the short convolution."""
    return {name: width for name, width in parts.items() if name in ("x", "B", "C", "q", "k", "v")}


SSM_KINDS = (
    Kind(mamba_layer, ("MambaLayer",)),
    Kind(mixer, ("MambaMixer",)),
    Kind(delta_net, ("GatedDeltaNet",), ("self_attention",)),
)


# -- parameters --------------------------------------------------------------------------------------


def _mamba_layer_layouts(of: ModelLayouts, layer: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    for parameter in layer.norm.parameters():
        yield parameter, of.replicated(parameter.ndim, shared=of.sequence_parallel)


def _mixer_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    yield from _scan_layouts(of, module, mamba_parts(module))
    for parameter in (module.D, *(module.norm.parameters() if module.rmsnorm else ())):
        yield parameter, _rows_cut(parameter)


def _delta_net_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    yield from _scan_layouts(of, module, delta_parts(module))
    for parameter in module.out_norm.parameters():  # each rank applies it to its own heads
        yield parameter, of.replicated(parameter.ndim, shared=True)


def _scan_layouts(
    of: ModelLayouts, module: Any, parts: PackedWidths
) -> Iterator[tuple[nn.Parameter, Layout]]:
    """The projection, the convolution and the parameters of each head, which both kinds of layer share."""
    yield module.A_log, _rows_cut(module.A_log)
    yield module.dt_bias, _rows_cut(module.dt_bias)
    convolution = getattr(module, "conv1d", None)  # a module, or since 0.19 in Mamba two parameters
    of_conv = [module.conv1d_weight, module.conv1d_bias] if convolution is None else convolution.parameters()
    for parameter in of_conv:
        yield parameter, _rows_cut(parameter, tuple(_convolved(parts).values()))
    if is_megatron(unadapted(module.in_proj), *COLUMN_LINEARS):
        adapted = [linear for _, linear in packed_alike(module.in_proj, of.tp)]
        for linear in adapted or [module.in_proj]:
            for name, parameter in linear.named_parameters():
                if name.rpartition(".")[2].startswith("layer_norm_"):  # of Transformer Engine's norm inside
                    yield parameter, of.replicated(parameter.ndim, shared=of.sequence_parallel)
                else:
                    yield parameter, _rows_cut(parameter, tuple(parts.values()))


def _rows_cut(parameter: nn.Parameter, segments: Sequence[int] = (1,)) -> Layout:
    """Sharded along the first dim, each of the packed parts separately."""
    return Layout((Dim("out", (Cut("tp"),), tuple(segments)), *(Dim() for _ in parameter.shape[1:])))


SSM_OWNERS = (
    OwnerKind(_mamba_layer_layouts, ("MambaLayer",)),
    OwnerKind(_mixer_layouts, ("MambaMixer",)),
    OwnerKind(_delta_net_layouts, ("GatedDeltaNet",)),
)
