"""torch.distributed.pipelining: a model whose stages a schedule runs, one on each rank or several."""

from megatron_flex.adapters.pipelining.staged import Staged, take
from megatron_flex.adapters.pipelining.stages import Stages, opened

__all__ = ["Staged", "Stages", "opened", "take"]
