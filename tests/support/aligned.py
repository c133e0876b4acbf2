"""A Hugging Face model and the same weights in a Megatron model on this rank, aligned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_flex.errors import FlexWarning
from tests.support import hugging_face
from tests.support.gpt import Case


def rank_models(
    family: str | hugging_face.Family,
    case: Case,
    dtype: torch.dtype = torch.float32,
    model: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Any, list[nn.Module]]:
    """The Hugging Face model, and the chunks of this rank with its weights.

    Args:
        family: the architecture.
        case: the layout.
        dtype: of both models.
        model: other arguments of the Megatron model.
        more: other settings of its configuration.
    """
    from megatron_flex.conversion import config_from_hf, load_hf

    hf_model = hugging_face.make_model(family, dtype)
    arguments = config_from_hf(hf_model)
    vocabulary = -(-arguments.model["vocab_size"] // case.tp) * case.tp  # padded as Megatron's tokenizer does
    arguments = replace(arguments, model={**arguments.model, "vocab_size": vocabulary, **(model or {})})
    if dtype == torch.bfloat16:
        more |= {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype}
    chunks = hugging_face.build(case, arguments, **more)
    if dtype == torch.bfloat16:
        chunks = [c.bfloat16() for c in chunks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlexWarning)  # of settings that a fault has changed
        load_hf(chunks, hf_model)
    return hf_model, chunks


def aligned(
    family: str,
    case: Case,
    dtype: torch.dtype = torch.float32,
    batch: Any = None,
    gradients: bool = False,
    isolate: bool = False,
    wrap: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """What `align` finds.

    Args:
        family: the architecture.
        case: the layout.
        dtype: of both models.
        batch: tokens; None for some.
        gradients: compare those of one step.
        isolate: run with the layer inputs of Hugging Face in any case.
        wrap: settings of Megatron's DistributedDataParallel around the chunks; None for bare chunks.
        more: for `rank_models`.
    """
    from megatron_flex.alignment import align
    from megatron_flex.model import FlexModel

    hf_model, chunks = rank_models(family, case, dtype, **more)
    if wrap is not None:
        chunks = wrapped(chunks, **wrap)
    with FlexModel(chunks) as flex:
        tokens = hugging_face.tokens() if batch is None else batch
        return align(hf_model, flex, tokens, gradients=gradients, isolate=isolate)


def wrapped(chunks: list[nn.Module], **settings: Any) -> list[nn.Module]:
    """The chunks in Megatron's DistributedDataParallel, with no function that finalizes gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(**settings)
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
