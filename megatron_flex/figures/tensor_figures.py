"""Norms, histograms and heat maps of tensors, attention patterns and induction scores, and how far two
dumps are apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import ceil, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_flex.figures.figure_data import (
    Attention,
    Divergence,
    FigureError,
    Heat,
    Histograms,
    Induction,
    Norms,
    as_array,
)
from megatron_flex.figures.figure_sources import (
    PATTERN_SITES,
    SampleRows,
    Source,
    StatisticsSource,
    TensorSource,
    as_fp32,
    caption_iterations,
    describe_layouts,
    last_iteration,
    make_caption,
    match_names,
    open_source,
    open_tensor_source,
)
from megatron_flex.statistics.moments import (
    COUNT,
    HISTOGRAM,
    INFINITIES,
    NANS,
    SECOND_POWER,
    ZEROS,
    MomentSums,
)
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, compute_bin_edges

if TYPE_CHECKING:
    from megatron_flex.compare import Comparison

LAYER_OUTPUTS = "decoder.layers.*:output"
READ_VALUES = 1 << 22  # maximum number of values of a heat map read at a time


BAND = (0.1, 0.9)  # quantiles of token norms


def norms(source: Source, pattern: str = LAYER_OUTPUTS, *, tokens: bool = False) -> Norms:
    """The norm of each tensor in each iteration, over all its samples and tokens.

    Args:
        source: a dump, statistics, a cache, or the path of one of the first two.
        pattern: a site's name, a module's (for its output) or a glob, as for hooks.
        tokens: also the norms of single tokens, for which a dump is read once more; statistics have none.

    Returns:
        The norms, in model order.

    Raises:
        FigureError: nothing of that name was dumped or measured.

    Examples:
        >>> figures.norms("dumps/run").values.shape
        (2, 4)
    """
    with open_source(source) as opened:
        names = match_names(opened, pattern)
        rows = (
            _norms_of_statistics(opened, names)
            if isinstance(opened, StatisticsSource)
            else _norms_of_tensors(opened, names)
        )
        iterations = sorted({number for number, _ in rows})
        table = torch.full((3, len(iterations), len(names)), math.nan, dtype=torch.float64)
        table[1:] = 0
        lines = {number: at for at, number in enumerate(iterations)}
        places = {name: at for at, name in enumerate(names)}
        for (number, name), row in rows.items():
            table[:, lines[number], places[name]] = torch.tensor(row, dtype=torch.float64)
        values, counts, broken = table[0], table[1].long(), table[2].long()
        named = names[0] if len(names) == 1 else pattern
        text = make_caption(
            f"norm of {named}", caption_iterations(opened, iterations), layout=describe_layouts(opened, names)
        )
        of_tokens = None
        if tokens and not isinstance(opened, StatisticsSource):
            of_tokens = as_array(_token_norms(opened, names, iterations))
        return Norms(
            tuple(names),
            tuple(iterations),
            as_array(values),
            as_array(counts),
            as_array(broken),
            text,
            of_tokens,
        )


NormRow = tuple[float, int, int]  # norm, finite values, others


def _norms_of_statistics(source: StatisticsSource, names: Sequence[str]) -> dict[tuple[int, str], NormRow]:
    out: dict[tuple[int, str], NormRow] = {}
    for row in source.rows(names):
        broken = row.nans + row.infinities
        out[row.iteration, row.site] = (
            math.nan if row.norm is None else row.norm,
            row.count - broken,
            broken,
        )
    return out


def _norms_of_tensors(source: TensorSource, names: Sequence[str]) -> dict[tuple[int, str], NormRow]:
    out: dict[tuple[int, str], NormRow] = {}
    for name in names:
        for number in source.iterations(name) or [0]:
            sums = MomentSums(histogram=False)
            for block in source.blocks(name, number):
                sums.add(block)
            row = sums.row.tolist()
            broken = round(row[NANS] + row[INFINITIES])
            out[number, name] = (math.sqrt(row[SECOND_POWER]), round(row[COUNT]) - broken, broken)
    return out


def _token_norms(source: TensorSource, names: Sequence[str], iterations: Sequence[int]) -> Tensor:
    """`[3, iteration, site]`: mean, 10th and 90th percentile of the finite norms of tokens."""
    out = torch.full((3, len(iterations), len(names)), math.nan, dtype=torch.float64)
    for column, name in enumerate(names):
        available = source.iterations(name) or [0]
        for line, number in enumerate(iterations):
            if number not in available:
                continue
            try:
                rows = [source.rows(name, number, n) for n in range(source.samples(name, number))]
            except FigureError:  # a tensor without tokens
                break
            each = torch.cat([as_fp32(r.all()).flatten(1).double().norm(dim=1) for r in rows])
            each = each[each.isfinite()]
            if each.numel():
                low, high = each.quantile(torch.tensor(BAND, dtype=torch.float64)).tolist()
                out[:, line, column] = torch.tensor([each.mean().item(), low, high], dtype=torch.float64)
    return out


def histograms(source: Source, site: str) -> Histograms:
    """The number of values of a tensor between powers of two, in each iteration.

    Args:
        source: a dump, statistics, a cache, or the path of one of the first two.
        site: its name, or the module's for its output.

    Returns:
        The counts.

    Raises:
        FigureError: it was not dumped or measured, or without histograms, or the name is ambiguous.

    Examples:
        >>> figures.histograms("stats/run", "decoder.layers.3").counts.sum(-1)
        array([2048, 2048])
    """
    with open_source(source) as opened:
        name = _only_name(match_names(opened, site), site)
        if isinstance(opened, StatisticsSource):
            rows = {row.iteration: list(row.histogram) for row in opened.rows([name]) if row.histogram}
            if not rows:
                raise FigureError(f"{opened.where} has no histograms of {name}: record with histogram=True")
        else:
            rows = {number: _count_bins(opened, name, number) for number in opened.iterations(name) or [0]}
        text = make_caption(name, caption_iterations(opened, list(rows)), layout=opened.layout(name))
        bounds, counts = (
            torch.tensor(compute_bin_edges(), dtype=torch.float64),
            torch.tensor(list(rows.values())),
        )
        return Histograms(name, tuple(rows), as_array(bounds), as_array(counts), text)


def _count_bins(source: TensorSource, name: str, iteration: int) -> list[int]:
    """In the order of a row of statistics: negative ones, zeros, positive ones."""
    sums = MomentSums()
    for block in source.blocks(name, iteration):
        sums.add(block)
    counts = [round(n) for n in sums.row[HISTOGRAM:].tolist()]
    return [*counts[:BINS_PER_SIGN], round(float(sums.row[ZEROS])), *counts[BINS_PER_SIGN:]]


def heat(
    source: Source,
    site: str,
    iteration: int | None = None,
    sample: int = 0,
    most: tuple[int, int] = (256, 256),
) -> Heat:
    """One sample of a tensor, tokens x features; where it is larger than `most`, means of |x| over blocks.

    Args:
        source: a dump, a cache, or a dump's path.
        site: its name, or the module's for its output.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.
        most: maximum tokens and features of the result.

    Returns:
        The values, or the means over blocks.

    Raises:
        FigureError: it does not exist, or has no samples with tokens, or the name is ambiguous.

    Examples:
        >>> figures.heat("dumps/run", "decoder.layers.3").values.shape
        (16, 32)
    """
    with open_tensor_source(source, "a heat map") as opened:
        name = _only_name(match_names(opened, site), site)
        number = last_iteration(opened, name, iteration)
        rows = opened.rows(name, number, sample)
        sizes = len(rows.tokens), prod(rows.features)
        if 0 in sizes:
            raise FigureError(f"{opened.where}: {name} has no values in iteration {number}")
        block = ceil(sizes[0] / max(1, most[0])), ceil(sizes[1] / max(1, most[1]))
        values = as_fp32(rows.all()).reshape(sizes) if block == (1, 1) else _block_means(rows, sizes, block)
        folded = "" if block == (1, 1) else f"means of |x| over {block[0]} x {block[1]} (tokens x features)"
        text = make_caption(
            name,
            caption_iterations(opened, [number]),
            f"sample {rows.sample}",
            folded,
            layout=opened.layout(name),
        )
        columns = tuple(range(0, sizes[1], block[1]))
        return Heat(name, number, as_array(values), rows.tokens[:: block[0]], columns, block, text)


def _block_means(rows: SampleRows, sizes: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Means of |x| over blocks, of which the last in each direction may be smaller."""
    down, along = block
    lines = []
    for first in range(0, sizes[0], down):
        last = min(first + down, sizes[0])
        step = max(1, READ_VALUES // sizes[1])
        total = torch.zeros(sizes[1])
        for at in range(first, last, step):
            part = as_fp32(rows.read(at, min(at + step, last)))
            total += part.reshape(-1, sizes[1]).abs().sum(0)
        lines.append(total / (last - first))
    table = torch.stack(lines)
    short = -sizes[1] % along
    sums: Tensor = F.pad(table, (0, short)).unflatten(1, (-1, along)).sum(-1)
    widths = torch.full((sums.shape[1],), float(along))
    widths[-1] -= short
    return sums / widths


def _only_name(names: list[str], site: str) -> str:
    if len(names) > 1:
        raise FigureError(f"{site!r} means {len(names)} tensors, such as {names[0]} and {names[1]}; name one")
    return names[0]


ATTENTION_SITES = "decoder.layers.*.self_attention.core_attention:probs"
EMBEDDING_NAMES = ("embedding.word_embeddings:output", "hook_embed")


def attention(source: Source, layer: int, iteration: int | None = None, sample: int = 0) -> Attention:
    """The attention patterns of a layer for one sample.

    Args:
        source: a dump, a cache, or a dump's path.
        layer: its number.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.

    Returns:
        The patterns of each head.

    Raises:
        FigureError: there are none of that layer.

    Examples:
        >>> figures.attention("dumps/run", layer=1).values.shape
        (4, 16, 16)
    """
    with open_tensor_source(source, "an attention pattern") as opened:
        by_layer = _pattern_names(opened)
        if layer not in by_layer:
            raise FigureError(f"{opened.where} has {_describe_layers(list(by_layer))}, but not layer {layer}")
        name = by_layer[layer]
        number = last_iteration(opened, name, iteration)
        rows = opened.rows(name, number, sample)
        values = as_fp32(rows.all()).transpose(0, 1).contiguous()
        text = make_caption(
            name, caption_iterations(opened, [number]), f"sample {rows.sample}", layout=opened.layout(name)
        )
        keys = tuple(range(values.shape[-1]))
        return Attention(layer, number, as_array(values), rows.tokens, keys, text)


def induction(source: Source, iteration: int | None = None) -> Induction:
    """The attention of each head from a repeated token to the token after its first occurrence.

    The second half of every sample must repeat the first one, which is checked if the source has the word
    embeddings. Scores are means over samples and the positions of the second half.

    Args:
        source: a dump, a cache, or a dump's path; with the attention patterns.
        iteration: by default the last one.

    Returns:
        The scores of each head.

    Raises:
        FigureError: there are no patterns, or not of all tokens, or the samples repeat nothing.

    Examples:
        >>> repeated = tokens[:, :8].repeat(1, 2)
        >>> logits, cache = flex.interp.run_with_cache(repeated, lambda name: "pattern" in name)
        >>> figures.induction(cache).scores.shape  # [layer, head]
        (4, 4)
    """
    with open_tensor_source(source, "an induction score") as opened:
        by_layer = _pattern_names(opened)
        names = list(by_layer.values())
        number = last_iteration(opened, names[0], iteration)
        _check_repeated(opened, number)
        scores = [_induction_scores(opened, name, number) for name in names]
        if len({len(both[0]) for both in scores}) > 1:
            raise FigureError(f"{opened.where}: layers have different numbers of heads; draw them one by one")
        followed, previous = (torch.stack([both[i] for both in scores]) for i in (0, 1))
        length = len(opened.rows(names[0], number, 0).tokens)
        uniform = float((1 / torch.arange(length // 2 + 1, length + 1)).mean())
        text = make_caption(
            ATTENTION_SITES if len(names) > 1 else names[0],
            caption_iterations(opened, [number]),
            f"mean over {opened.samples(names[0], number)} samples",
            layout=describe_layouts(opened, names),
        )
        return Induction(tuple(by_layer), as_array(followed), as_array(previous), uniform, number, text)


def _pattern_names(source: TensorSource) -> dict[int, str]:
    """The names of attention patterns by layer.

    Raises:
        FigureError: there are none.
    """
    matches = (PATTERN_SITES.fullmatch(name) for name in source.names)
    out = {int(match[1]): match[0] for match in matches if match is not None}
    if not out:
        raise FigureError(
            f"{source.where} has no attention patterns: {source.record.format(repr(ATTENTION_SITES))}, which "
            "layers of the local spec have (--transformer-impl local)"
        )
    return dict(sorted(out.items()))


def _describe_layers(layers: list[int]) -> str:
    first, last = layers[0], layers[-1]
    which = f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"the attention patterns of {which}"


def _induction_scores(source: TensorSource, name: str, iteration: int) -> tuple[Tensor, Tensor]:
    """`[head]` each: attention to the token after the earlier copy, and to the previous token."""
    followed, previous = [], []
    for sample in range(source.samples(name, iteration)):
        rows = source.rows(name, iteration, sample)
        pattern = as_fp32(rows.all()).transpose(0, 1)
        queries, keys = pattern.shape[-2:]
        if queries != keys or queries % 2 or rows.tokens != tuple(range(queries)):
            raise FigureError(
                f"{source.where}: {name} has {queries} queries and {keys} keys; induction scores need all "
                "tokens of a sequence of even length"
            )
        half = queries // 2
        second = pattern[:, half:]  # from half + i to i + 1, and to half + i - 1
        followed.append(second.diagonal(1, -2, -1).mean(-1))
        previous.append(second.diagonal(half - 1, -2, -1).mean(-1))
    return torch.stack(followed).mean(0), torch.stack(previous).mean(0)


def _check_repeated(source: TensorSource, iteration: int) -> None:
    name = next((n for n in EMBEDDING_NAMES if n in source.names), None)
    if name is None or (source.iterations(name) and iteration not in source.iterations(name)):
        return
    for sample in range(source.samples(name, iteration)):
        first, second = source.rows(name, iteration, sample).all().tensor_split(2)
        if not torch.equal(first, second):
            raise FigureError(
                f"{source.where}: the second half of sample {sample} does not repeat the first one, which "
                "induction scores need: run on torch.cat([tokens, tokens], 1)"
            )


def divergence(comparison: Comparison) -> Divergence:
    """The errors and tolerances of a comparison as tables, iterations x sites in execution order.

    Returns:
        The tables.

    Raises:
        FigureError: nothing was compared.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> figures.divergence(compare("dumps/run", "dumps/changed")).first
        ('decoder.layers.3:input', 0)
    """
    rows = comparison.rows
    if not rows:
        raise FigureError(f"{comparison.a} and {comparison.b} have no site in common that was compared")
    sites = list(dict.fromkeys(row.name for row in rows))
    iterations = list(dict.fromkeys(row.iteration for row in rows))
    places = {name: at for at, name in enumerate(sites)}
    lines = {number: at for at, number in enumerate(iterations)}
    table = torch.full((2, len(iterations), len(sites)), math.nan, dtype=torch.float64)
    for row in rows:
        table[:, lines[row.iteration], places[row.name]] = torch.tensor(
            [row.error, row.tolerance], dtype=torch.float64
        )
    first = comparison.first
    where = None if first is None else (first.name, first.iteration)
    ends = "within tolerance" if where is None else f"first at {where[0]}, iteration {where[1]}"
    text = make_caption(f"A: {comparison.a}, B: {comparison.b}", iterations, ends)
    return Divergence(tuple(sites), tuple(iterations), as_array(table[0]), as_array(table[1]), where, text)
