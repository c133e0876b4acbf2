"""Reported bugs of tensor, sequence and context parallelism, of checkpoints and of the gradient norm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import ssm
from tests.support.bugs.bug import (
    PERMUTED,
    PRECISION,
    VECTOR,
    Patch,
    State,
    attribute,
    size_of,
    together,
    unwrapped,
)
from tests.support.bugs.spread import loaded_from, own_keys_gradient
from tests.support.bugs.tensor import bias_before_reduction, unmarked
from tests.support.exam.row import Row
from tests.support.gpt import HIDDEN, Case, global_names

REPLICAS = r"replicas differ|missing|partial"
FINALIZE = "megatron.core.distributed.finalize_model_grads"


@contextmanager
def replicated_gradients_left(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """A step of its own that reduces over data parallel ranks, and leaves out finalize_model_grads."""
    finalize = importlib.import_module(FINALIZE)
    with patch.object(finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None):
        yield


@contextmanager
def replicated_gradients_averaged(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The gradients of norms under sequence parallelism are averaged over the ranks."""
    finalize = importlib.import_module(FINALIZE)
    real = finalize._allreduce_non_tensor_model_parallel_grads

    def reduce(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        for model in models:
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    parameter.main_grad.div_(size_of("tp"))

    with patch.object(finalize, "_allreduce_non_tensor_model_parallel_grads", reduce):
        yield


def unmarked_bias(linear: Any, magnitude: float) -> Any:
    """A bias without the mark by which Megatron sums its gradient under sequence parallelism."""
    linear.bias.sequence_parallel = False
    return linear.bias


def taken_for_shards(chosen: Callable[[str], bool], shards: bool = True) -> Patch:
    """The mark by which the gradient norm counts a parameter on all tensor parallel ranks is wrong."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        for model in models:
            for name, parameter in global_names(unwrapped(model)):
                if chosen(name):
                    vars(parameter)["tensor_model_parallel"] = shards
        yield

    return apply


@contextmanager
def tied_weight_counted_twice(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The last stage's copy of the embedding is not marked as one."""
    for model in models:
        for parameter in model.parameters():
            if getattr(parameter, "shared", False):
                parameter.shared = False
    yield


def experts_marked(reduced: bool) -> Patch:
    """Whether experts have the mark of parameters that all data parallel ranks reduce, as dense ones have."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        for model in models:
            for name, parameter in global_names(unwrapped(model)):
                if ".experts." in name:
                    vars(parameter)["allreduce"] = reduced
        yield

    return apply


class _GatherOfOwnKeys(torch.autograd.Function):
    """Queries, keys and values of one group of heads from all ranks; keys and values get no sum backwards."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        keys = 2 * HIDDEN // 4  # of the last two heads' width
        total[..., -keys:] = grads[0][..., -keys:]
        return total.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None


@contextmanager
def keys_of_one_rank(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """All ranks use the one key and value head, and its gradient is that of one rank's queries."""
    from megatron.core.transformer import attention

    def gather(tensor: Tensor, group: Any = None) -> Tensor:
        whole: Tensor = _GatherOfOwnKeys.apply(tensor, group)
        return whole

    with patch.object(attention, "all_gather_last_dim_from_tensor_parallel_region", gather):
        yield


def unreduced_input_gradient(path: str) -> Patch:
    """A column-parallel linear leaves the sum of its input's gradient to another, which does not do it."""
    return together(
        attribute(path, "allreduce_dgrad", lambda *_: False),
        attribute(path, "disable_grad_reduce", lambda *_: True),
    )


@contextmanager
def accumulated_in_bf16(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The gradients of microbatches are summed in bf16, and converted to fp32 at the end."""
    configs = {id(m.config): m.config for m in models}.values()
    real = {id(c): c.finalize_model_grads_func for c in configs}

    def finalize(config: Any) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            for model in models:
                for parameter in model.parameters():
                    parameter.main_grad.copy_(parameter.main_grad.bfloat16())
            real[id(config)](*args, **kwargs)

        return call

    for config in configs:
        config.finalize_model_grads_func = finalize(config)
    yield


TP2_SP = Case("tp2 sp", tp=2, sp=True, layers=2)
QK = Case("q/k norms, tp2", tp=2, layers=2, qk_norm=True)
SINKS = Case("sinks, tp2", tp=2, layers=2, extra={"softmax_type": "learnable"})
BIASED = Case("tp2 bias", tp=2, gated=False, rms=False, bias=True, layers=2)
ONE_KEY = Case("one key head, tp2", tp=2, layers=2, groups=1, bias=True, gated=False, rms=False)
ATTENTION, MLP = "decoder.layers.1.self_attention", "decoder.layers.1.mlp"
DELTA = Case("G- tp2", tp=2, pattern="G-", extra=ssm.DELTA)
LORA = Case("LoRA, TE, tp2 sp", tp=2, sp=True, layers=1, adapters="mcore", te=True)

ROWS = [
    Row(
        "q/k norms without sequence parallelism",
        ("NVIDIA-NeMo/RL#3716",),
        "The gradients of `q_layernorm` and `k_layernorm` are those of a rank's own heads: the training step "
        "leaves out the reduction over tensor parallel ranks.",
        "GPT, `tp=2`, `qk_layernorm`",
        QK,
        (f"{ATTENTION}.q_layernorm.weight", f"{ATTENTION}.k_layernorm.weight"),
        REPLICAS,
        "parameter_gradient",
        replicated_gradients_left,
        replica=f"{ATTENTION}.k_layernorm.weight.grad",
    ),
    Row(
        "final layernorm under sequence parallelism",
        ("NVIDIA/Megatron-LM#1446",),
        "The gradient of `final_layernorm` is that of a rank's own tokens.",
        "GPT, `tp=2`, sequence parallel",
        TP2_SP,
        "decoder.final_layernorm.weight",
        REPLICAS,
        "parameter_gradient",
        attribute("decoder.final_layernorm", "weight", unmarked),
        replica="decoder.final_layernorm.weight.grad",
    ),
    Row(
        "norms averaged under sequence parallelism",
        ("EleutherAI/gpt-neox#1259",),
        "The gradients of norms are averaged over tensor parallel ranks and not summed.",
        "GPT, `tp=2`, sequence parallel",
        TP2_SP,
        "decoder.final_layernorm.weight",
        r"1 / tp",
        "parameter_gradient",
        replicated_gradients_averaged,
    ),
    Row(
        "bias under sequence parallelism",
        ("awslabs/slapo#23",),
        "The gradient of the bias of a row-parallel linear is that of a rank's own tokens.",
        "GPT with biases, `tp=2`, sequence parallel",
        Case("tp2 sp bias", tp=2, sp=True, gated=False, rms=False, bias=True, layers=2),
        f"{MLP}.linear_fc2.bias",
        REPLICAS,
        "parameter_gradient",
        attribute(f"{MLP}.linear_fc2", "bias", unmarked_bias),
        replica=f"{MLP}.linear_fc2.bias.grad",
    ),
    Row(
        "bias of a row-parallel linear on each rank",
        ("huggingface/text-generation-inference#1036", "PaddlePaddle/Paddle#35186"),
        "Each rank adds the bias to its partial sum, so that it is added `tp` times.",
        "GPT with biases, `tp=2`",
        BIASED,
        f"{ATTENTION}.linear_proj:partial",
        VECTOR,
        patch=attribute(f"{ATTENTION}.linear_proj", "_forward_impl", bias_before_reduction),
    ),
    Row(
        "attention's gradient under context parallelism",
        ("NVIDIA/Megatron-LM#1464", "NVIDIA/TransformerEngine#1557"),
        "The backward pass of attention returns wrong gradients of keys and values: it leaves out the "
        "other ranks' queries.",
        "GPT with learned positions, LayerNorm and biases, `cp=2`",
        Case("cp2 learned", cp=2, layers=2, rope=False, gated=False, rms=False, bias=True),
        (f"{ATTENTION}.core_attention", ATTENTION),
        REPLICAS,
        "gradient",
        own_keys_gradient,
    ),
    Row(
        "latent attention's shared rotary key",
        ("NVIDIA/Megatron-LM#6839",),
        "The gradient of the rotary key, which all heads share, is that of a rank's own heads.",
        "Multi-latent attention, `tp=2`, no sequence parallelism",
        Case("latent, tp2", tp=2, layers=2, mla="upstream"),
        f"{ATTENTION}.linear_kv_down_proj",
        REPLICAS,
        "gradient",
        clean=Case("latent, tp2, mended", tp=2, layers=2, mla="mended"),
    ),
    Row(
        "output norm of a gated delta net",
        ("NVIDIA/Megatron-LM#7452 (11)",),
        "The gradient of `out_norm`, which all heads share, is that of a rank's own heads.",
        "Gated delta net in a HybridModel, `tp=2`, no sequence parallelism",
        DELTA,
        "decoder.layers.0.self_attention.out_norm.weight",
        REPLICAS,
        "parameter_gradient",
        clean=Case("G- tp2 sp", tp=2, sp=True, pattern="G-", extra=ssm.DELTA),
        replica="decoder.layers.0.self_attention.out_norm.weight.grad",
    ),
    Row(
        "LoRA under sequence parallelism",
        ("modelscope/mcore-bridge#173", "NVIDIA-NeMo/Megatron-Bridge#5634"),
        "The factor of an adapter that all ranks hold gets the gradient of a rank's own tokens.",
        "LoRA around the linears of Transformer Engine, `tp=2`, sequence parallel",
        LORA,
        "decoder.layers.0.mlp.linear_fc2.lora_B.default.weight",
        REPLICAS,
        "parameter_gradient",
        attribute("decoder.layers.0.mlp.linear_fc2.lora_B.default", "weight", unmarked),
        replica="decoder.layers.0.mlp.linear_fc2.lora_B.default.weight.grad",
    ),
    Row(
        "one key head, its gradient",
        ("bigcode-project/Megatron-LM#11", "bigcode-project/Megatron-LM#12"),
        "The gradients of the one key and value head, biases too, are those of a rank's own queries.",
        "GPT with one key and value head and biases, `tp=2`",
        ONE_KEY,
        (f"{ATTENTION}.linear_qkv", ATTENTION),
        REPLICAS,
        "gradient",
        keys_of_one_rank,
    ),
    Row(
        "one key head, the gradient of its input",
        ("bigcode-project/Megatron-LM#35", "bigcode-project/Megatron-LM#36"),
        "The gradient of the projections' input is not summed over tensor parallel ranks; the weights stay "
        "in step.",
        "GPT with one key and value head and biases, `tp=2`",
        ONE_KEY,
        (f"{ATTENTION}.linear_qkv", ATTENTION, "decoder.layers.1.input_layernorm"),
        REPLICAS,
        "gradient",
        unreduced_input_gradient(f"{ATTENTION}.linear_qkv"),
        replica="decoder.layers.1.input_layernorm:output.grad",
    ),
    Row(
        "fused output layer",
        ("NovaSky-AI/SkyRL#1886",),
        "The gradient of the output layer's input is reduced into a contiguous copy, and the unreduced one "
        "is returned.",
        "HybridModel, `tp=2`, no sequence parallelism",
        Case("hybrid tp2", tp=2, layers=2, hybrid=True),
        ("output_layer", "decoder.final_norm", "decoder.final_layernorm"),
        REPLICAS,
        "gradient",
        unreduced_input_gradient("output_layer"),
        replica="decoder.final_norm:output.grad",
    ),
    Row(
        "gradients accumulated in bf16",
        ("ISEEKYAN/Megatron-LM#149", "NVIDIA/Megatron-LM#502"),
        "The gradients of microbatches are summed in bf16 in place of fp32.",
        "GPT in bf16, `tp=2`, eight microbatches",
        Case("tp2 of eight", tp=2, layers=2, microbatches=8),
        "",
        PRECISION,
        "parameter_gradient",
        accumulated_in_bf16,
        precision="bf16",
    ),
    Row(
        "checkpoint with the layers' numbers of a stage",
        ("NVIDIA/Megatron-LM#7452 (12)",),
        "A checkpoint has the layers' numbers within a stage, and is loaded with another pipeline size: the "
        "second stage gets the first layers.",
        "GPT of four layers, `pp=2`, weights of a run with `pp=1`",
        Case("pp2", pp=2),
        "decoder.layers.2.",
        PERMUTED,
        "parameter",
        loaded_from(lambda n: n - 2, (1,)),
    ),
    # The gradient norm.
    Row(
        "attention sinks in the gradient norm",
        ("NVIDIA/Megatron-LM#7452 (8)", "NVIDIA/Megatron-LM#7530"),
        "`softmax_offset` is sharded by heads, and the gradient norm counts it on the first rank only.",
        "GPT, `tp=2`, `softmax_type: learnable`",
        SINKS,
        "decoder.layers.0.self_attention.core_attention.softmax_offset",
        r"counted 0\.5 times",
        "parameter_gradient",
        mend=taken_for_shards(lambda name: "softmax_offset" in name),
        tool="verify",
    ),
    Row(
        "experts in the gradient norm",
        ("NVIDIA/Megatron-LM#5916", "radixark/Megatron-LM#80"),
        "The gradient norm leaves out the experts that are not on the first tensor parallel rank.",
        "Grouped experts of Transformer Engine, `tp=2`, `ep=2`, `etp=1`, sequence parallel",
        Case("grouped tp2 sp ep2", tp=2, sp=True, ep=2, experts=4, te=True, grouped=True, layers=2),
        "decoder.layers.0.mlp.experts.",
        r"counted 0\.5 times|not counted|first rank only",
        "parameter_gradient",
        experts_marked(True),
        experts_marked(False),
        tool="verify",
    ),
    Row(
        "duplicated linears in the gradient norm",
        ("ROCm/TransformerEngine#715",),
        "Weights that all tensor parallel ranks hold are marked as shards: the gradient norm counts them "
        "`tp` times.",
        "Multi-latent attention of Transformer Engine, `tp=2`, sequence parallel",
        Case("latent TE, tp2 sp", tp=2, sp=True, te=True, mla="upstream", q_rank=8, layers=2),
        "decoder.layers.0.self_attention.linear_",
        r"counted 2 times",
        "parameter_gradient",
        taken_for_shards(lambda name: "_down_proj.weight" in name),
        tool="verify",
    ),
    Row(
        "replicated norms in the gradient norm",
        ("NVIDIA-NeMo/RL#3788",),
        "The squares of all gradients are summed over tensor parallel ranks: replicated norms count `tp` "
        "times.",
        "GPT, `tp=2`, `qk_layernorm`",
        QK,
        "decoder.layers.0.self_attention.",
        r"counted 2 times",
        "parameter_gradient",
        taken_for_shards(lambda name: "q_layernorm" in name or "k_layernorm" in name),
        tool="verify",
    ),
    Row(
        "tied embeddings in the gradient norm",
        ("NVIDIA/Megatron-LM#7228", "NVIDIA/Megatron-LM#7227"),
        "Both stages that hold the tied embedding count it.",
        "GPT with tied embeddings, `pp=2`",
        Case("pp2 tied", pp=2, tied=True, layers=2),
        "embedding.word_embeddings.weight",
        r"counted 2 times",
        "parameter_gradient",
        tied_weight_counted_twice,
        tool="verify",
    ),
]
