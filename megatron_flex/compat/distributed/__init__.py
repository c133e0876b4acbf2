"""Ranks and groups of one model, and collectives along them."""

from megatron_flex.compat.distributed.distributed_state import ParallelState, initialize_distributed_state
from megatron_flex.compat.distributed.mappings import (
    all_gather_data_parallel,
    all_gather_tensor_parallel,
    batch_isend_irecv_pipeline_parallel,
    broadcast_data_parallel,
    broadcast_tensor_parallel,
    gather_pipeline_parallel_tensor_dicts,
    scatter_data_parallel,
    scatter_tensor_parallel,
    unity,
)
from megatron_flex.compat.distributed.strategies import (
    BaseOffloadStrategy,
    CPUPagedMemoryOffloadStrategy,
    CPUPinnedMemoryOffloadStrategy,
    GPUMemoryOffloadStrategy,
    NullMemoryOffloadStrategy,
)
from megatron_flex.compat.gone import refuse_gone

__all__ = [
    "BaseOffloadStrategy",
    "CPUPagedMemoryOffloadStrategy",
    "CPUPinnedMemoryOffloadStrategy",
    "GPUMemoryOffloadStrategy",
    "NullMemoryOffloadStrategy",
    "ParallelState",
    "all_gather_data_parallel",
    "all_gather_tensor_parallel",
    "batch_isend_irecv_pipeline_parallel",
    "broadcast_data_parallel",
    "broadcast_tensor_parallel",
    "gather_pipeline_parallel_tensor_dicts",
    "initialize_distributed_state",
    "scatter_data_parallel",
    "scatter_tensor_parallel",
    "unity",
]

__getattr__ = refuse_gone(__name__)
