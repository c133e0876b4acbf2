"""A Hugging Face model and the same weights in a Megatron model on this rank, aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support import hugging_face
from tests.support.gpt import Case

Planted = Callable[[Any, list[nn.Module]], None]


def rank_models(family: str, case: Case, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, list[nn.Module]]:
    """The Hugging Face model, and the chunks of this rank with its weights."""
    from megatron_flex.conversion import config_from_hf, load_hf

    hf_model = hugging_face.make_model(family, dtype)
    if dtype == torch.bfloat16:
        more |= {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype}
    chunks = hugging_face.build(case, config_from_hf(hf_model), **more)
    if dtype == torch.bfloat16:
        chunks = [c.bfloat16() for c in chunks]
    load_hf(chunks, hf_model)
    return hf_model, chunks


def aligned(family: str, case: Case, dtype: torch.dtype = torch.float32, batch: Any = None, **more: Any) -> Any:
    """What `align` finds."""
    from megatron_flex.align import align
    from megatron_flex.model import FlexModel

    hf_model, chunks = rank_models(family, case, dtype, **more)
    with FlexModel(chunks) as flex:
        return align(hf_model, flex, hugging_face.tokens() if batch is None else batch)
