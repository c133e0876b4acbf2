"""`transformer_engine_torch`, the compiled extension of Transformer Engine, in plain torch for fp32 and bf16.

Transformer Engine's Python calls everything that runs on a GPU through this one module. What its modules call
in fp32 and bf16 is here, with the arguments of the compiled functions. Any other name exists too, as Python
imports names that it never uses, and raises when it is called. Kernels add up in fp32, whatever the dtype: so
does this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "transformer_engine_torch"


class NoKernel(RuntimeError):
    """What only a GPU's kernels do: a model that needs it is outside what these tests can say on a CPU."""


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def _dtype(kind: Any) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else _DTYPES[DType(int(kind))]


def _not_quantized(quantizer: Any) -> None:
    if quantizer is not None:
        raise NoKernel(f"{type(quantizer).__name__}: the stand-in has no 8-bit and 4-bit numbers")


def _write(result: Tensor, out: Tensor | None, dtype: Any) -> Tensor:
    """`result` in the dtype that is asked for, in the buffer `out` if there is one."""
    if out is None:
        return result.to(_dtype(dtype))
    return out.copy_(result.view(out.shape))


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> list[Tensor]:
    _not_quantized(quantizer)
    wide, gamma = x.float(), weight.float() + zero_centered
    mean = wide.mean(-1)
    inverse = ((wide - mean[:, None]).square().mean(-1) + eps).rsqrt()
    normed = (wide - mean[:, None]) * inverse[:, None] * gamma + bias.float()
    return [_write(normed, out, dtype), mean, inverse]


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> list[Tensor]:
    wide = dy.float()
    normed = (x.float() - mean[:, None]) * inverse[:, None]
    scaled = wide * (weight.float() + zero_centered)
    along = scaled.mean(-1, keepdim=True) + normed * (scaled * normed).mean(-1, keepdim=True)
    dx = (scaled - along) * inverse[:, None]
    return [dx.to(x.dtype), (wide * normed).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype)]


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> list[Tensor | None]:
    _not_quantized(quantizer)
    wide = x.float()
    inverse = (wide.square().mean(-1) + eps).rsqrt()
    normed = wide * inverse[:, None] * (weight.float() + zero_centered)
    return [_write(normed, out, dtype), None, inverse]


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    return rmsnorm_bwd_add(dy, x, torch.zeros_like(x), inverse, weight, sm_margin, zero_centered)


def rmsnorm_bwd_add(
    dy: Tensor, x: Tensor, add: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    wide, normed = dy.float(), x.float() * inverse[:, None]
    scaled = wide * (weight.float() + zero_centered)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * inverse[:, None] + add.float()
    return [dx.to(x.dtype), (wide * normed).sum(0).to(weight.dtype)]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gradient(function: Callable[[Tensor], Tensor], dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `function` at `x`, both wide."""
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf), leaf, dy.float())
    return grad


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """`op(b) @ op(a)`: cuBLAS's order, whose matrices have their columns in one piece.

    With `grad` a bias is not added, but its gradient computed, and `gelu_in` is what GELU was applied to.
    """
    _not_quantized(quantizer)
    if comm_overlap is not None:
        raise NoKernel("the stand-in overlaps no communication")
    rows_a, rows_b = (t.reshape(-1, t.shape[-1]).float() for t in (a, b))
    product = alpha * ((rows_b.T if transpose_b else rows_b) @ (rows_a.T if transpose_a else rows_a))
    if not transpose_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    dtype = out_dtype if out_dtype is not None else (out if out is not None else a).dtype
    bias_grad = None
    if grad and bias is not None:
        bias_grad = rows_b.sum(0).to(_dtype(bias_dtype))
    elif bias is not None:
        product = product + bias.float()
    if gelu and grad:
        assert gelu_in is not None
        product = _gradient(_gelu, product, gelu_in)
    elif gelu:
        gelu_in = product.to(_dtype(bias_dtype))
        product = _gelu(product)
    if accumulate:
        assert out is not None
        product = product.view(out.shape) + out.float() * (1.0 if beta is None else beta)
    return [_write(product, out, dtype), bias_grad, gelu_in, extra_output]


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transpose_a: bool,
    b: Sequence[Tensor],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """One `generic_gemm` for each expert, into its own output or its rows of one; empty ones write zeros."""
    outputs = list(out[0].split(list(m_splits))) if single_output else list(out)
    last = (workspaces[0], workspace_size, accumulate, use_split_accumulator)
    for of_expert in zip(a, b, outputs, bias, gelu_in, strict=True):
        expert_a, expert_b, output, expert_bias, expert_gelu_in = of_expert
        if expert_gelu_in.numel():
            raise NoKernel("the stand-in's grouped product applies no GELU")
        first = (expert_a, transpose_a, expert_b, transpose_b, output, None, out_dtype)
        present = expert_bias if expert_bias.numel() else None
        _, bias_grad, _, _ = generic_gemm(*first, present, bias_dtype, False, None, grad, *last)
        if bias_grad is not None:
            expert_bias.copy_(bias_grad)
    return bias


def _halves(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A gated activation: that of the first half times the second."""

    def gated(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return gated


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "glu": _halves(torch.sigmoid),
    "geglu": _halves(_gelu),
    "reglu": _halves(F.relu),
    "swiglu": _halves(F.silu),
}


def _activations() -> dict[str, Callable[..., Any]]:
    """`gelu(x, quantizer)`, `dgelu(dy, x, quantizer)`, and so on for each activation."""

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
        def call(x: Tensor, quantizer: Any) -> Tensor:
            _not_quantized(quantizer)
            return function(x.float()).to(x.dtype)

        return call

    def backward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Any], Tensor]:
        def call(dy: Tensor, x: Tensor, quantizer: Any) -> Tensor:
            _not_quantized(quantizer)
            return _gradient(function, dy, x).to(x.dtype)

        return call

    calls: dict[str, Callable[..., Any]] = {n: forward(f) for n, f in _ACTIVATIONS.items()}
    return calls | {f"d{n}": backward(f) for n, f in _ACTIVATIONS.items()}


def get_fused_attn_backend(*_: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "no cuDNN"


class _Named(type):
    """Makes a member of an enumeration when it is named: Python only passes them on."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return int(vars(cls)[name])


@cache
def _missing(name: str) -> Any:
    """A name that this module does not have: a class or an enumeration, or a function that raises."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _Named(name, (), {})

    def raises(*_: Any, **__: Any) -> Any:
        raise NoKernel(f"{NAME}.{name} is not in {__file__}")

    return raises


def module() -> ModuleType:
    """The extension, to be put into `sys.modules` under its `NAME`."""
    extension = ModuleType(NAME)
    functions = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, generic_gemm)
    functions += (te_general_grouped_gemm, get_fused_attn_backend)
    vars(extension).update({f.__name__: f for f in functions})
    vars(extension).update(_activations())
    vars(extension).update({c.__name__: c for c in (DType, NVTE_Fused_Attn_Backend)})
    vars(extension).update(
        get_cudnn_version=lambda: 91000,
        get_cublasLt_version=lambda: 120000,
        get_num_cublas_streams=lambda: 1,
        device_supports_multicast=lambda: False,
        __getattr__=_missing,
    )
    return extension
