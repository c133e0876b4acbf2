"""Collectives: gather and scatter of a Layout over a Mesh. The one caller of data collectives.

`gather_full` and `scatter_full` are differentiable and conjugate to each other, and so are `gather_rows`
and `scatter_rows` for experts' rows along a `Route`; between `to_edit_rank` and `from_edit_rank` one rank
computes for all; `combine_replicas` adds up what ranks contribute to replicas; `gather_to_leader` and
`gather_up_pipeline` bring what was read to one rank, a `SharedMemoryTransport` without a collective within a node; a `PipelineRelay`
passes values on from stage to stage;
`Agreement` keeps the ranks' hooks equal.
"""

from megatron_flex.collectives.adding import BackgroundReduction, PendingReduction
from megatron_flex.collectives.along import exchange_tensors, gather_along, broadcast_items
from megatron_flex.collectives.combining import SAMPLE_AXES, combine_replicas, broadcast_copies, sum_over_ranks
from megatron_flex.collectives.edit import (
    assemble_on_all_ranks,
    from_edit_rank,
    gather_full,
    replica_mesh,
    scatter_full,
    broadcast_from_first,
    to_edit_rank,
)
from megatron_flex.collectives.everywhere import broadcast_in_buckets
from megatron_flex.collectives.messages import align_size
from megatron_flex.collectives.meter import CollectiveCall, Timestamp, meter
from megatron_flex.collectives.plan import PlannedCollective, plan_result_broadcast, plan_full_gather
from megatron_flex.collectives.recipes import gradient_of
from megatron_flex.collectives.pipeline_relay import StageMessage, PipelineRelay, pack_values, broadcast_package, unpack_values
from megatron_flex.collectives.expert_route import Dispatch, Route, gather_rows, scatter_rows
from megatron_flex.collectives.leader_gather import (
    PendingShard,
    LeaderGather,
    GatherStep,
    is_leader,
    is_leader_for,
    plan_read,
    gather_to_leader,
    gather_up_pipeline,
    takes_part,
)
from megatron_flex.collectives.local_shard import Shard
from megatron_flex.collectives.transport import SharedMemoryTransport, open_shared_memory
from megatron_flex.collectives.single import (
    checksum,
    find_differing_axes,
    join_flat_parts,
    send_from_stage,
    assemble_on_stage,
)
from megatron_flex.collectives.staging import allocate_bytes, buffer_pool
from megatron_flex.collectives.rank_agreement import Agreement, max_over_ranks, gather_objects, await_value, store_value

__all__ = [
    "SAMPLE_AXES",
    "BackgroundReduction",
    "Agreement",
    "SharedMemoryTransport",
    "Dispatch",
    "StageMessage",
    "CollectiveCall",
    "PendingShard",
    "PlannedCollective",
    "PendingReduction",
    "PipelineRelay",
    "Route",
    "LeaderGather",
    "Shard",
    "Timestamp",
    "GatherStep",
    "assemble_on_all_ranks",
    "max_over_ranks",
    "checksum",
    "combine_replicas",
    "find_differing_axes",
    "gather_objects",
    "exchange_tensors",
    "await_value",
    "allocate_bytes",
    "from_edit_rank",
    "gather_along",
    "gather_rows",
    "gather_full",
    "broadcast_items",
    "gradient_of",
    "is_leader",
    "open_shared_memory",
    "join_flat_parts",
    "is_leader_for",
    "store_value",
    "broadcast_copies",
    "meter",
    "pack_values",
    "plan_result_broadcast",
    "plan_read",
    "plan_full_gather",
    "replica_mesh",
    "scatter_rows",
    "scatter_full",
    "gather_to_leader",
    "gather_up_pipeline",
    "broadcast_package",
    "broadcast_from_first",
    "buffer_pool",
    "align_size",
    "sum_over_ranks",
    "takes_part",
    "broadcast_in_buckets",
    "to_edit_rank",
    "unpack_values",
    "send_from_stage",
    "assemble_on_stage",
]
