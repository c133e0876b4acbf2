"""Collectives: gather and scatter of a Layout over a Mesh. Only this package calls data collectives.

`gather_full` and `scatter_full` are differentiable and conjugate to each other, and so are `gather_rows`
and `scatter_rows` for experts' rows along a `Route`; between `to_edit_rank` and `from_edit_rank` one rank
computes for all; `combine_replicas` sums and averages values over replicas; `gather_to_leader` and
`gather_up_pipeline` bring captures to one rank, and the transports of `open_transports` bring the captures of
a stage, in shared memory where ranks share a node; a `PipelineRelay` sends values from stage to stage;
`Agreement` compares the hooks of all ranks.
"""

from megatron_flex.collectives.assembly_plans import check_shard
from megatron_flex.collectives.edit_sums import EditSums, FailedElsewhere
from megatron_flex.collectives.expert_route import Dispatch, Route, gather_rows, scatter_rows
from megatron_flex.collectives.gather_scatter import (
    FullTensorPlan,
    PlannedCollective,
    assemble_on_all_ranks,
    broadcast_from_first,
    from_edit_rank,
    gather_full,
    plan_full_gather,
    plan_result_broadcast,
    replica_mesh,
    scatter_full,
    to_edit_rank,
)
from megatron_flex.collectives.leader_gather import (
    GatherStep,
    LeaderGather,
    PendingShard,
    gather_to_leader,
    is_leader,
    is_leader_for,
    plan_read,
    takes_part,
)
from megatron_flex.collectives.local_shard import Shard, ShardSum, join_sum
from megatron_flex.collectives.messages import align_size, allocate_bytes, buffer_pool
from megatron_flex.collectives.meter import CollectiveCall, Timestamp, meter
from megatron_flex.collectives.pipeline_gather import PipelineGather, gather_up_pipeline
from megatron_flex.collectives.pipeline_relay import (
    PipelineRelay,
    StageMessage,
    broadcast_package,
    pack_values,
    unpack_values,
)
from megatron_flex.collectives.rank_agreement import (
    EXCHANGE_BYTES,
    Agreement,
    agreement_seconds,
    all_gather_pickled,
    await_value,
    gather_objects,
    max_over_ranks,
    store_value,
)
from megatron_flex.collectives.rank_liveness import note_open
from megatron_flex.collectives.reductions import (
    SAMPLE_AXES,
    BackgroundReduction,
    PendingReduction,
    broadcast_copies,
    combine_replicas,
    sum_along,
    sum_over_ranks,
)
from megatron_flex.collectives.tensor_transfer import (
    assemble_on_stage,
    broadcast_in_buckets,
    broadcast_items,
    checksum,
    exchange_tensors,
    find_differing_axes,
    gather_along,
    join_flat_parts,
    send_from_stage,
)
from megatron_flex.collectives.transport import TRANSPORTS, Transport, TransportBytes, open_transports

__all__ = [
    "EXCHANGE_BYTES",
    "SAMPLE_AXES",
    "TRANSPORTS",
    "Agreement",
    "BackgroundReduction",
    "CollectiveCall",
    "Dispatch",
    "EditSums",
    "FailedElsewhere",
    "FullTensorPlan",
    "GatherStep",
    "LeaderGather",
    "PendingReduction",
    "PendingShard",
    "PipelineGather",
    "PipelineRelay",
    "PlannedCollective",
    "Route",
    "Shard",
    "ShardSum",
    "StageMessage",
    "Timestamp",
    "Transport",
    "TransportBytes",
    "agreement_seconds",
    "align_size",
    "all_gather_pickled",
    "allocate_bytes",
    "assemble_on_all_ranks",
    "assemble_on_stage",
    "await_value",
    "broadcast_copies",
    "broadcast_from_first",
    "broadcast_in_buckets",
    "broadcast_items",
    "broadcast_package",
    "buffer_pool",
    "check_shard",
    "checksum",
    "combine_replicas",
    "exchange_tensors",
    "find_differing_axes",
    "from_edit_rank",
    "gather_along",
    "gather_full",
    "gather_objects",
    "gather_rows",
    "gather_to_leader",
    "gather_up_pipeline",
    "is_leader",
    "is_leader_for",
    "join_flat_parts",
    "join_sum",
    "max_over_ranks",
    "meter",
    "note_open",
    "open_transports",
    "pack_values",
    "plan_full_gather",
    "plan_read",
    "plan_result_broadcast",
    "replica_mesh",
    "scatter_full",
    "scatter_rows",
    "send_from_stage",
    "store_value",
    "sum_along",
    "sum_over_ranks",
    "takes_part",
    "to_edit_rank",
    "unpack_values",
]
