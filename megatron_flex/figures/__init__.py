"""Figures: the numbers behind pictures, from dumps, statistics, caches and comparisons; drawn elsewhere."""

from megatron_flex.figures.attention import attention, induction
from megatron_flex.figures.divergence import ComparisonLike, divergence
from megatron_flex.figures.lens_figure import logit_lens
from megatron_flex.figures.sources import Source
from megatron_flex.figures.streams import heat, histograms, norms
from megatron_flex.figures.figure_data import (
    Attention,
    Divergence,
    FigureError,
    Heat,
    Histograms,
    Induction,
    LogitLens,
    Norms,
)

__all__ = [
    "Attention",
    "ComparisonLike",
    "Divergence",
    "FigureError",
    "Heat",
    "Histograms",
    "Induction",
    "LogitLens",
    "Norms",
    "Source",
    "attention",
    "divergence",
    "heat",
    "histograms",
    "induction",
    "logit_lens",
    "norms",
]
