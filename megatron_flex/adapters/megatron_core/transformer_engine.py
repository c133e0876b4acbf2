"""What Megatron's wrappers of Transformer Engine have of their own: norms inside linears, duplicated linears.

Its parallel linears are cut as Megatron's own are. They are known by the wrappers' class names; attributes on
parameters are no help, as Transformer Engine marks every weight that is not row-parallel as cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.build import COLUMN_LINEARS, ROW_LINEARS, SiteBuilder, ParameterKind
from megatron_flex.adapters.megatron_core.module_classes import is_megatron, is_identity
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput
from megatron_flex.layout import Layout
from megatron_flex.sites import Site

LINEAR_WITH_NORM = "TELayerNormColumnParallelLinear"
NORM_INSIDE = (
    "the norm is inside {kind} behind it, whose input is the tensor before the norm; build the layers with "
    "the local spec (--transformer-impl local) to have its output"
)


def is_duplicated(linear: Any) -> bool:
    """Whether a linear is the same on every tensor parallel rank."""
    return is_megatron(linear, "TELinear") and not is_megatron(linear, *COLUMN_LINEARS, *ROW_LINEARS)


def norm_inside(
    b: SiteBuilder, path: str, norm: Any, linear: Any, layout: Layout, width: int | None = None
) -> Iterator[Site]:
    """The sites of a norm that the spec leaves out because the linear behind it has it inside.

    What stands in the norm's place hands its input on, and `linear:input` is the same tensor.
    """
    if isinstance(norm, nn.Module) and is_identity(norm) and is_megatron(linear, LINEAR_WITH_NORM):
        yield b.site(f"{path}:input", layout, ModuleInput(norm, 0, "x"), width=width)
        hidden = NORM_INSIDE.format(kind=type(linear).__name__)
        yield b.site(f"{path}:output", layout, ModuleOutput(norm), hidden, width)


def _duplicated_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=of.sequence_parallel)


TRANSFORMER_ENGINE_PARAMETERS = (ParameterKind(_duplicated_layout, ("TELinear",)),)  # the parallel ones among them are known before
