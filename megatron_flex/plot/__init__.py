"""Plots: what figures tell, drawn by matplotlib."""

from megatron_flex.plot.curves import divergence, norms
from megatron_flex.plot.grids import attention, heat, induction
from megatron_flex.plot.lens import logit_lens
from megatron_flex.plot.ridges import histograms

__all__ = ["attention", "divergence", "heat", "histograms", "induction", "logit_lens", "norms"]
