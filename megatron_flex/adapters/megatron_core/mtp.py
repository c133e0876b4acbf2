"""Multi-token prediction: layers behind the decoder, each of which predicts one token further.

They look their tokens up in the model's own embedding and hand their states to its own output layer, which
are therefore called once for each of them and once more for the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.build import COLUMN_LINEARS, SiteBuilder, Kind, ParameterKind
from megatron_flex.adapters.megatron_core.dense import norm
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.megatron_taps import Gemm
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput
from megatron_flex.layout import Dim, Layout
from megatron_flex.sites import Site

MTP_NORMS = ("enorm", "hnorm")


def mtp_block(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """All depths as the output layer gets them: `[(1 + depths) * s, b, h]`, the decoder's states first."""
    stream = b.of.stream()
    sequence, *rest = stream.dims
    last = module.layers[-1].layer_number
    depths = b.config.mtp_num_layers if getattr(module, "mtp_use_repeated_layer", False) else last
    depth = Dim(f"{1 + depths}s", sequence.cuts, segments=(1,) * (1 + depths))
    yield b.site(f"{path}:output", Layout((depth, *rest)), ModuleOutput(module))


def mtp_layer(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """One depth: the states it gets and those it gives to the next depth and to the output layer."""
    yield b.site(f"{path}:input", b.of.stream(), ModuleInput(module, 2, "hidden_states"))
    yield b.site(f"{path}:output", b.of.stream(), ModuleOutput(module))


def mtp_projection(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Embedding and states side by side, `[s, b, 2h]`, and what one linear makes of them."""
    cut = bool(getattr(module, "sequence_parallel", False))
    no = b.no_rule(module, COLUMN_LINEARS)
    width = 2 * b.config.hidden_size
    yield b.site(f"{path}:input", b.of.stream(cut), ModuleInput(module, 0, "input_"), no, width)
    yield b.site(f"{path}:gemm_input", b.of.gathered(), Gemm(module, before=True), no, width)
    yield b.site(f"{path}:output", b.of.features("h"), ModuleOutput(module), no)


def _mtp_norm_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=of.sequence_parallel)


MTP_KINDS = (
    Kind(mtp_block, ("MultiTokenPredictionBlock",)),
    Kind(mtp_layer, ("MultiTokenPredictionLayer",)),
    Kind(norm, roles=MTP_NORMS),
    Kind(mtp_projection, roles=("eh_proj",)),
)
MTP_PARAMETERS = (ParameterKind(_mtp_norm_layout, roles=MTP_NORMS),)
