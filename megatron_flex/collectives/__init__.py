"""Collectives: gather and scatter of a Layout over a Mesh. Only this package calls data collectives.

`enter` and `exit` take a tensor to editing functions and back, as an `Exchange` says: the full tensor,
experts' rows along a `Route`, one rank that edits for all; `combine_replicas` sums and averages values over
replicas; `gather_to_leader` and `gather_up_pipeline` bring captures to one rank, and the transports of
`open_transports` bring the captures of a stage, in shared memory where ranks share a node; a `PipelineRelay`
sends values from stage to stage; `Agreement` compares the hooks of all ranks.
"""

from megatron_flex.collectives.autograd_graph import follow_replaced_gradient, running_transform, weak_hook
from megatron_flex.collectives.edit_exchange import (
    IDENTITY,
    Enter,
    Exchange,
    OneRank,
    Substitute,
    choose_exchange,
    enter,
    exit,
    gather_full,
    guard_collective,
    plan_exchange,
    raise_broken,
    require_gradient,
    run_beside,
)
from megatron_flex.collectives.edit_sums import EditSums, FailedElsewhere
from megatron_flex.collectives.expert_route import Dispatch, Route
from megatron_flex.collectives.gather_plan import (
    REPLICA_AXES,
    is_leader,
    is_leader_for,
    plan_read,
    takes_part,
)
from megatron_flex.collectives.gather_scatter import (
    PlannedCollective,
    assemble_on_all_ranks,
    broadcast_from_first,
    check_shard,
    plan_full_gather,
    plan_result_broadcast,
    replica_mesh,
)
from megatron_flex.collectives.host_groups import global_rank
from megatron_flex.collectives.leader_gather import gather_to_leader
from megatron_flex.collectives.local_shard import Shard, ShardExchange, ShardSum, join_sum
from megatron_flex.collectives.messages import align_size, allocate_bytes, buffer_pool
from megatron_flex.collectives.meter import CollectiveCall, Timestamp, meter
from megatron_flex.collectives.object_exchange import (
    broadcast_object,
    gather_distinct,
    gather_numbers_to_first,
    gather_reports,
    run_or_raise_on_all,
)
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
    any_over_ranks,
    await_value,
    equal_over_ranks,
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
from megatron_flex.collectives.transport.device_copies import DeviceCopies

__all__ = [
    "EXCHANGE_BYTES",
    "IDENTITY",
    "REPLICA_AXES",
    "SAMPLE_AXES",
    "TRANSPORTS",
    "Agreement",
    "BackgroundReduction",
    "CollectiveCall",
    "DeviceCopies",
    "Dispatch",
    "EditSums",
    "Enter",
    "Exchange",
    "FailedElsewhere",
    "OneRank",
    "PendingReduction",
    "PipelineGather",
    "PipelineRelay",
    "PlannedCollective",
    "Route",
    "Shard",
    "ShardExchange",
    "ShardSum",
    "StageMessage",
    "Substitute",
    "Timestamp",
    "Transport",
    "TransportBytes",
    "agreement_seconds",
    "align_size",
    "all_gather_pickled",
    "allocate_bytes",
    "any_over_ranks",
    "assemble_on_all_ranks",
    "assemble_on_stage",
    "await_value",
    "broadcast_copies",
    "broadcast_from_first",
    "broadcast_in_buckets",
    "broadcast_items",
    "broadcast_object",
    "broadcast_package",
    "buffer_pool",
    "check_shard",
    "checksum",
    "choose_exchange",
    "combine_replicas",
    "enter",
    "equal_over_ranks",
    "exchange_tensors",
    "exit",
    "find_differing_axes",
    "follow_replaced_gradient",
    "gather_along",
    "gather_distinct",
    "gather_full",
    "gather_numbers_to_first",
    "gather_objects",
    "gather_reports",
    "gather_to_leader",
    "gather_up_pipeline",
    "global_rank",
    "guard_collective",
    "is_leader",
    "is_leader_for",
    "join_flat_parts",
    "join_sum",
    "max_over_ranks",
    "meter",
    "note_open",
    "open_transports",
    "pack_values",
    "plan_exchange",
    "plan_full_gather",
    "plan_read",
    "plan_result_broadcast",
    "raise_broken",
    "replica_mesh",
    "require_gradient",
    "run_beside",
    "run_or_raise_on_all",
    "running_transform",
    "send_from_stage",
    "store_value",
    "sum_along",
    "sum_over_ranks",
    "takes_part",
    "unpack_values",
    "weak_hook",
]
