"""Alignment of a Hugging Face model and a Megatron model, hook point by hook point."""

from megatron_flex.alignment.aligner import align
from megatron_flex.alignment.alignment_result import Alignment, LayerVerdict, SiteVerdict
from megatron_flex.alignment.counterparts import SiteNames, site_names

__all__ = ["Alignment", "LayerVerdict", "SiteNames", "SiteVerdict", "align", "site_names"]
