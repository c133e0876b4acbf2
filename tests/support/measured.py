"""Rows of statistics that nobody measured, and files of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_flex.statistics import MeasuredSite, Statistics, StatisticsHeader, open_writers
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, TensorStatistics
from megatron_flex.statistics.statistics_writers import StatisticsWriters

BINS = 2 * BINS_PER_SIGN + 1
LAYOUT = {"dims": [{"name": "s", "cuts": [{"axis": "tp"}]}, {"name": "b"}, {"name": "h"}]}
SITES = [f"decoder.layers.{n}{end}" for n in range(2) for end in (":output", ".mlp.linear_fc1:output")]


def header(sites: Sequence[str] = SITES, **settings: object) -> StatisticsHeader:
    """What a run would say of itself."""
    places = tuple(MeasuredSite(name, LAYOUT, ("s", "b", 8)) for name in sites)
    axes = {"pp": 1, "dp": 2, "tp": 2}
    return StatisticsHeader(
        "2026-01-02T03:04:05+00:00", {"torch": "2.13.0"}, "megatron-core", axes, places, settings
    )


def row(iteration: int, site: str = SITES[0], order: int = 0, **more: object) -> TensorStatistics:
    """A row that follows from its iteration and site."""
    draw = random.Random(f"{iteration} {site}")
    counts = [0] * BINS
    for _ in range(40):
        counts[min(BINS - 1, max(0, round(draw.gauss(BINS / 2, 6))))] += draw.randrange(1, 100)
    told = {
        "kind": "gradient" if site.endswith(".grad") else "value",
        "stage": 0,
        "count": sum(counts),
        "mean": draw.gauss(0, 1),
        "std": draw.random(),
        "rms": math.exp(-iteration / 50) * (1 + order),
        "absmax": 4 * draw.random(),
        "zeros": draw.random(),
        "kurtosis": 3 + draw.random(),
        "norm": 10 * draw.random(),
        "nans": 0,
        "infinities": 0,
        "histogram": tuple(counts),
        "microbatches": 4,
    }
    return TensorStatistics(iteration=iteration, site=site, order=order, **{**told, **more})


def rows(iteration: int, sites: Sequence[str] = SITES) -> list[TensorStatistics]:
    """Those of an iteration."""
    return [row(iteration, site, order) for order, site in enumerate(sites)]


def begin(path: Path, sites: Sequence[str] = SITES) -> StatisticsWriters:
    """A start of a run, on its first rank."""
    return open_writers(Statistics(path, ["**"]), header(sites, every=1), True)


def write(path: Path, iterations: Sequence[int]) -> list[TensorStatistics]:
    """A start of a run from beginning to end; what it wrote."""
    writers = begin(path)
    out = []
    for iteration in iterations:
        writers.write(iteration, rows(iteration))
        out += rows(iteration)
    writers.close()
    return out
