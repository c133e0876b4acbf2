"""Layout: how a rank's local tensor relates to the whole one. Frozen data and pure functions.

Everything that has to know where an element lives (live gathering, edits, parameters) asks this one
folder, which communicates nothing and knows no framework.
"""

from megatron_flex.layout.assembly import (
    ShardBlock,
    ShardPosition,
    assemble,
    plan_blocks,
    copy_shard,
    extract,
    locate_shard,
    copy_blocks,
)
from megatron_flex.layout.inferring import TENSOR_AXIS, name_batch_first, infer_layout
from megatron_flex.layout.region import DimIndex, RegionIndex, compact_index, first_copy, is_partial, assemble_region, take_entries
from megatron_flex.layout.expert_rows import ExpertChoice, select_experts, rows_by_source
from megatron_flex.layout.spans import (
    coordinates,
    padded_shape,
    uneven_lengths,
    count_parts,
    spans,
    full_shape,
)
from megatron_flex.layout.types import (
    Coords,
    Cut,
    Dim,
    Layout,
    Lengths,
    Sizes,
    Span,
    shard_over_data,
    without_data_axis,
    replicated,
)

__all__ = [
    "TENSOR_AXIS",
    "ShardBlock",
    "ExpertChoice",
    "Coords",
    "Cut",
    "Dim",
    "DimIndex",
    "Layout",
    "Lengths",
    "ShardPosition",
    "Sizes",
    "Span",
    "RegionIndex",
    "assemble",
    "name_batch_first",
    "plan_blocks",
    "copy_shard",
    "compact_index",
    "coordinates",
    "infer_layout",
    "extract",
    "first_copy",
    "select_experts",
    "is_partial",
    "shard_over_data",
    "without_data_axis",
    "padded_shape",
    "uneven_lengths",
    "locate_shard",
    "count_parts",
    "copy_blocks",
    "assemble_region",
    "replicated",
    "rows_by_source",
    "spans",
    "take_entries",
    "full_shape",
]
