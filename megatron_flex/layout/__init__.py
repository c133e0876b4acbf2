"""Layout: how a rank's local tensor relates to the whole one. Frozen data and pure functions.

Everything that has to know where an element lives (live gathering, edits, parameters) asks this one
folder, which communicates nothing and knows no framework.
"""

from megatron_flex.layout.assembly import (
    Block,
    Part,
    assemble,
    blocks_of,
    carve,
    extract,
    part_of,
    put_together,
)
from megatron_flex.layout.inferring import AXIS, batch_first, declared
from megatron_flex.layout.region import Index, Where, compact, first_copy, is_sum, region, take
from megatron_flex.layout.routing import Choice, held, rows_from
from megatron_flex.layout.spans import (
    coordinates,
    padded_shape,
    part_lengths,
    parts,
    spans,
    whole_shape,
)
from megatron_flex.layout.types import (
    Coords,
    Cut,
    Dim,
    Layout,
    Lengths,
    Sizes,
    Span,
    over_data,
    own_data,
    replicated,
)

__all__ = [
    "AXIS",
    "Block",
    "Choice",
    "Coords",
    "Cut",
    "Dim",
    "Index",
    "Layout",
    "Lengths",
    "Part",
    "Sizes",
    "Span",
    "Where",
    "assemble",
    "batch_first",
    "blocks_of",
    "carve",
    "compact",
    "coordinates",
    "declared",
    "extract",
    "first_copy",
    "held",
    "is_sum",
    "over_data",
    "own_data",
    "padded_shape",
    "part_lengths",
    "part_of",
    "parts",
    "put_together",
    "region",
    "replicated",
    "rows_from",
    "spans",
    "take",
    "whole_shape",
]
