"""How far two dumps are apart, site by site, as a comparison has found it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_flex.figures.sources import make_caption
from megatron_flex.figures.figure_data import Divergence, FigureError, as_array


class RowLike(Protocol):
    """One site in one iteration; `compare.Row`."""

    @property
    def name(self) -> str:
        """Of the site or parameter."""
        ...

    @property
    def iteration(self) -> int:
        """The framework's number."""
        ...

    @property
    def error(self) -> float:
        """What the tolerance bounds."""
        ...

    @property
    def tolerance(self) -> float:
        """It."""
        ...


class ComparisonLike(Protocol):
    """Two dumps compared; `compare.Comparison`."""

    @property
    def a(self) -> str:
        """The one, in words."""
        ...

    @property
    def b(self) -> str:
        """The other."""
        ...

    @property
    def rows(self) -> Sequence[RowLike]:
        """Every site in every iteration, in the order of execution."""
        ...

    @property
    def first(self) -> RowLike | None:
        """The first that is above its tolerance."""
        ...


def divergence(comparison: ComparisonLike) -> Divergence:
    """The errors and tolerances of a comparison as tables, iterations x sites in the order of execution.

    Raises:
        FigureError: it has compared nothing.
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
