"""Reported bugs of tensor, sequence and context parallelism, and of the gradient norm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.support.bugs.bug import Patch, State, attribute
from tests.support.bugs.spread import own_keys_gradient
from tests.support.bugs.tensor import unmarked
from tests.support.exam.row import Row, nothing
from tests.support.gpt import Case, global_names

REPLICAS = r"replicas differ|missing|partial"


@contextmanager
def replicated_gradients_left(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """A step of its own that reduces over data parallel ranks, and leaves out finalize_model_grads."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with patch.object(finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None):
        yield


def taken_for_shards(chosen: Callable[[str], bool], shards: bool = True) -> Patch:
    """The mark by which the gradient norm counts a parameter on all tensor parallel ranks is wrong."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        for model in models:
            for name, parameter in global_names(model):
                if chosen(name):
                    vars(parameter)["tensor_model_parallel"] = shards
        yield

    return apply


QK = Case("q/k norms, tp2", tp=2, layers=2, qk_norm=True)
SINKS = Case("sinks, tp2", tp=2, layers=2, extra={"softmax_type": "learnable"})

ROWS = [
    Row(
        "q/k norms without sequence parallelism",
        ("NVIDIA-NeMo/RL#3716",),
        "The gradients of `q_layernorm` and `k_layernorm` are those of a rank's own heads: the training step "
        "leaves out the reduction over tensor parallel ranks.",
        "GPT, `tp=2`, `qk_layernorm`",
        QK,
        (
            "decoder.layers.1.self_attention.q_layernorm.weight",
            "decoder.layers.1.self_attention.k_layernorm.weight",
        ),
        REPLICAS,
        "parameter_gradient",
        replicated_gradients_left,
        replica="decoder.layers.1.self_attention.k_layernorm.weight.grad",
    ),
    Row(
        "final layernorm under sequence parallelism",
        ("NVIDIA/Megatron-LM#1446",),
        "The gradient of `final_layernorm` is that of a rank's own tokens.",
        "GPT, `tp=2`, sequence parallel",
        Case("tp2 sp", tp=2, sp=True, layers=2),
        "decoder.final_layernorm.weight",
        REPLICAS,
        "parameter_gradient",
        attribute("decoder.final_layernorm", "weight", unmarked),
        replica="decoder.final_layernorm.weight.grad",
    ),
    Row(
        "attention's gradient under context parallelism",
        ("NVIDIA/Megatron-LM#1464",),
        "The backward pass of attention returns wrong gradients of keys and values: it leaves out the "
        "other ranks' queries.",
        "GPT with learned positions, LayerNorm and biases, `cp=2`",
        Case("cp2 learned", cp=2, layers=2, rope=False, gated=False, rms=False, bias=True),
        ("decoder.layers.1.self_attention.core_attention", "decoder.layers.1.self_attention"),
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
        "decoder.layers.1.self_attention.linear_kv_down_proj",
        REPLICAS,
        "gradient",
        clean=Case("latent, tp2, mended", tp=2, layers=2, mla="mended"),
    ),
    Row(
        "attention sinks in the gradient norm",
        ("NVIDIA/Megatron-LM#7452 (8)", "NVIDIA/Megatron-LM#7530"),
        "`softmax_offset` is sharded by heads, and the gradient norm counts it on the first rank only.",
        "GPT, `tp=2`, `softmax_type: learnable`",
        SINKS,
        "decoder.layers.0.self_attention.core_attention.softmax_offset",
        r"counted 0\.5 times",
        "parameter_gradient",
        nothing,
        taken_for_shards(lambda name: "softmax_offset" in name),
        tool="verify",
    ),
]
