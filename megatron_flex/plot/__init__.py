"""Plots: figures drawn with matplotlib.

Examples:
    >>> mf.plot.norms("dumps/run").savefig("norms.png")
"""

from megatron_flex.plot.curve_plots import divergence, histograms, norms
from megatron_flex.plot.grid_plots import attention, heat, induction, logit_lens

__all__ = ["attention", "divergence", "heat", "histograms", "induction", "logit_lens", "norms"]
