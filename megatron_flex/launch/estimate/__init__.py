"""Estimates of a run before its start, from its configuration alone: without weights, GPU or ranks.

from megatron_flex.launch.estimate import estimate_dump

estimate = estimate_dump(
    "config.yaml",  # or a mapping such as {"num_layers": 32, "hidden_size": 4096, ...}, or a list of flags
    ["decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"], world_size=1024,
    tokens=slice(None, None, 8), every=100, disk_bytes_per_second=20e9,
) for tensor, stages, shape, layout, of_a_rank, in_all in estimate.rows(): ... for name, value in
estimate.summary(): ... estimate.to_json(); estimate.bytes; estimate.most.rank; estimate.seconds

The cost of hooks: bytes over NVLink, network and PCIe, collectives, memory.

from megatron_flex.launch.estimate import Links, estimate_hooks

estimate = estimate_hooks(
    "config.yaml", read="decoder.layers.*@positions=-1", edit=["decoder.layers.9=scale=1.01"],
    world_size=1024, links=Links(gpus_per_node=8),
) for row in estimate.rows(): ... estimate.slowest.seconds; estimate.to_json()
"""

from megatron_flex.dump.size_estimate import DumpEstimate, RankDumpEstimate, SiteDumpEstimate
from megatron_flex.estimate import HookEstimate, HookSpec, Links, RankEstimate, RunEstimate, Traffic
from megatron_flex.launch.estimate.estimates import estimate_dump, estimate_hooks
from megatron_flex.progress import format_bytes

__all__ = [
    "DumpEstimate",
    "HookEstimate",
    "HookSpec",
    "Links",
    "RankDumpEstimate",
    "RankEstimate",
    "RunEstimate",
    "SiteDumpEstimate",
    "Traffic",
    "estimate_dump",
    "estimate_hooks",
    "format_bytes",
]
