"""Norms and histograms over iterations and sites, and one sample of a tensor, tokens x features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_flex.figures.sources import (
    StatisticsSource,
    Source,
    make_caption,
    describe_layouts,
    match_names,
    open_source,
    open_tensor_source,
    caption_iterations,
)
from megatron_flex.figures.figure_data import FigureError, Heat, Histograms, Norms, as_array
from megatron_flex.figures.values import SampleRows, TensorSource, as_fp32, last_iteration
from megatron_flex.statistics.measured import BINS_PER_SIGN, compute_bin_edges
from megatron_flex.statistics.moments import COUNT, HISTOGRAM, INFINITIES, NANS, SECOND_POWER, ZEROS, MomentSums

LAYER_OUTPUTS = "decoder.layers.*:output"
READ_VALUES = 1 << 22  # values of a heat map that are read at a time


def norms(source: Source, pattern: str = LAYER_OUTPUTS) -> Norms:
    """The norm of each tensor in each iteration, over all samples and tokens that the source has.

    Args:
        source: a dump, statistics, a cache, or the path of one of the first two.
        pattern: a site's name, a module's (its output is meant) or a glob, as for hooks.

    Raises:
        FigureError: nothing of that name was dumped or measured.
    """
    with open_source(source) as found:
        names = match_names(found, pattern)
        rows = _norms_of_statistics(found, names) if isinstance(found, StatisticsSource) else _norms_of_tensors(found, names)
        iterations = sorted({number for number, _ in rows})
        table = torch.full((3, len(iterations), len(names)), math.nan, dtype=torch.float64)
        table[1:] = 0
        lines = {number: at for at, number in enumerate(iterations)}
        places = {name: at for at, name in enumerate(names)}
        for (number, name), row in rows.items():
            table[:, lines[number], places[name]] = torch.tensor(row, dtype=torch.float64)
        values, counts, broken = table[0], table[1].long(), table[2].long()
        named = names[0] if len(names) == 1 else pattern
        text = make_caption(f"norm of {named}", caption_iterations(found, iterations), layout=describe_layouts(found, names))
        return Norms(
            tuple(names), tuple(iterations), as_array(values), as_array(counts), as_array(broken), text
        )


NormRow = tuple[float, int, int]  # norm, finite values, others


def _norms_of_statistics(found: StatisticsSource, names: Sequence[str]) -> dict[tuple[int, str], NormRow]:
    out: dict[tuple[int, str], NormRow] = {}
    for row in found.rows(names):
        broken = row.nans + row.infinities
        out[row.iteration, row.site] = (
            math.nan if row.norm is None else row.norm,
            row.count - broken,
            broken,
        )
    return out


def _norms_of_tensors(found: TensorSource, names: Sequence[str]) -> dict[tuple[int, str], NormRow]:
    out: dict[tuple[int, str], NormRow] = {}
    for name in names:
        for number in found.iterations(name) or [0]:
            sums = MomentSums(histogram=False)
            for block in found.blocks(name, number):
                sums.add(block)
            row = sums.row.tolist()
            broken = round(row[NANS] + row[INFINITIES])
            out[number, name] = (math.sqrt(row[SECOND_POWER]), round(row[COUNT]) - broken, broken)
    return out


def histograms(source: Source, site: str) -> Histograms:
    """How many values of a tensor lie between which powers of two, in each iteration.

    Args:
        source: a dump, statistics, a cache, or the path of one of the first two.
        site: its name, or the module's whose output is meant.

    Raises:
        FigureError: it was not dumped or measured, or without histograms, or several are meant.
    """
    with open_source(source) as found:
        name = _only_name(match_names(found, site), site)
        if isinstance(found, StatisticsSource):
            rows = {row.iteration: list(row.histogram) for row in found.rows([name]) if row.histogram}
            if not rows:
                raise FigureError(f"{found.where} has no histograms of {name}: record with histogram=True")
        else:
            rows = {number: _count_bins(found, name, number) for number in found.iterations(name) or [0]}
        text = make_caption(name, caption_iterations(found, list(rows)), layout=found.layout(name))
        bounds, counts = torch.tensor(compute_bin_edges(), dtype=torch.float64), torch.tensor(list(rows.values()))
        return Histograms(name, tuple(rows), as_array(bounds), as_array(counts), text)


def _count_bins(found: TensorSource, name: str, iteration: int) -> list[int]:
    """As a row of statistics has them: negative ones, zeros, positive ones."""
    sums = MomentSums()
    for block in found.blocks(name, iteration):
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
        site: its name, or the module's whose output is meant.
        iteration: the last one if none is said.
        sample: which of those that the source has, counted from 0.
        most: tokens and features of the result, at most.

    Raises:
        FigureError: it is not there, or has no samples with tokens, or several are meant.
    """
    with open_tensor_source(source, "a heat map") as found:
        name = _only_name(match_names(found, site), site)
        number = last_iteration(found, name, iteration)
        rows = found.rows(name, number, sample)
        sizes = len(rows.tokens), prod(rows.features)
        if 0 in sizes:
            raise FigureError(f"{found.where}: {name} has no values in iteration {number}")
        block = ceil(sizes[0] / max(1, most[0])), ceil(sizes[1] / max(1, most[1]))
        values = as_fp32(rows.all()).reshape(sizes) if block == (1, 1) else _block_means(rows, sizes, block)
        folded = "" if block == (1, 1) else f"means of |x| over {block[0]} x {block[1]} (tokens x features)"
        text = make_caption(
            name,
            caption_iterations(found, [number]),
            f"sample {rows.sample}",
            folded,
            layout=found.layout(name),
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
