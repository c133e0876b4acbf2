"""Multi-token prediction: layers behind the decoder, each of which predicts one token further.

They look their tokens up in the model's own embedding and hand their states to its own output layer, which
are therefore called once for each of them and once more for the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.build import COLUMN, Builder, Kind, ParameterKind
from megatron_flex.adapters.megatron_core.dense import norm
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.adapters.megatron_core.taps import Gemm
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput
from megatron_flex.layout import Dim, Layout
from megatron_flex.sites import Site

NORMS = ("enorm", "hnorm")


def block(b: Builder, path: str, module: Any) -> Iterator[Site]:
    """All depths as the output layer gets them: `[(1 + depths) * s, b, h]`, the decoder's states first."""
    stream = b.of.stream()
    sequence, *rest = stream.dims
    last = module.layers[-1].layer_number
    depths = b.config.mtp_num_layers if getattr(module, "mtp_use_repeated_layer", False) else last
    depth = Dim(f"{1 + depths}s", sequence.cuts, segments=(1,) * (1 + depths))
    yield b.site(f"{path}:output", Layout((depth, *rest)), ModuleOutput(module))


def layer(b: Builder, path: str, module: Any) -> Iterator[Site]:
    """One depth: the states it gets and those it gives to the next depth and to the output layer."""
    yield b.site(f"{path}:input", b.of.stream(), ModuleInput(module, 2, "hidden_states"))
    yield b.site(f"{path}:output", b.of.stream(), ModuleOutput(module))


def projection(b: Builder, path: str, module: Any) -> Iterator[Site]:
    """Embedding and states side by side, `[s, b, 2h]`, and what one linear makes of them."""
    cut = bool(getattr(module, "sequence_parallel", False))
    no = b.no_rule(module, COLUMN)
    width = 2 * b.config.hidden_size
    yield b.site(f"{path}:input", b.of.stream(cut), ModuleInput(module, 0, "input_"), no, width)
    yield b.site(f"{path}:gemm_input", b.of.gathered(), Gemm(module, before=True), no, width)
    yield b.site(f"{path}:output", b.of.features("h"), ModuleOutput(module), no)


def _norm(of: Layouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=of.sequence_parallel)


KINDS = (
    Kind(block, ("MultiTokenPredictionBlock",)),
    Kind(layer, ("MultiTokenPredictionLayer",)),
    Kind(norm, roles=NORMS),
    Kind(projection, roles=("eh_proj",)),
)
PARAMETERS = (ParameterKind(_norm, roles=NORMS),)
