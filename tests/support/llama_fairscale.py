"""The LLaMA-style model of fairscale's parallel layers, with one process's weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import llama, llama_meta


def parts(gather: bool = False, vocabulary: bool = False, attention: str = "") -> llama.Parts:
    """What fairscale makes a model of, as people do: only the logits are gathered.

    Args:
        gather: whether every linear takes and gives whole tensors.
        vocabulary: whether the embedding is cut along the vocabulary; else along the width.
        attention: `meta` for attention as Meta writes it, `cached` for it with its cache.
    """
    from fairscale.nn.model_parallel import layers
    from fairscale.nn.model_parallel.initialize import get_model_parallel_world_size

    def linear(cut: str, inputs: int, outputs: int) -> nn.Module:
        if cut == "row":
            return layers.RowParallelLinear(inputs, outputs, bias=False, input_is_parallel=not gather)
        whole = gather or cut == "logits"
        return layers.ColumnParallelLinear(inputs, outputs, bias=False, gather_output=whole)

    embedding = layers.VocabParallelEmbedding if vocabulary else layers.ParallelEmbedding
    if not attention:
        return llama.Parts(linear, embedding)
    ways = get_model_parallel_world_size()
    made = partial(llama_meta.Attention, ways=ways, cached=attention == "cached")
    return llama.Parts(linear, embedding, made)


def initialize(tp: int, pp: int = 1) -> None:
    """Make fairscale's groups."""
    from fairscale.nn.model_parallel import initialize as groups

    if groups.model_parallel_is_initialized():  # for another test of this rank's
        groups.destroy_model_parallel()
    groups.initialize_model_parallel(tp, pp)


def model(**switches: Any) -> llama.Llama:
    """The whole model, as this rank has it."""
    built = llama.Llama(parts(**switches))
    load(built, dict(llama.single().named_parameters()))
    return built


def load(built: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Give every parameter of a model, or of a stage of it, this rank's part of the whole."""
    from fairscale.nn.model_parallel.initialize import get_model_parallel_rank

    rank = get_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            part: Any = whole[name]
            for dim, length in enumerate(parameter.shape):
                if part.shape[dim] != length:
                    part = part.split(length, dim)[rank]
            parameter.copy_(part)


def stage(number: int, stages: int, **switches: Any) -> llama.Llama:
    """The layers of one stage of a pipeline; the others are left out."""
    built = llama.Llama(parts(**switches))
    mine = [n for n in built.layers if int(n) * stages // llama.LAYERS == number]
    built.layers = nn.ModuleDict({n: built.layers[n] for n in mine})
    if number > 0:
        built.tok_embeddings = None
    if number < stages - 1:
        built.norm = built.output = None
    load(built, dict(llama.single().named_parameters()))
    return built
