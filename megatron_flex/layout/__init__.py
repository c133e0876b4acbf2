"""Layout: the relation of a rank's local tensor to the full tensor. Frozen data and pure functions.

Everything that needs the position of an element (live gathering, edits, parameters) uses this folder,
which communicates nothing and depends on no framework.
"""

from megatron_flex.layout.algebra import (
    TENSOR_AXIS,
    Coords,
    Cut,
    Dim,
    Layout,
    Lengths,
    Sizes,
    Span,
    infer_layout,
    is_plain,
    name_batch_first,
    replicated,
    shard_over_data,
    without_data_axis,
)
from megatron_flex.layout.assembly import (
    ShardBlock,
    ShardPosition,
    assemble,
    copy_blocks,
    copy_shard,
    extract,
    locate_shard,
    plan_blocks,
)
from megatron_flex.layout.blocks import Block, blocks, first_copy, is_partial, owned_blocks, partial_plane
from megatron_flex.layout.expert_rows import ExpertChoice, rows_by_source, select_experts, to_device
from megatron_flex.layout.layout_drawing import draw_layout
from megatron_flex.layout.packed_sequences import PackedSequences
from megatron_flex.layout.region import (
    DimIndex,
    RegionIndex,
    assemble_region,
    compact_index,
    find_region,
    take_entries,
)
from megatron_flex.layout.spans import (
    coordinates,
    count_parts,
    full_shape,
    padded_shape,
    smallest_part,
    spans,
    uneven_lengths,
)

__all__ = [
    "TENSOR_AXIS",
    "Block",
    "Coords",
    "Cut",
    "Dim",
    "DimIndex",
    "ExpertChoice",
    "Layout",
    "Lengths",
    "PackedSequences",
    "RegionIndex",
    "ShardBlock",
    "ShardPosition",
    "Sizes",
    "Span",
    "assemble",
    "assemble_region",
    "blocks",
    "compact_index",
    "coordinates",
    "copy_blocks",
    "copy_shard",
    "count_parts",
    "draw_layout",
    "extract",
    "find_region",
    "first_copy",
    "full_shape",
    "infer_layout",
    "is_partial",
    "is_plain",
    "locate_shard",
    "name_batch_first",
    "owned_blocks",
    "padded_shape",
    "partial_plane",
    "plan_blocks",
    "replicated",
    "rows_by_source",
    "select_experts",
    "shard_over_data",
    "smallest_part",
    "spans",
    "take_entries",
    "to_device",
    "uneven_lengths",
    "without_data_axis",
]
