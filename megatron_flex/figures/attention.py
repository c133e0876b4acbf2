"""Attention patterns, and which heads look behind the earlier copy of what is repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.figures.sources import Source, make_caption, describe_layouts, open_tensor_source, caption_iterations
from megatron_flex.figures.figure_data import Attention, FigureError, Induction, as_array
from megatron_flex.figures.values import PATTERN_SITES, TensorSource, as_fp32, last_iteration

ATTENTION_SITES = "decoder.layers.*.self_attention.core_attention:probs"
EMBEDDING_NAMES = ("embedding.word_embeddings:output", "hook_embed")


def attention(source: Source, layer: int, iteration: int | None = None, sample: int = 0) -> Attention:
    """The attention patterns of a layer for one sample.

    Args:
        source: a dump, a cache, or a dump's path.
        layer: its number.
        iteration: the last one if none is said.
        sample: which of those that the source has, counted from 0.

    Raises:
        FigureError: there are none of that layer.
    """
    with open_tensor_source(source, "an attention pattern") as found:
        there = _pattern_names(found)
        if layer not in there:
            raise FigureError(f"{found.where} has {_describe_layers(list(there))}; it has none of layer {layer}")
        name = there[layer]
        number = last_iteration(found, name, iteration)
        rows = found.rows(name, number, sample)
        values = as_fp32(rows.all()).transpose(0, 1).contiguous()
        text = make_caption(name, caption_iterations(found, [number]), f"sample {rows.sample}", layout=found.layout(name))
        keys = tuple(range(values.shape[-1]))
        return Attention(layer, number, as_array(values), rows.tokens, keys, text)


def induction(source: Source, iteration: int | None = None) -> Induction:
    """How strongly each head looks from a repeated token to what followed it the first time.

    The second half of every sample must repeat the first one; where the source has the word embeddings too,
    that is checked. Scores are means over samples and the positions of the second half.

    Args:
        source: a dump, a cache, or a dump's path; with the attention patterns.
        iteration: the last one if none is said.

    Raises:
        FigureError: there are no patterns, or not of all tokens, or the samples repeat nothing.
    """
    with open_tensor_source(source, "an induction score") as found:
        there = _pattern_names(found)
        names = list(there.values())
        number = last_iteration(found, names[0], iteration)
        _check_repeated(found, number)
        scores = [_induction_scores(found, name, number) for name in names]
        if len({len(both[0]) for both in scores}) > 1:
            raise FigureError(f"{found.where}: layers have different numbers of heads; draw them one by one")
        followed, previous = (torch.stack([both[i] for both in scores]) for i in (0, 1))
        length = len(found.rows(names[0], number, 0).tokens)
        uniform = float((1 / torch.arange(length // 2 + 1, length + 1)).mean())
        text = make_caption(
            ATTENTION_SITES if len(names) > 1 else names[0],
            caption_iterations(found, [number]),
            f"mean over {found.samples(names[0], number)} samples",
            layout=describe_layouts(found, names),
        )
        return Induction(tuple(there), as_array(followed), as_array(previous), uniform, number, text)


def _pattern_names(found: TensorSource) -> dict[int, str]:
    """The names of attention patterns by layer.

    Raises:
        FigureError: there are none.
    """
    matches = (PATTERN_SITES.fullmatch(name) for name in found.names)
    out = {int(match[1]): match[0] for match in matches if match is not None}
    if not out:
        raise FigureError(
            f"{found.where} has no attention patterns: {found.record.format(repr(ATTENTION_SITES))}, which layers of "
            "the local spec have (--transformer-impl local)"
        )
    return dict(sorted(out.items()))


def _describe_layers(layers: list[int]) -> str:
    first, last = layers[0], layers[-1]
    which = f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"the attention patterns of {which}"


def _induction_scores(found: TensorSource, name: str, iteration: int) -> tuple[Tensor, Tensor]:
    """`[head]` each: attention to behind the earlier copy, and to the token before."""
    followed, previous = [], []
    for sample in range(found.samples(name, iteration)):
        rows = found.rows(name, iteration, sample)
        pattern = as_fp32(rows.all()).transpose(0, 1)
        queries, keys = pattern.shape[-2:]
        if queries != keys or queries % 2 or rows.tokens != tuple(range(queries)):
            raise FigureError(
                f"{found.where}: {name} has {queries} queries and {keys} keys; induction scores need all "
                "tokens of a sequence of even length"
            )
        half = queries // 2
        second = pattern[:, half:]  # from half + i to i + 1, and to half + i - 1
        followed.append(second.diagonal(1, -2, -1).mean(-1))
        previous.append(second.diagonal(half - 1, -2, -1).mean(-1))
    return torch.stack(followed).mean(0), torch.stack(previous).mean(0)


def _check_repeated(found: TensorSource, iteration: int) -> None:
    name = next((n for n in EMBEDDING_NAMES if n in found.names), None)
    if name is None or (found.iterations(name) and iteration not in found.iterations(name)):
        return
    for sample in range(found.samples(name, iteration)):
        first, second = found.rows(name, iteration, sample).all().tensor_split(2)
        if not torch.equal(first, second):
            raise FigureError(
                f"{found.where}: the second half of sample {sample} does not repeat the first one, which "
                "induction scores need: run on torch.cat([tokens, tokens], 1)"
            )
