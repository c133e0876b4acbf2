"""A stand-in for Transformer Engine, which needs a GPU: its linears, norms and attention in plain torch.

Only `transformer_engine` itself is stood in for. `stand_in` makes Megatron import it anew, so that Megatron's
own wrappers (`TELinear`, `TERowParallelLinear`, ...) and its own layer specs run, on these classes instead of
Transformer Engine's. They do what its documentation says of the same arguments, with Megatron's collectives,
and are no proof of what its kernels do: cases that use them are called "TE stand-ins".
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = "2.1.0"
HIDDEN = ("gemm_input", "partial", "scores", "probs")  # what its kernels keep to themselves


def _parameter(module: nn.Module, name: str, shape: tuple[int, ...], dtype: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    module.register_parameter(name, parameter)
    return parameter


class Norm(nn.Module):
    """`te.pytorch.LayerNorm` and `RMSNorm`."""

    rms = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        hidden_size: int | None = None,  # what earlier versions called the shape
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        names = ["weight"] if self.rms else ["weight", "bias"]
        for name in names:
            _parameter(
                self, name, (normalized_shape or hidden_size,), params_dtype
            ).sequence_parallel = sequence_parallel
        nn.init.constant_(self.weight, 0.0 if zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, getattr(self, "bias", None), self)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, like: Any) -> Tensor:
    gamma = weight + 1 if like.zero_centered_gamma else weight
    shape = [x.shape[-1]]
    if bias is None:
        return F.rms_norm(x, shape, gamma, like.eps)
    return F.layer_norm(x, shape, gamma, bias, like.eps)


class LayerNorm(Norm):
    pass


class RMSNorm(Norm):
    rms = True


class Linear(nn.Module):
    """`te.pytorch.Linear`: column-parallel, row-parallel, or, with no mode, the same everywhere."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        weight = _parameter(self, "weight", (self.out_features, self.in_features), params_dtype)
        weight.tensor_model_parallel, weight.partition_dim = True, int(parallel_mode == "row")
        if init_method is not None:
            init_method(weight)
        added = nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype)) if bias else None
        self.register_parameter("bias", added)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.parallel_mode == "column":
            cut = self.sequence_parallel
            name = "gather_from_sequence_parallel" if cut else "copy_to_tensor_model_parallel"
            inp = self._collective(name, inp)
        out = F.linear(inp, self.weight)
        if self.parallel_mode == "row":
            cut = self.sequence_parallel
            name = "reduce_scatter_to_sequence_parallel" if cut else "reduce_from_tensor_model_parallel"
            out = self._collective(name, out)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias

    def _collective(self, name: str, tensor: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        function = getattr(mappings, f"{name}_region")
        known = "group" in inspect.signature(function).parameters
        moved: Tensor = function(tensor, **({"group": self.tp_group} if known else {}))
        return moved


class LayerNormLinear(Linear):
    """`te.pytorch.LayerNormLinear`: a norm and a column-parallel linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_layernorm_output = False
        if normalization == "RMSNorm":
            self.register_parameter("layer_norm_bias", None)
        for name in ["weight"] if normalization == "RMSNorm" else ["weight", "bias"]:
            parameter = _parameter(self, f"layer_norm_{name}", (in_features,), kwargs["params_dtype"])
            parameter.sequence_parallel = self.sequence_parallel
        nn.init.constant_(self.layer_norm_weight, 0.0 if zero_centered_gamma else 1.0)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = normalize(inp, self.layer_norm_weight, self.layer_norm_bias, self)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out[:1], out[1], normed) if self.return_bias else (out, normed)


class DotProductAttention(nn.Module):
    """`te.pytorch.DotProductAttention`, causal, without dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        keys = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or keys**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        times = query.shape[2] // key.shape[2]
        key, value = (t.repeat_interleave(times, 2) for t in (key, value))
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * self.softmax_scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("bnqk,kbnd->qbnd", probs, value).flatten(2).contiguous()


class GroupedLinear(nn.Module):
    """Only a name to derive from: no case here has experts."""


class _Any:
    """A class of Transformer Engine that is derived from, or asked for, and never made."""


def stand_in() -> None:
    """Let this process's Megatron find Transformer Engine; to be called once, before a model is built."""
    if "transformer_engine" in sys.modules:
        return
    for name in [n for n in sys.modules if n == "megatron" or n.startswith("megatron.")]:
        del sys.modules[name]
    nothing = {"FP8GlobalStateManager": _State, "fp8_autocast": None, "fp8_model_init": None}
    classes = (LayerNorm, RMSNorm, Linear, LayerNormLinear, DotProductAttention, GroupedLinear)
    modules: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": VERSION},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": _Any},
        "transformer_engine.pytorch": {c.__name__: c for c in classes},
        "transformer_engine.pytorch.ops": {"__getattr__": lambda name: _Any},
        "transformer_engine.pytorch.fp8": nothing,
        "transformer_engine.pytorch.distributed": {"CudaRNGStatesTracker": _Any, **FUNCTIONS},
        "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": _Any},
        "transformer_engine.pytorch.tensor": {"QuantizedTensor": _Any},
        "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Tensor": _Any},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class _State:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


FUNCTIONS = dict.fromkeys(
    (
        "checkpoint",
        "is_fp8_activation_recompute_enabled",
        "in_fp8_activation_recompute_phase",
        "activation_recompute_forward",
    )
)


def visible(sites: list[str]) -> list[str]:
    """The sites that are left of a local model's when its layers are Transformer Engine's, by hand."""
    latent = any("linear_kv_down_proj" in s for s in sites)  # there the first norm stands by itself
    fused = ("pre_mlp_layernorm:output", "kv_layernorm:output" if latent else "input_layernorm:output")
    fused += (".q_layernorm:output",) if latent else ()
    in_layers = [s for s in sites if ".layers." in s]
    gone = {s for s in in_layers if s.partition(":")[2] in HIDDEN or s.endswith(fused)}
    return [s for s in sites if s not in gone]
