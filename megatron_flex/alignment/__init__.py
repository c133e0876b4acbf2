"""Alignment of a Hugging Face model and a Megatron model, hook point by hook point."""

from megatron_flex.alignment.aligner import align
from megatron_flex.alignment.alignment_result import Alignment, LayerVerdict, SiteVerdict
from megatron_flex.alignment.counterparts import SiteNames, site_names
from megatron_flex.alignment.dump_alignment import align_dumps, are_of_both_frameworks

__all__ = [
    "Alignment",
    "LayerVerdict",
    "SiteNames",
    "SiteVerdict",
    "align",
    "align_dumps",
    "are_of_both_frameworks",
    "site_names",
]
