"""Transformer Engine's layers without Transformer Engine: of the right names and shapes, never to be run.

An estimate asks Megatron's wrappers what they hold, not what they compute. While it is made, their
constructors make empty parameters; classes, specs and the models around them are Megatron's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatron_flex.cpu.megatron import build_norm
from megatron_flex.cpu.patches import Patches, loaded_modules

ASSUMED_TE_VERSION = "2.1.0"  # the version that specs see if Transformer Engine is not installed
TE_WRAPPERS_MODULE = "megatron.core.extensions.transformer_engine"


def _empty_parameter(config: Any, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype))


def _tensor_parallel_group(group: Any, expert: bool) -> tuple[Any, int]:
    from megatron.core import parallel_state

    if group is None:
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group()
        )
    return group, group.size()


def _linear_constructor(mode: str) -> Any:
    """The constructor of a linear; `norm` for one that is cut along its columns with a norm before it."""

    def init(
        self: Any,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool = True,
        is_expert: bool = False,
        tp_group: Any = None,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        group, size = _tensor_parallel_group(tp_group, is_expert)
        self.config, self.is_expert = config, is_expert
        kind = mode or parallel_mode or ""
        self.sequence_parallel = config.sequence_parallel and size > 1 and not is_expert
        if kind:
            self.tp_group = group
        rows = output_size // size if kind in ("column", "norm") else output_size
        columns = input_size // size if kind == "row" else input_size
        self.weight = _empty_parameter(config, rows, columns)
        self.register_parameter("bias", _empty_parameter(config, rows) if bias else None)
        if kind == "norm":
            self.layer_norm_weight = _empty_parameter(config, input_size)
            if config.normalization == "LayerNorm":
                self.layer_norm_bias = _empty_parameter(config, input_size)

    return init


def _grouped_constructor(mode: str) -> Any:
    """The constructor of the linears of all experts of a rank."""

    def init(
        self: Any,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool = False,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        _, size = _tensor_parallel_group(getattr(pg_collection, "expt_tp", None), expert=True)
        rows = output_size // size if mode == "column" else output_size
        columns = input_size // size if mode == "row" else input_size
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _empty_parameter(config, rows, columns))
            if bias:
                self.register_parameter(f"bias{number}", _empty_parameter(config, rows))

    return init


def _attention_constructor(self: Any, config: Any, *_: Any, **__: Any) -> None:
    nn.Module.__init__(self)
    self.config = config


CONSTRUCTORS = {
    "TELinear": _linear_constructor(""),
    "TEColumnParallelLinear": _linear_constructor("column"),
    "TERowParallelLinear": _linear_constructor("row"),
    "TELayerNormColumnParallelLinear": _linear_constructor("norm"),
    "TEDotProductAttention": _attention_constructor,
}
GROUPED_CONSTRUCTORS = {
    "TEColumnParallelGroupedLinear": _grouped_constructor("column"),
    "TERowParallelGroupedLinear": _grouped_constructor("row"),
}

TE_NAMES = (*CONSTRUCTORS, *GROUPED_CONSTRUCTORS, "TENorm", "TESpecProvider")


class _GatedNorm(nn.Module):
    """`mamba_ssm`'s norm over groups of features."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))


def _allow_missing_kernels(patches: Patches) -> None:
    """Let layers of state spaces be made without the libraries whose kernels they would run."""
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common, gdn

    if not mamba_mixer.HAVE_MAMBA_SSM:
        patches.set(mamba_mixer, "HAVE_MAMBA_SSM", True)
        patches.set(mamba_mixer, "ExtendedRMSNorm", _GatedNorm)
    if not common.HAVE_FLA:
        patches.set(common, "HAVE_FLA", True)
        patches.set(gdn, "chunk_gated_delta_rule", _refuse_to_run)


def _refuse_to_run(*_: Any, **__: Any) -> None:
    raise AssertionError("a model of an estimate is never run")


@contextmanager
def use_shape_only_layers() -> Iterator[None]:
    """Make Megatron's wrappers of Transformer Engine without it; everything is put back at the end."""
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as wrappers
    from megatron.core.extensions import transformer_engine_spec_provider as provider

    patches = Patches()
    try:
        for name, init in CONSTRUCTORS.items():
            kind = getattr(wrappers, name)
            patches.set(kind, "__init__", init)
            patches.set(kind, "__module__", TE_WRAPPERS_MODULE)
        patches.set(wrappers.TENorm, "__new__", staticmethod(_norm_constructor))
        if not getattr(wrappers, "HAVE_TE", False):
            patches.set(utils, "_te_version", utils.PkgVersion(ASSUMED_TE_VERSION))
        base = type("TEGroupedLinear", (nn.Module,), {"__module__": TE_WRAPPERS_MODULE})
        for name, init in GROUPED_CONSTRUCTORS.items():
            patches.set(
                wrappers, name, type(name, (base,), {"__init__": init, "__module__": TE_WRAPPERS_MODULE})
            )
        for module in loaded_modules(("megatron",)):
            _bind_missing_names(patches, module, wrappers, provider)
        _allow_missing_kernels(patches)
        yield
    finally:
        patches.restore()


def _bind_missing_names(patches: Patches, module: ModuleType, *owners: ModuleType) -> None:
    """Give a module the names of Transformer Engine that it has as None for want of it."""
    for name in [n for n, v in vars(module).items() if v is None and n in TE_NAMES]:
        patches.set(module, name, next(vars(o)[name] for o in owners if vars(o).get(name) is not None))


def _norm_constructor(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    return build_norm(config, hidden_size, eps)
