"""torch.distributed.pipelining: a model whose stages a schedule runs, one on each rank or several."""

from megatron_flex.adapters.pipelining.staged import PipelineAdapter, make_pipeline_adapter
from megatron_flex.adapters.pipelining.stages import StageModules, opened

__all__ = ["PipelineAdapter", "StageModules", "opened", "make_pipeline_adapter"]
