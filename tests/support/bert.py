"""BERT for the tests: how a case's model is built and called, and the names of its own sites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def model(common: dict[str, Any], stage: int | None) -> nn.Module:
    """A BertModel of Megatron's local classes."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vp_stage=stage,
        **common,
    )


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The losses of a microbatch, all of whose tokens are seen, and something of the second head."""
    seen, types = torch.ones_like(batch["tokens"]), batch["tokens"] % 2
    output = model(batch["tokens"], seen, types, lm_labels=batch["labels"])
    if not isinstance(output, tuple):
        return output
    losses, classes = output
    return losses + classes.cos().sum(-1, keepdim=True)


def sites_of(gpts: list[str]) -> list[str]:
    """BERT's sites, from those of a GPT of the same layers."""
    head = [f"lm_head{m}:{p}" for m in ("", ".dense", ".layer_norm") for p in ("input", "output")]
    return [*(s.replace("decoder", "encoder", 1) for s in gpts), *head, "pooler:output", "binary_head:output"]
