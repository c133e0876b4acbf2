"""Estimates of what hooks send and hold and dumps write: of a configuration, or of a live session.

From a configuration alone, without weights, GPU or ranks:

from megatron_flex.estimate import Links, estimate_dump, estimate_hooks

estimate = estimate_dump(
    "config.yaml",  # or a mapping such as {"num_layers": 32, "hidden_size": 4096, ...}, or a list of flags
    ["decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"], world_size=1024,
    tokens=slice(None, None, 8), every=100, disk_bytes_per_second=20e9,
)
estimate.rows(); estimate.summary(); estimate.to_json(); estimate.bytes; estimate.most.rank; estimate.seconds

estimate = estimate_hooks(
    "config.yaml", read="decoder.layers.*@positions=-1", edit=["decoder.layers.9=scale=1.01"],
    world_size=1024, links=Links(gpus_per_node=8),
)
estimate.rows(); estimate.slowest.seconds; estimate.to_json()
"""

from typing import TYPE_CHECKING, Any

from megatron_flex.estimate.dump_estimate import DumpEstimate, RankDumpEstimate, SiteDumpEstimate
from megatron_flex.estimate.hook_estimate import (
    AddedCollective,
    Links,
    PassEstimate,
    Placement,
    Traffic,
    estimate_pass,
)
from megatron_flex.estimate.hook_notation import HookSpec, parse_edit_hook, parse_read_hook
from megatron_flex.estimate.run_estimate import HookEstimate, RankEstimate, RunEstimate, estimate_run
from megatron_flex.estimate.tensor_sizes import EstimatedTensor, TensorSizes

if TYPE_CHECKING:
    from megatron_flex.estimate.configuration import ConfiguredRun, estimate_dump, estimate_hooks
    from megatron_flex.estimate.megatron_arguments import RunConfig

__all__ = [
    "AddedCollective",
    "ConfiguredRun",
    "DumpEstimate",
    "EstimatedTensor",
    "HookEstimate",
    "HookSpec",
    "Links",
    "PassEstimate",
    "Placement",
    "RankDumpEstimate",
    "RankEstimate",
    "RunConfig",
    "RunEstimate",
    "SiteDumpEstimate",
    "TensorSizes",
    "Traffic",
    "estimate_dump",
    "estimate_hooks",
    "estimate_pass",
    "estimate_run",
    "parse_edit_hook",
    "parse_read_hook",
]


def __getattr__(name: str) -> Any:
    """Import what builds models on first use: the command line also reads hooks as text, for dumps."""
    if name in ("ConfiguredRun", "RunConfig", "estimate_dump", "estimate_hooks"):
        from megatron_flex.estimate import configuration

        return getattr(configuration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
