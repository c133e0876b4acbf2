"""What a run would cost before it is started, from its configuration alone: no weights, no GPU, no ranks.

>>> from megatron_flex.launch.planning import plan
>>> costs = plan("config.yaml", ["decoder.layers.*.mlp.linear_fc1"], world_size=16384)  # doctest: +SKIP
>>> costs.bytes, costs.most.bytes, costs.files  # doctest: +SKIP
"""

from megatron_flex.dump.plan import Plan, PlannedRank, PlannedSite, in_bytes
from megatron_flex.launch.planning.planning import plan

__all__ = ["Plan", "PlannedRank", "PlannedSite", "in_bytes", "plan"]
