"""An adapter of parts: a framework's rules, with whoever keeps the parameters and whoever calls the model."""

from __future__ import annotations

import sys

from torch import nn

from megatron_flex.adapters import ddp, fsdp, offloaded, dtensor_parameters
from megatron_flex.adapters.driving import UserLoop, Driving
from megatron_flex.adapters.parameter_storage import Keeping, ModuleParameters
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.rules import Rules
from megatron_flex.mesh import Mesh


def keeping_of(chunk: nn.Module, root: nn.Module, mesh: Mesh) -> Keeping:
    """Who keeps the parameters of a model: the outermost wrapper that shards or reduces them."""
    if "deepspeed" in sys.modules:
        from megatron_flex.adapters import deepspeed

        if (zero := deepspeed.keeping_of(chunk, root, mesh)) is not None:
            return zero
    if units := fsdp.fsdp_wrappers_of(chunk):
        return fsdp.FSDPParameters(root, units)
    if dtensor_parameters.has_dtensors(chunk):
        return dtensor_parameters.DTensorParameters(root, mesh, ddp.ddp_wrappers_of(chunk))
    if wrappers := ddp.ddp_wrappers_of(chunk):
        return ddp.DDPParameters(root, wrappers)
    if "accelerate" in sys.modules and offloaded.is_offloaded(chunk):
        return offloaded.OffloadedParameters(root)
    return ModuleParameters(root)


def driving_of(chunk: nn.Module, root: nn.Module, mesh: Mesh) -> Driving:
    """Who calls a model."""
    if "deepspeed" in sys.modules:
        from megatron_flex.adapters import deepspeed

        if (engine := deepspeed.driving_of(chunk, mesh)) is not None:
            return engine
    return UserLoop(chunk, mesh)


def compose(chunk: nn.Module, mesh: Mesh, rules: Rules | None = None, name: str = "plain") -> Modules:
    """The adapter of one module with what is found around it.

    Args:
        chunk: the module as it was given, with wrappers.
        mesh: the axes of the run.
        rules: of the framework whose parallel modules are in it; None where a person says the shapes.
        name: the framework's.
    """
    root = unwrap(chunk)
    return Modules(chunk, mesh, rules, keeping_of(chunk, root, mesh), driving_of(chunk, root, mesh), name)
