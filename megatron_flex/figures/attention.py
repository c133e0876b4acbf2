"""Attention patterns, and which heads look behind the earlier copy of what is repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.figures.sources import Source, caption, layouts, reading_values, told_of
from megatron_flex.figures.types import Attention, FigureError, Induction, as_array
from megatron_flex.figures.values import PATTERNS, Values, as_fp32, last_iteration

SITE = "decoder.layers.*.self_attention.core_attention:probs"
EMBEDDINGS = ("embedding.word_embeddings:output", "hook_embed")


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
    with reading_values(source, "an attention pattern") as found:
        there = _layers(found)
        if layer not in there:
            raise FigureError(f"{found.where} has {_have(list(there))}; it has none of layer {layer}")
        name = there[layer]
        number = last_iteration(found, name, iteration)
        rows = found.rows(name, number, sample)
        values = as_fp32(rows.all()).transpose(0, 1).contiguous()
        told = caption(name, told_of(found, [number]), f"sample {rows.sample}", layout=found.layout(name))
        keys = tuple(range(values.shape[-1]))
        return Attention(layer, number, as_array(values), rows.tokens, keys, told)


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
    with reading_values(source, "an induction score") as found:
        there = _layers(found)
        names = list(there.values())
        number = last_iteration(found, names[0], iteration)
        _check_repeated(found, number)
        scores = [_scores(found, name, number) for name in names]
        if len({len(both[0]) for both in scores}) > 1:
            raise FigureError(f"{found.where}: layers have different numbers of heads; draw them one by one")
        followed, previous = (torch.stack([both[i] for both in scores]) for i in (0, 1))
        length = len(found.rows(names[0], number, 0).tokens)
        uniform = float((1 / torch.arange(length // 2 + 1, length + 1)).mean())
        told = caption(
            SITE if len(names) > 1 else names[0],
            told_of(found, [number]),
            f"mean over {found.samples(names[0], number)} samples",
            layout=layouts(found, names),
        )
        return Induction(tuple(there), as_array(followed), as_array(previous), uniform, number, told)


def _layers(found: Values) -> dict[int, str]:
    """The names of attention patterns by layer.

    Raises:
        FigureError: there are none.
    """
    matches = (PATTERNS.fullmatch(name) for name in found.names)
    out = {int(match[1]): match[0] for match in matches if match is not None}
    if not out:
        raise FigureError(
            f"{found.where} has no attention patterns: {found.record.format(repr(SITE))}, which layers of "
            "the local spec have (--transformer-impl local)"
        )
    return dict(sorted(out.items()))


def _have(layers: list[int]) -> str:
    first, last = layers[0], layers[-1]
    which = f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"the attention patterns of {which}"


def _scores(found: Values, name: str, iteration: int) -> tuple[Tensor, Tensor]:
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


def _check_repeated(found: Values, iteration: int) -> None:
    name = next((n for n in EMBEDDINGS if n in found.names), None)
    if name is None or (found.iterations(name) and iteration not in found.iterations(name)):
        return
    for sample in range(found.samples(name, iteration)):
        first, second = found.rows(name, iteration, sample).all().tensor_split(2)
        if not torch.equal(first, second):
            raise FigureError(
                f"{found.where}: the second half of sample {sample} does not repeat the first one, which "
                "induction scores need: run on torch.cat([tokens, tokens], 1)"
            )
