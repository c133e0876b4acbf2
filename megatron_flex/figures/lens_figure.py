"""The logit lens: the prediction of the residual stream after each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.reader import OpenDump
from megatron_flex.errors import SiteError
from megatron_flex.figures.figure_data import FigureError, LogitLens, as_array
from megatron_flex.figures.figure_sources import (
    CacheSource,
    DumpSource,
    Source,
    TensorSource,
    as_fp32,
    caption_iterations,
    describe_layouts,
    last_iteration,
    make_caption,
    open_tensor_source,
)
from megatron_flex.gpt_names import FINAL_NORMS
from megatron_flex.layout import Layout
from megatron_flex.lens.tensor_views import normalize_stream
from megatron_flex.sites import Site, SiteTable

OUTPUT_WEIGHT, EMBEDDING_WEIGHT = "output_layer.weight", "embedding.word_embeddings.weight"
STREAM_SITES = "decoder.layers.*"
MAX_LOGITS = 1 << 24  # maximum number of logits in memory
PIECE = 1 << 25  # maximum number of weights in fp32

Logits = Callable[[Tensor], Tensor]  # of streams [token, h]: [token, vocabulary], fp32


def logit_lens(
    source: Source,
    iteration: int | None = None,
    sample: int = 0,
    top: int = 5,
    *,
    positions: slice | Sequence[int] = slice(None),
    tied: bool | None = None,
    targets: Sequence[int] | None = None,
) -> LogitLens:
    """The prediction of the next token from the residual stream before the first layer and after each one.

    Each stream is normed separately with the final norm, and multiplied by the unembedding. A dump must
    include those weights among its parameters. For a cache they are fetched: every rank calls it alike.

    Args:
        source: a dump, a cache, or a dump's path.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.
        top: the number of most likely tokens to keep.
        positions: the indices of tokens among the source's tokens.
        tied: whether the output layer shares the word embeddings, where a dump does not have that.
        targets: for each position a token of which the rank is wanted, such as the one that follows; by
            default the likeliest after the last layer.

    Returns:
        The most likely tokens, with their probabilities.

    Raises:
        FigureError: there are no streams, the dump lacks the weights, or there are not as many targets as
            positions.

    Examples:
        >>> figures.logit_lens("dumps/run", top=3).ids.shape
        (5, 16, 3)
    """
    if top < 1:
        raise FigureError(f"top={top}: at least the likeliest token must be kept, top=1")
    with open_tensor_source(source, "a logit lens") as opened:
        names = _find_streams(opened)
        first = next(iter(names.values()))
        number = last_iteration(opened, first, iteration)
        logits = (
            opened.cache.logit_lens
            if isinstance(opened, CacheSource)
            else _read_unembedding(opened, number, tied)
        )
        chosen: list[int] | None = None
        places: tuple[int, ...] = ()
        target_ids = None if targets is None else torch.tensor([int(t) for t in targets], dtype=torch.int64)
        lenses: list[_Lens] = []
        for name in reversed(names.values()):  # the last one first: its answer is what others are ranked by
            rows = opened.rows(name, number, sample)
            if chosen is None:
                chosen = _chosen_positions(positions, len(rows.tokens))
                places = tuple(rows.tokens[i] for i in chosen)
            if target_ids is not None and len(target_ids) != len(chosen):
                raise FigureError(
                    f"targets has {len(target_ids)} tokens, and there are {len(chosen)} positions"
                )
            lenses.insert(0, _read_lens(rows.all()[torch.tensor(chosen)], logits, top, target_ids))
            target_ids = lenses[0].targets
        text = make_caption(
            f"logit lens of {STREAM_SITES}",
            caption_iterations(opened, [number]),
            f"sample {rows.sample}",
            layout=describe_layouts(opened, list(names.values())),
        )
        return LogitLens(tuple(names), places, *_stacked(lenses, number, text))


def _find_streams(source: TensorSource) -> dict[int, str]:
    """The streams by the number of layers before them."""
    names = set(source.names)
    inside = [n for n in names if n.startswith("decoder.layers.") and n.count(".") == 2]
    numbers = sorted({int(n.removeprefix("decoder.layers.").partition(":")[0]) for n in inside})
    out: dict[int, str] = {}
    for layers_before in range(numbers[-1] + 2 if numbers else 0):
        before = [f"decoder.layers.{layers_before - 1}:output"] if layers_before else []
        last = [] if layers_before else ["embedding:output"]
        name = next(
            (n for n in (*before, f"decoder.layers.{layers_before}:input", *last) if n in names), None
        )
        if name is not None:
            out[layers_before] = name
    if not out:
        raise FigureError(
            f"{source.where} has no residual stream: {source.record.format(repr(STREAM_SITES))}, outputs of "
            "layers"
        )
    return out


def _chosen_positions(positions: slice | Sequence[int], token_count: int) -> list[int]:
    given = f"{positions!r:.80}"
    if isinstance(positions, slice):
        positions = range(token_count)[positions]
    if not positions:
        raise FigureError(
            f"positions={given} selects none of {token_count} tokens; leave positions out for all"
        )
    wrong = next((t for t in positions if not -token_count <= t < token_count), None)
    if wrong is not None:
        raise FigureError(
            f"positions={given} has {wrong}, and there are {token_count} tokens, 0 to {token_count - 1}"
        )
    return [range(token_count)[t] for t in positions]


class _Lens(NamedTuple):
    """One stream through the lens: `[token, k]` ids and probabilities, `[token]` the others."""

    ids: Tensor
    probabilities: Tensor
    entropies: Tensor
    ranks: Tensor
    targets: Tensor


def _stacked(lenses: list[_Lens], number: int, caption: str) -> tuple[Any, ...]:
    """The fields of a `LogitLens` from `ids` on, of the lenses of all layers."""
    return (
        as_array(torch.stack([lens.ids for lens in lenses])),
        as_array(torch.stack([lens.probabilities for lens in lenses])),
        number,
        caption,
        as_array(torch.stack([lens.entropies for lens in lenses])),
        as_array(torch.stack([lens.ranks for lens in lenses])),
        as_array(lenses[-1].targets),
    )


def _read_lens(streams: Tensor, logits: Logits, top: int, targets: Tensor | None) -> _Lens:
    """The most likely tokens, the entropy, and the rank of the targets, few positions at a time."""
    parts: list[_Lens] = []
    step = 1
    at = 0
    while at < len(streams):
        scores = logits(as_fp32(streams[at : at + step]))
        shares = scores.log_softmax(-1)
        best, which = shares.topk(min(top, scores.shape[-1]), -1)
        target_tokens = which[:, 0] if targets is None else targets[at : at + step].to(which.device)
        outside = [t for t in target_tokens.tolist() if not 0 <= t < scores.shape[-1]]
        if outside:
            raise FigureError(
                f"targets has token {outside[0]}; the vocabulary has 0 to {scores.shape[-1] - 1}"
            )
        ranks = 1 + (shares > shares.gather(-1, target_tokens[:, None])).sum(-1)
        parts.append(
            _Lens(which, best.exp(), -torch.xlogy(shares.exp(), shares.exp()).sum(-1), ranks, target_tokens)
        )
        at += step
        step = max(1, MAX_LOGITS // scores.shape[-1])  # the first token gives the vocabulary size
    return _Lens(*(torch.cat(several) for several in zip(*parts, strict=True)))


# -- of a dump -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unembedding:
    """The final norm and unembedding from a dump.

    Attributes:
        weight: the weight of the final norm, `[h]`, with any unit offset applied.
        bias: its bias, if it has one.
        words: `[vocabulary, h]`, as stored.
        rms: whether it is an RMSNorm.
        epsilon: the norm's epsilon.
        scale: what the model multiplies the product by.
    """

    weight: Tensor
    bias: Tensor | None
    words: Tensor
    rms: bool
    epsilon: float
    scale: float = 1.0

    def __call__(self, streams: Tensor) -> Tensor:
        """The logits of streams `[token, h]`."""
        stream = normalize_stream(streams, self.rms, self.epsilon) * self.weight
        stream = stream if self.bias is None else stream + self.bias
        stream = stream if self.scale == 1.0 else stream * self.scale
        pieces = self.words.split(max(1, PIECE // self.words.shape[1]))
        return torch.cat([stream @ piece.to(stream.dtype).T for piece in pieces], -1)


def _read_unembedding(source: TensorSource, iteration: int, tied: bool | None) -> Unembedding:
    assert isinstance(source, DumpSource)
    dump = source.dump
    model = dump.manifest.model
    kind, epsilon = model.get("normalization"), model.get("layernorm_epsilon")
    if kind not in ("RMSNorm", "LayerNorm") or not isinstance(epsilon, (int, float)):
        raise FigureError(
            f"{source.where} does not tell the final norm of its model (of {dump.manifest.framework}): logit "
            "lenses are made of Megatron's dumps, or of a cache (flex.interp.run_with_cache(tokens))"
        )
    norm = next((n for n in FINAL_NORMS if f"{n}.weight" in dump.parameters), None)
    words = _unembedding_name(dump, tied)
    if norm is None or words is None:
        lacking = [
            n for n, parameter in (("decoder.final_*", norm), (OUTPUT_WEIGHT, words)) if parameter is None
        ]
        raise FigureError(
            f"{source.where} lacks {' and '.join(lacking)} among its parameters, which a logit lens needs: "
            f"dump parameters=['decoder.final_*.*', {OUTPUT_WEIGHT!r}]; of tied embeddings "
            f"{EMBEDDING_WEIGHT!r}, and pass tied=True here"
        )

    def read(name: str) -> Tensor:
        return dump.parameter(name).at(iteration)[0].torch()

    offset = 1.0 if model.get("layernorm_zero_centered_gamma") else 0.0
    bias = f"{norm}.bias"
    return Unembedding(
        as_fp32(read(f"{norm}.weight")) + offset,
        as_fp32(read(bias)) if bias in dump.parameters else None,
        read(words),
        kind == "RMSNorm",
        float(epsilon),
        float(model.get("mup_output_mult", 1.0)) if model.get("use_mup") else 1.0,
    )


def _unembedding_name(dump: OpenDump, tied: bool | None) -> str | None:
    """The unembedding parameter; None if the dump lacks it or does not name it.

    If the output layer's weight was requested and the model has none of its own, the embeddings are tied.
    """
    if OUTPUT_WEIGHT in dump.parameters:
        return OUTPUT_WEIGHT
    if EMBEDDING_WEIGHT not in dump.parameters or tied is False:
        return None
    patterns = dump.manifest.settings.get("parameters", ())
    return EMBEDDING_WEIGHT if tied or any(_matches_name(p, OUTPUT_WEIGHT) for p in patterns) else None


def _matches_name(pattern: str, name: str) -> bool:
    try:
        return bool(SiteTable([Site(name, Layout(()), ())]).match(pattern))
    except SiteError:
        return False
