"""Models with multi-token prediction for the tests: how they are built, and the names of their sites."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

Visit = Callable[[Tensor], Tensor]


def arguments(config: Any, spec: Any, stage: int | None) -> dict[str, Any]:
    """What GPTModel is given more, where the configuration asks for prediction layers."""
    if not getattr(config, "mtp_num_layers", None):
        return {}
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    known = inspect.signature(get_gpt_mtp_block_spec).parameters
    wanted = {"use_transformer_engine": False, "vp_stage": stage}
    return {
        "mtp_block_spec": get_gpt_mtp_block_spec(
            config, spec, **{k: v for k, v in wanted.items() if k in known}
        )
    }


def sum_embedding_gradients(chunks: list[nn.Module]) -> None:
    """Do what Megatron's finalize_model_grads does where two stages hold the embedding; no DDP is here."""
    from megatron.core import parallel_state

    if not any(getattr(c.config, "mtp_num_layers", None) for c in chunks):
        return
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    for chunk in chunks:
        if hasattr(chunk, "embedding"):
            dist.all_reduce(chunk.embedding.word_embeddings.weight.grad, group=group)


def first_call(root: nn.Module, visit: Visit) -> Visit:
    """`visit` for the first call in each forward pass: the decoder's, before those of the prediction."""
    seen: list[bool] = []
    root.register_forward_pre_hook(lambda *_: seen.clear())

    def once(tensor: Tensor) -> Tensor:
        if seen:
            return tensor
        seen.append(True)
        return visit(tensor)

    return once


def sites_of(
    depths: int | None, layer: list[str], stack: Callable[[str], list[str]] | None = None
) -> list[str]:
    """The sites of so many depths.

    `layer` has those of the transformer layer inside of each; `stack`, if there is a stack of layers
    instead, names its sites from its path.
    """
    version = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
    inner = "transformer_layer" if version < (0, 17) else "mtp_model_layer"
    out = []
    for depth in range(depths or 0):
        path = f"mtp.layers.{depth}"
        out += [f"{path}:input", f"{path}:output"]
        out += [f"{path}.{n}:{p}" for n in ("enorm", "hnorm", "final_layernorm") for p in ("input", "output")]
        out += [f"{path}.eh_proj:{p}" for p in ("input", "gemm_input", "output")]
        if stack is not None:
            out += stack(f"{path}.{inner}")
            continue
        out += [f"{path}.{inner}:{p}" for p in ("input", "mid", "output")]
        out += [f"{path}.{inner}.{name}" for name in layer]
    return [*out, "mtp:output"] if depths else []


def forget_losses() -> None:
    """Empty Megatron's record of the last model's losses, which has that model's number of depths."""
    module = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if module is not None:
        module.MTPLossLoggingHelper.tracker = {}
