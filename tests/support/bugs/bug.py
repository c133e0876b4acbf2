"""What a planted bug is, and the ways of changing a model of Megatron's that the bugs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.gpt import Case

Kind = Literal["value", "gradient", "parameter_gradient", "parameter"]
State = dict[str, Tensor]
Patch = Callable[[list[Any], State, float], AbstractContextManager[Any]]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Bug:
    """A bug and where it must show first.

    Attributes:
        name: in words.
        group: the parallelism or part that it stands in.
        case: the run that has it.
        patch: applied on every rank to what Megatron trains (the chunks in their wrappers, and the weights of
            the full model by name) and the magnitude, before hooks are attached.
        first: the first site, or parameter, that differs from one process; the beginning of its name.
        kind: of what differs there first.
        hint: a regular expression that the hints, or the lines on replicas, must match; empty where no
            property of the numbers gives the class away.
        replica: a site or parameter, with `.grad` for a gradient, of which ranks hold different copies.
        sweep: the least and the greatest magnitude; None for a bug that is there or is not.
        measure: what the magnitude is.
        steps: training steps that it needs; with more than one, Megatron's optimizer runs.
    """

    name: str
    group: str
    case: Case
    patch: Patch
    first: str | tuple[str, ...]
    kind: Kind = "value"
    hint: str = ""
    replica: str = ""
    sweep: tuple[float, float] | None = None
    measure: str = "relative"
    steps: int = 1

    @property
    def magnitude(self) -> float:
        """The greatest magnitude, which every comparison must see."""
        return self.sweep[1] if self.sweep else 1.0


# -- ranks ---------------------------------------------------------------------------------------------


def rank_of(axis: str) -> int:
    """This rank's coordinate on an axis: tp, cp, dp, pp, ep."""
    from megatron.core import parallel_state

    names = {
        "tp": "tensor_model_parallel",
        "cp": "context_parallel",
        "dp": "data_parallel",
        "pp": "pipeline_model_parallel",
        "ep": "expert_model_parallel",
    }
    return int(getattr(parallel_state, f"get_{names[axis]}_rank")())


def size_of(axis: str) -> int:
    """The number of ranks along an axis: tp, cp, dp, pp."""
    from megatron.core import parallel_state

    names = {
        "tp": "tensor_model_parallel",
        "cp": "context_parallel",
        "dp": "data_parallel",
        "pp": "pipeline_model_parallel",
    }
    return int(getattr(parallel_state, f"get_{names[axis]}_world_size")())


class Alone:
    """A stand-in for a process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


# -- modules -------------------------------------------------------------------------------------------


def unwrapped(model: Any) -> Any:
    from megatron_flex.adapters.megatron_core.module_classes import unwrap_model

    return unwrap_model(model)


def modules(models: list[Any], path: str) -> list[Any]:
    """The module of that global name, on the ranks that have it."""
    from megatron_flex.adapters.megatron_core.module_classes import global_modules

    return [m for model in models for name, m in global_modules(unwrapped(model)) if name == path]


def attribute(path: str, name: str, value: Callable[[Any, float], Any], on: str = "") -> Patch:
    """Give a module's attribute another value.

    Args:
        path: the module's global name.
        name: the attribute.
        value: of the module and the magnitude.
        on: an axis: only on its second rank; empty: on all ranks that have the module.
    """

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules(models, path) if not on or rank_of(on) == 1 else ():
                stack.enter_context(patch.object(module, name, value(module, magnitude)))
            yield

    return apply


def output(path: str, change: Callable[[Tensor, float], Tensor], on: str = "") -> Patch:
    """Change what a module returns; the first item, if it returns several."""

    def value(module: Any, magnitude: float) -> Callable[..., Any]:
        real = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            if isinstance(found, tuple):
                return change(found[0], magnitude), *found[1:]
            return change(found, magnitude)

        return forward

    return attribute(path, "forward", value, on)


def product(path: str, change: Callable[[Tensor, float], Tensor], on: str = "") -> Patch:
    """Change the product of a parallel linear on this rank, before any reduction."""

    def value(module: Any, magnitude: float) -> Callable[..., Tensor]:
        real = module._forward_impl
        return lambda *args, **kwargs: change(real(*args, **kwargs), magnitude)

    return attribute(path, "_forward_impl", value, on)


def weight_in_product(path: str, change: Callable[[Tensor, float], Tensor], on: str = "") -> Patch:
    """Multiply by a changed copy of the weight; the parameter itself is right."""

    def value(module: Any, magnitude: float) -> Callable[..., Tensor]:
        real = module._forward_impl

        def forward(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = real(input, change(weight, magnitude), *args, **kwargs)
            return out

        return forward

    return attribute(path, "_forward_impl", value, on)


def gradient(path: str, change: Callable[[Tensor, float], Tensor], on: str = "") -> Patch:
    """Change the gradient that arrives at a module's output."""
    return output(path, lambda t, magnitude: Backwards.apply(t, lambda g: change(g, magnitude)), on)


class Backwards(torch.autograd.Function):
    """The same forward, and a changed gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


class Straight(torch.autograd.Function):
    """A changed forward, and the same gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change) -> Tensor:
        return change(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def parameter(name: str, change: Callable[[Tensor, float], Tensor], on: str = "") -> Patch:
    """Change a parameter, by its global name, until the end."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        from tests.support.gpt import global_names

        if not on or rank_of(on) == 1:
            for model in models:
                for found, weight in global_names(unwrapped(model)):
                    if found == name:
                        weight.data.copy_(change(weight.data, magnitude))
        yield

    return apply


def together(*patches: Patch) -> Patch:
    """Several patches as one."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        with ExitStack() as stack:
            for item in patches:
                stack.enter_context(item(models, state, magnitude))
            yield

    return apply


# -- changes -------------------------------------------------------------------------------------------


def scaled(tensor: Tensor, magnitude: float) -> Tensor:
    """`1 + magnitude` times the tensor."""
    return tensor * (1 + magnitude)


def stale(weight: Tensor, magnitude: float) -> Tensor:
    """Another version of a weight: every entry off by up to `magnitude`, relative to itself."""
    wave = torch.cos(torch.arange(weight.numel(), dtype=torch.float32)).view_as(weight)
    return (weight.float() * (1 + magnitude * wave)).to(weight.dtype)


def rounded(tensor: Tensor, magnitude: float) -> Tensor:
    """The tensor in a dtype with a unit roundoff of `magnitude`: 2^-4 is e4m3, 2^-8 bf16, 2^-11 fp16."""
    return Straight.apply(tensor, lambda t: round_to(t, magnitude))


def round_to(tensor: Tensor, unit: float) -> Tensor:
    """Round the mantissa of each entry."""
    mantissa, exponent = torch.frexp(tensor.float())
    return torch.ldexp((mantissa / (2 * unit)).round() * (2 * unit), exponent).to(tensor.dtype)


def shifted(tensor: Tensor, magnitude: float) -> Tensor:
    """A constant offset, of `magnitude` times the norm of a token."""
    vector = torch.sin(torch.arange(tensor.shape[-1], dtype=torch.float32) + 1).to(tensor.dtype)
    size = tensor.detach().float().norm(dim=-1).mean().to(tensor.dtype)
    return tensor + magnitude * size * vector / vector.norm()


# -- cases ---------------------------------------------------------------------------------------------

TP2, TP2_SP = Case("tp2", tp=2, layers=2), Case("tp2 sp", tp=2, sp=True, layers=2)
TP2_DP2 = Case("tp2 dp2", tp=2, dp=2, layers=2)
BIAS = Case("tp2 bias", tp=2, gated=False, rms=False, bias=True, layers=2)
LEARNED = Case("tp2 learned positions", tp=2, rope=False, layers=2)
DROPOUT = Case("tp2 dropout", tp=2, layers=2, extra={"hidden_dropout": 0.1})
CP2, DP2 = Case("cp2", cp=2, layers=2), Case("dp2", dp=2, layers=2)
PP2, TIED = Case("pp2", pp=2), Case("pp2 tied", pp=2, tied=True, layers=2)
VPP2 = Case("pp2 vpp2", pp=2, vpp=2)
EXPERTS = Case("experts dp2 ep2", dp=2, ep=2, experts=4, shared_experts=True, layers=2)
EXPERTS_SP = Case("experts tp2 sp etp2", tp=2, sp=True, etp=2, experts=4, layers=2)
BALANCED = Case(
    "balanced experts dp2 ep2",
    dp=2,
    ep=2,
    experts=4,
    layers=2,
    extra={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
)
RECOMPUTED = Case("tp2 sp recomputed", tp=2, sp=True, recompute=("full",), layers=3)
RECOMPUTED_DROPOUT = Case(
    "tp2 recomputed dropout",
    tp=2,
    recompute=("full",),
    layers=2,
    microbatches=1,
    extra={"hidden_dropout": 0.1},
)

WORDS = "embedding.word_embeddings"
LAYER = "decoder.layers.1"
ATTENTION, MLP = f"{LAYER}.self_attention", f"{LAYER}.mlp"
QKV, CORE, PROJ = f"{ATTENTION}.linear_qkv", f"{ATTENTION}.core_attention", f"{ATTENTION}.linear_proj"
FC1, FC2 = f"{MLP}.linear_fc1", f"{MLP}.linear_fc2"

# What hints must say of a class of bugs.
VECTOR = r"same vector|one vector|offset"
FACTOR = r"constant factor|B is A times"
PRECISION = r"precision|narrower|dtype|mantissa|bits|rounded"
PERMUTED = r"permut|swap|exchang|order|other'?s"
MISSING = r"replicas differ|missing|partial|summand"
