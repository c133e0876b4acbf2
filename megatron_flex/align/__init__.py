"""Alignment of a Hugging Face model and a Megatron model, hook point by hook point."""

from megatron_flex.align.aligner import align
from megatron_flex.align.alignment import Alignment, LayerVerdict, SiteVerdict
from megatron_flex.align.counterparts import SiteNames, site_names

__all__ = ["Alignment", "LayerVerdict", "SiteNames", "SiteVerdict", "align", "site_names"]
