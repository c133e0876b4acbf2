"""Detects DeepSpeed's engines, and creates their adapters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron_flex.adapters.adapter_base import AxisSizes
from megatron_flex.adapters.deepspeed import (
    DEEPSPEED_ENGINE,
    INFERENCE_ENGINE,
    PIPELINE_ENGINE,
    EngineSchedule,
    check_engine,
    deepspeed_mesh,
    find_storage,
)
from megatron_flex.adapters.module_adapter import ModuleAdapter, compose
from megatron_flex.adapters.module_names import is_deepspeed
from megatron_flex.errors import FlexError

FRAMEWORKS_WITH_RULES = (
    "megatron.",
    "fairscale.",
    "transformer_engine.",
    "apex.",
)  # their modules have rules of their own


def why_deepspeed(chunks: list[nn.Module]) -> str:
    """Why a model is DeepSpeed's; empty if it is not, or another framework's rules give its layouts."""
    for chunk in chunks:
        has_other_rules = any(
            c.__module__.startswith(FRAMEWORKS_WITH_RULES) for m in chunk.modules() for c in type(m).__mro__
        )
        if is_deepspeed(chunk, INFERENCE_ENGINE) or (
            is_deepspeed(chunk, DEEPSPEED_ENGINE) and not has_other_rules
        ):
            return f"it is in DeepSpeed's {type(chunk).__name__}"
    return ""


def make_engine_adapter(chunks: list[nn.Module], axis_sizes: AxisSizes) -> ModuleAdapter:
    """The adapter of a DeepSpeed engine, checked against the axis sizes that the user gave.

    Raises:
        FlexError: there are several, or it uses a feature without a rule.
    """
    if len(chunks) != 1:
        raise FlexError(f"{len(chunks)} models with a DeepSpeed engine among them; give one engine")
    engine = chunks[0]
    check_engine(engine)
    mesh = deepspeed_mesh(engine)
    mesh.check_sizes(axis_sizes)
    if is_deepspeed(engine, PIPELINE_ENGINE):
        storage = find_storage(engine, engine.get_submodule("module"), mesh)
        return PipelineModules(engine, mesh, None, storage, EngineSchedule(engine), "deepspeed")
    return compose(engine, mesh, name="deepspeed")


class PipelineModules(ModuleAdapter):
    """One stage of a PipelineModule, whose layers are named by their numbers in the full model."""

    def _callable(self) -> Iterator[tuple[str, nn.Module]]:
        """Its modules, but for the loss function, which all stages have and the last one calls."""
        last = self.mesh["pp"].coord == self.mesh["pp"].size - 1
        return (
            (name, module)
            for name, module in super()._callable()
            if last or name.partition(".")[0] != "loss_fn"
        )
