"""What a run would cost before it is started, from its configuration alone: no weights, no GPU, no ranks.

from megatron_flex.launch.planning import plan

costs = plan(
    "config.yaml",  # or a mapping such as {"num_layers": 32, "hidden_size": 4096, ...}, or a list of flags
    ["decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"],
    world_size=1024, tokens=slice(None, None, 8), every=100, disk_bytes_per_second=20e9,
)
for tensor, stages, shape, layout, of_a_rank, in_all in costs.rows(): ...
for name, value in costs.summary(): ...
costs.to_json(); costs.bytes; costs.most.rank; costs.seconds

And what hooks would cost: bytes over NVLink, network and PCIe, collectives, memory.

from megatron_flex.launch.planning import Links, costs

told = costs("config.yaml", read="decoder.layers.*@positions=-1", edit=["decoder.layers.9=scale=1.01"],
             world_size=1024, links=Links(gpus_per_node=8))
for row in told.rows(): ...
told.slowest.seconds; told.to_json()
"""

from megatron_flex.costs import HookEstimate, RunEstimate, Links, PlannedHook, RankEstimate, Traffic
from megatron_flex.dump.plan import DumpEstimate, RankDumpEstimate, SiteDumpEstimate
from megatron_flex.dump.words import format_bytes
from megatron_flex.launch.planning.hooked import costs
from megatron_flex.launch.planning.planning import plan

__all__ = [
    "HookEstimate",
    "RunEstimate",
    "Links",
    "DumpEstimate",
    "PlannedHook",
    "RankDumpEstimate",
    "SiteDumpEstimate",
    "RankEstimate",
    "Traffic",
    "costs",
    "format_bytes",
    "plan",
]
