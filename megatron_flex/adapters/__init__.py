"""Framework adapters: layouts, hook points, parameters and schedules of each framework.

The exported names are the building blocks of an adapter for another framework: docs/contributing/extend.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron_flex.adapters.adapter_base import (
    Adapter,
    Architecture,
    FrameworkMatch,
    Listener,
    LocalGradient,
    NormListener,
    ParameterSite,
    Part,
    StepReport,
    Undo,
    is_recomputing,
    training_argument,
    training_writers,
)
from megatron_flex.adapters.adapter_registry import Finder, register_adapter
from megatron_flex.adapters.decoder_paths import DecoderPaths, LayerPoint, NormPoint
from megatron_flex.adapters.detection import Detection, find_framework
from megatron_flex.adapters.layout_rules import FULL, Point, Rule, Rules, Spread, UnknownLayout
from megatron_flex.adapters.mesh_axes import make_axis
from megatron_flex.adapters.model_calls import ModelRunner
from megatron_flex.adapters.module_adapter import ModuleAdapter, compose
from megatron_flex.adapters.parameter_storage import ParameterStorage, StoredParameter
from megatron_flex.adapters.pipelining import list_model_chunks
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.pytorch import make_mesh
from megatron_flex.adapters.taps import any_input, any_output, intercept
from megatron_flex.sites import Tap, TapCallbacks

__all__ = [
    "FULL",
    "Adapter",
    "Architecture",
    "DecoderPaths",
    "Detection",
    "Finder",
    "FrameworkMatch",
    "LayerPoint",
    "Listener",
    "LocalGradient",
    "ModelRunner",
    "ModuleAdapter",
    "NormListener",
    "NormPoint",
    "ParameterSite",
    "ParameterStorage",
    "Part",
    "Point",
    "Prompts",
    "Rule",
    "Rules",
    "Spread",
    "StepReport",
    "StoredParameter",
    "Tap",
    "TapCallbacks",
    "Undo",
    "UnknownLayout",
    "any_input",
    "any_output",
    "compose",
    "detect",
    "intercept",
    "is_recomputing",
    "list_model_chunks",
    "make_axis",
    "make_mesh",
    "register_adapter",
    "training_argument",
    "training_writers",
]


def detect(
    chunks: list[nn.Module], sizes: Mapping[str, int | None] | None = None, process_group: Any = None
) -> Adapter:
    """Detect the framework that a model was built with; a model of none is a plain module.

    Args:
        chunks: the model, or its virtual pipeline chunks; bare or wrapped.
        sizes: user-given sizes of `tp`, `pp` and `dp`. A framework's must agree; for a plain module they
            are the mesh.
        process_group: the ranks of a plain module; the default group if None.

    Raises:
        FlexError: sizes contradict, the model cannot be hooked at all, two frameworks claim it, or one has a
            version that is not tested.
    """
    return find_framework(chunks, sizes or {}, process_group).make()
