"""Collectives: gather and scatter of a Layout over a Mesh. The one caller of data collectives.

`gather_whole` and `scatter_whole` are differentiable and conjugate to each other, and so are `gather_rows`
and `scatter_rows` for experts' rows along a `Route`; between `towards_leader` and `from_leader` one rank
computes for all; `send_to_leader` and `send_up_pipeline` bring what was
read to one rank; `Agreement` keeps the ranks' hooks equal.
"""

from megatron_flex.collectives.edit import (
    all_assemble,
    from_leader,
    gather_whole,
    scatter_whole,
    spread,
    towards_leader,
)
from megatron_flex.collectives.routes import Dispatch, Route, gather_rows, scatter_rows
from megatron_flex.collectives.send import (
    Parcel,
    Step,
    is_leader,
    plan_read,
    send_to_leader,
    send_up_pipeline,
    takes_part,
)
from megatron_flex.collectives.single import (
    checksum,
    differing,
    joined,
    whole_from_stage,
    whole_on_stage,
)
from megatron_flex.collectives.talk import Agreement, any_rank, everyone

__all__ = [
    "Agreement",
    "Dispatch",
    "Parcel",
    "Route",
    "Step",
    "all_assemble",
    "any_rank",
    "checksum",
    "differing",
    "everyone",
    "from_leader",
    "gather_rows",
    "gather_whole",
    "is_leader",
    "joined",
    "plan_read",
    "scatter_rows",
    "scatter_whole",
    "send_to_leader",
    "send_up_pipeline",
    "spread",
    "takes_part",
    "towards_leader",
    "whole_from_stage",
    "whole_on_stage",
]
