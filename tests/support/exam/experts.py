"""Reported bugs of experts, their router, recomputation and pipeline stages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.bugs.bug import RECOMPUTED_DROPOUT, State, attribute, modules, size_of
from tests.support.bugs.experts import random_states_lost
from tests.support.bugs.spread import averaged, tied_gradient
from tests.support.bugs.tensor import unmarked
from tests.support.exam.row import Row
from tests.support.gpt import Case

MLP, ROUTER = "decoder.layers.1.mlp", "decoder.layers.1.mlp.router"
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
PER_TOKEN = {"calculate_per_token_loss": True}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.5,
}


def experts(name: str, extra: dict[str, Any] | None = None, **layout: Any) -> Case:
    """A model of two layers of four experts."""
    return Case(f"{name} of experts", experts=4, layers=2, extra=extra or {}, **layout)


def auxiliary_loss_times(factor: Callable[[Any], float]) -> Any:
    """Multiply the auxiliary loss where the router attaches it."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        router = importlib.import_module("megatron.core.transformer.moe.router")
        real = router.TopKRouter.attach_and_log_load_balancing_loss

        def attach(
            self: Any, probs: Tensor, coefficient: float, loss: Tensor, *rest: Any, **more: Any
        ) -> Any:
            return real(self, probs, coefficient, loss * factor(self), *rest, **more)

        with patch.object(router.TopKRouter, "attach_and_log_load_balancing_loss", attach):
            yield

    return apply


@contextmanager
def mask_of_the_other_rank(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The model scatters its padding mask over ranks in another order."""
    from megatron.core import tensor_parallel

    real, size = tensor_parallel.scatter_to_sequence_parallel_region, size_of("tp")

    def scatter(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = torch.cat(tensor.chunk(size)[::-1]) if tensor.dtype == torch.bool else tensor
        return real(whole, *args, **kwargs)

    with patch.object(tensor_parallel, "scatter_to_sequence_parallel_region", scatter):
        yield


@contextmanager
def bias_of_own_tokens(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The expert bias follows the tokens that a rank counted, not those of all ranks."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    def update(counts: Tensor, bias: Tensor, rate: float, **_: Any) -> Tensor:
        with torch.no_grad():
            return bias + rate * (counts.mean(-1, keepdim=True) - counts).sign()

    with patch.object(finalize, "get_updated_expert_bias", update):
        yield


@contextmanager
def chunk_input_again(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Layers of one recomputed chunk all read the chunk's input."""
    first, second = (modules(models, f"decoder.layers.{n}")[0] for n in (0, 1))
    real_first, real_second = first.forward, second.forward
    kept: list[Tensor] = []

    def keep(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept[:] = [hidden_states]
        return real_first(hidden_states, *args, **kwargs)

    def again(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real_second(kept[0], *args, **kwargs)

    with patch.object(first, "forward", keep), patch.object(second, "forward", again):
        yield


def without_balance(model: Case) -> Case:
    """The case without an auxiliary loss."""
    return replace(model, name=f"{model.name}, not balanced", extra={})


GLOBAL = experts(
    "dp2 global balance", {**BALANCED, "moe_router_load_balancing_type": "global_aux_loss"}, dp=2
)
PADDED = experts("tp2 sp per token", BALANCED | PER_TOKEN, tp=2, sp=True, etp=2)
CAPACITY = experts("tp2 sp capacity", {"moe_expert_capacity_factor": 1.0}, tp=2, sp=True, etp=2)
SINKHORN = experts("tp2 sp sinkhorn", {"moe_router_load_balancing_type": "sinkhorn"}, tp=2, sp=True, etp=2)
PREDICTION = Case(
    "pp2 prediction beside the embedding",
    pp=2,
    layers=2,
    extra={"mtp_num_layers": 1},
    split={"pipeline_model_parallel_layout": "Ettm|L"},
)

ROWS = [
    Row(
        "global balancing loss under data parallelism",
        ("NVIDIA/Megatron-LM#3672", "NVIDIA/Megatron-LM#7213"),
        "`global_aux_loss` is divided by the tokens of all data parallel ranks, and its gradient averaged "
        "over them.",
        "Four experts, `dp=2`, `global_aux_loss`",
        GLOBAL,
        (f"{ROUTER}:logits", f"{ROUTER}:probs"),
        r"auxiliary|router's backward",
        "gradient",
        clean=without_balance(GLOBAL),
    ),
    Row(
        "balancing loss with padding, per token",
        ("NVIDIA/Megatron-LM#7452 (10)",),
        "The count of a rank's own tokens is overwritten by that of all ranks, and scales the auxiliary "
        "loss.",
        "Four experts, `tp=2`, sequence parallel, `calculate_per_token_loss`, a padding mask",
        PADDED,
        (f"{ROUTER}:logits", f"{ROUTER}:probs"),
        r"auxiliary",
        "gradient",
        setting="masked padding",
        clean_setting="unmasked",
    ),
    Row(
        "padding mask of another rank",
        ("NVIDIA/Megatron-LM#7452 (5)",),
        "The padding mask is scattered over another group than the tensor parallel one: a rank leaves other "
        "tokens out of the auxiliary loss.",
        "Four experts, `tp=2`, sequence parallel, a padding mask",
        experts("tp2 sp balanced", BALANCED, tp=2, sp=True, etp=2),
        (f"{ROUTER}:logits", f"{ROUTER}:probs"),
        r"router's backward",
        "gradient",
        mask_of_the_other_rank,
        setting="masked padding",
    ),
    Row(
        "balancing loss per token under tensor parallelism",
        ("NVIDIA/Megatron-LM#5047", "NVIDIA/Megatron-LM#1652"),
        "The auxiliary loss is scaled by the tokens of a rank, and gradients are divided by those of all.",
        "Four experts, `tp=2`, sequence parallel, `calculate_per_token_loss`",
        PADDED,
        (f"{ROUTER}:logits", f"{ROUTER}:probs"),
        r"auxiliary",
        "gradient",
        auxiliary_loss_times(lambda router: 1 / router.tp_cp_group.size()),
        setting="unmasked",
    ),
    Row(
        "balancing loss under context parallelism",
        ("NVIDIA/Megatron-LM#2217",),
        "The auxiliary loss is not multiplied by the context parallel size, by which gradients are averaged.",
        "Four experts, `cp=2`, `aux_loss`",
        experts("cp2 balanced", BALANCED, cp=2),
        (f"{ROUTER}:logits", f"{ROUTER}:probs"),
        r"auxiliary",
        "gradient",
        auxiliary_loss_times(lambda router: 1 / size_of("cp")),
    ),
    Row(
        "router under sequence parallelism",
        ("NVIDIA/Megatron-LM#599", "NVIDIA/Megatron-LM#619", "pytorch/torchtitan#2388"),
        "The gradient of the router's weight is that of a rank's own tokens.",
        "Four experts, `tp=2`, sequence parallel",
        experts("tp2 sp etp2", tp=2, sp=True, etp=2),
        f"{ROUTER}.weight",
        r"replicas differ|missing|partial",
        "parameter_gradient",
        attribute(ROUTER, "weight", unmarked),
        replica=f"{ROUTER}.weight.grad",
    ),
    Row(
        "expert bias of own tokens",
        ("pytorch/torchtitan#4154",),
        "The expert bias is updated by the tokens that a rank counted: ranks choose experts by other biases.",
        "Four experts, `tp=2`, sequence parallel, sigmoid scores with an expert bias, two steps",
        experts("tp2 sp bias", BIASED, tp=2, sp=True, etp=2),
        ("decoder.layers.0.mlp.router", "decoder.layers.0.mlp.experts", "decoder.layers.1.mlp.router"),
        r"bias",
        patch=bias_of_own_tokens,
        steps=2,
    ),
    Row(
        "capacity of a rank's tokens",
        ("deepseek-ai/DeepSeek-V2#48",),
        "The capacity of experts is of the tokens that a rank has: another layout drops other tokens.",
        "Four experts, `tp=2`, sequence parallel, `moe_expert_capacity_factor: 1`",
        CAPACITY,
        (f"{MLP.replace('1', '0')}.experts", f"{MLP.replace('1', '0')}.router"),
        r"capacity|dropped",
        clean=experts("tp2 sp etp2", tp=2, sp=True, etp=2),
    ),
    Row(
        "sinkhorn over a rank's tokens",
        ("NVIDIA/Megatron-LM#1740",),
        "Sinkhorn balances the tokens that a rank has: another layout chooses other experts.",
        "Four experts, `tp=2`, sequence parallel, `sinkhorn`",
        SINKHORN,
        ("decoder.layers.0.mlp.router", "decoder.layers.0.mlp.experts"),
        r"sinkhorn",
        clean=experts("tp2 sp etp2", tp=2, sp=True, etp=2),
    ),
    Row(
        "gradients of experts under expert parallelism",
        ("pytorch/pytorch#160285", "NVIDIA/Megatron-LM#5956", "databricks/megablocks#20"),
        "Experts have gradients of the tokens of all ranks, divided by the number of ranks that hold a copy.",
        "Four experts, `dp=2`, `ep=2`",
        experts("dp2 ep2", dp=2, ep=2),
        f"{MLP}.experts.local_experts",
        r"which is .*(ep|dp)",
        "parameter_gradient",
        averaged(lambda f, m: f * 2, only_experts=True),
    ),
    # Recomputation and pipeline stages.
    Row(
        "input of a recomputed chunk",
        ("NVIDIA/Megatron-LM#290",),
        "With several layers in a recomputed chunk, each layer reads the chunk's input.",
        "GPT, `tp=2`, full recomputation in chunks of two layers",
        Case(
            "tp2 chunks of two",
            tp=2,
            layers=2,
            extra={
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
        ),
        "decoder.layers.1",
        r"reads the input of layer",
        patch=chunk_input_again,
    ),
    Row(
        "dropout of a recomputed layer",
        ("allenai/OLMo-core#828",),
        "Recomputation draws other dropout than the first forward pass.",
        "GPT, `tp=2`, full recomputation, dropout",
        RECOMPUTED_DROPOUT,
        "decoder.layers.1",
        "",
        "gradient",
        random_states_lost,
    ),
    Row(
        "prediction beside the embedding",
        ("NVIDIA-NeMo/Megatron-Bridge#5380",),
        "The embedding group has the first and the last stage, though only the first uses the embedding: the "
        "gradient of the untied output layer is added to that of the embedding.",
        "GPT with multi-token prediction, `pp=2`, pipeline layout `Ettm|L`, untied",
        PREDICTION,
        ("embedding.word_embeddings.weight", "output_layer.weight"),
        r"over pp",
        "parameter_gradient",
        clean=Case("pp2 prediction", pp=2, layers=2, extra={"mtp_num_layers": 1}),
    ),
    Row(
        "tied embeddings of two stages",
        ("NVIDIA/Megatron-LM#656",),
        "The gradients of the two copies of the tied embedding are not summed: the copies drift apart.",
        "GPT with tied embeddings, `pp=2`",
        Case("pp2 tied", pp=2, tied=True, layers=2),
        "embedding.word_embeddings.weight",
        r"over pp|replicas differ",
        "parameter_gradient",
        tied_gradient(0),
        replica="embedding.word_embeddings.weight.grad",
    ),
]
