"""Collectives: gather and scatter of a Layout over a Mesh. The one caller of data collectives.

`gather_whole` and `scatter_whole` are differentiable and conjugate to each other, and so are `gather_rows`
and `scatter_rows` for experts' rows along a `Route`; between `towards_leader` and `from_leader` one rank
computes for all; `combine` adds up what ranks contribute to replicas; `send_to_leader` and
`send_up_pipeline` bring what was read to one rank, a `Board` without a collective within a node; a `Relay`
passes values on from stage to stage;
`Agreement` keeps the ranks' hooks equal.
"""

from megatron_flex.collectives.adding import Adding, Posted
from megatron_flex.collectives.along import exchange, gather_along, given_to_all
from megatron_flex.collectives.combining import SAMPLE, combine, make_equal, summed
from megatron_flex.collectives.edit import (
    all_assemble,
    from_leader,
    gather_whole,
    replicas,
    scatter_whole,
    spread,
    towards_leader,
)
from megatron_flex.collectives.everywhere import to_all
from megatron_flex.collectives.messages import stride
from megatron_flex.collectives.meter import Moved, Stamp, meter
from megatron_flex.collectives.plan import Planned, plan_lead, plan_whole
from megatron_flex.collectives.recipes import gradient_of
from megatron_flex.collectives.relay import Message, Relay, pack, share, unpack
from megatron_flex.collectives.routes import Dispatch, Route, gather_rows, scatter_rows
from megatron_flex.collectives.send import (
    Parcel,
    Sending,
    Step,
    is_leader,
    leads,
    plan_read,
    send_to_leader,
    send_up_pipeline,
    takes_part,
)
from megatron_flex.collectives.shard import Shard
from megatron_flex.collectives.shared import Board, join
from megatron_flex.collectives.single import (
    checksum,
    differing,
    joined,
    whole_from_stage,
    whole_on_stage,
)
from megatron_flex.collectives.staging import fresh, staging
from megatron_flex.collectives.talk import Agreement, any_rank, everyone, find, leave

__all__ = [
    "SAMPLE",
    "Adding",
    "Agreement",
    "Board",
    "Dispatch",
    "Message",
    "Moved",
    "Parcel",
    "Planned",
    "Posted",
    "Relay",
    "Route",
    "Sending",
    "Shard",
    "Stamp",
    "Step",
    "all_assemble",
    "any_rank",
    "checksum",
    "combine",
    "differing",
    "everyone",
    "exchange",
    "find",
    "fresh",
    "from_leader",
    "gather_along",
    "gather_rows",
    "gather_whole",
    "given_to_all",
    "gradient_of",
    "is_leader",
    "join",
    "joined",
    "leads",
    "leave",
    "make_equal",
    "meter",
    "pack",
    "plan_lead",
    "plan_read",
    "plan_whole",
    "replicas",
    "scatter_rows",
    "scatter_whole",
    "send_to_leader",
    "send_up_pipeline",
    "share",
    "spread",
    "staging",
    "stride",
    "summed",
    "takes_part",
    "to_all",
    "towards_leader",
    "unpack",
    "whole_from_stage",
    "whole_on_stage",
]
