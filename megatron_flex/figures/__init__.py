"""Figures: the numbers of pictures, from dumps, statistics, caches and comparisons; drawing is elsewhere.

Examples:
    >>> figure = mf.figures.norms("dumps/run", "decoder.layers.*:output")
    >>> figure.values.shape == (len(figure.iterations), len(figure.sites))
    True
"""

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
from megatron_flex.figures.figure_sources import Source
from megatron_flex.figures.lens_figure import logit_lens
from megatron_flex.figures.tensor_figures import (
    attention,
    divergence,
    heat,
    histograms,
    induction,
    norms,
)

__all__ = [
    "Attention",
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
