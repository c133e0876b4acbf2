"""Layout: how a rank's local tensor relates to the whole one. Frozen data and pure functions.

Everything that has to know where an element lives (live gathering, edits, parameters) asks this one
folder, which communicates nothing and knows no framework.
"""

from megatron_flex.layout.assembly import assemble, extract
from megatron_flex.layout.inferring import AXIS, batch_first, declared
from megatron_flex.layout.routing import Choice, held, rows_from
from megatron_flex.layout.spans import (
    coordinates,
    padded_shape,
    part_lengths,
    parts,
    spans,
    whole_shape,
)
from megatron_flex.layout.types import Coords, Cut, Dim, Layout, Lengths, Sizes, Span, over_data, replicated

__all__ = [
    "AXIS",
    "Choice",
    "Coords",
    "Cut",
    "Dim",
    "Layout",
    "Lengths",
    "Sizes",
    "Span",
    "assemble",
    "batch_first",
    "coordinates",
    "declared",
    "extract",
    "held",
    "over_data",
    "padded_shape",
    "part_lengths",
    "parts",
    "replicated",
    "rows_from",
    "spans",
    "whole_shape",
]
