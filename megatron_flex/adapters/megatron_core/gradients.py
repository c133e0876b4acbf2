"""Where Megatron keeps a parameter's gradient, how far it is reduced, and whether parameters are at rest."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.base import LocalGradient
from megatron_flex.adapters.ddp import all_synchronized
from megatron_flex.adapters.megatron_core.module_classes import MODEL_CLASSES, is_megatron
from megatron_flex.errors import FlexError

SAY_WHICH = "say reduced=True behind finalize_model_grads(), reduced=False before it"


class MegatronGradients:
    """The gradients of one model, with the DistributedDataParallel around its chunks, if there is one.

    Attributes:
        wrappers: Megatron's own.
        torchs: torch's.
    """

    def __init__(self, chunks: list[nn.Module], roots: list[Any]) -> None:
        self.config: Any = roots[0].config
        self.wrappers = [w for chunk in chunks if (w := _ddp_wrapper(chunk)) is not None]
        self.torchs = [m for c in chunks for m in c.modules() if isinstance(m, DistributedDataParallel)]
        self._by_parameter = {p: w for w in self.wrappers for p in w.parameters()}

    def gather_parameters(self) -> None:
        """Complete the gathering that the distributed optimizer leaves to the next forward pass."""
        for wrapper in self.wrappers:
            if wrapper.ddp_config.overlap_param_gather:
                wrapper.start_param_sync(force_sync=True)

    def reduced(self, called: bool) -> bool | str:
        """True where the schedule finalizes gradients, False where nothing can, words if a person might."""
        if self.torchs:
            return self._reduced_by_torch()
        if not self.wrappers:
            return False
        if self.config.finalize_model_grads_func is None:
            return f"no finalize_model_grads_func is set; {SAY_WHICH}"
        return f"the model ran outside the schedule; {SAY_WHICH}" if called else True

    def _reduced_by_torch(self) -> bool | str:
        """Likewise where torch's own wrapper averages over data parallel ranks, and does no more."""
        config = self.config
        if getattr(config, "sequence_parallel", False) or config.pipeline_model_parallel_size > 1:
            return (
                "torch's DistributedDataParallel leaves what finalize_model_grads() does over tensor and "
                f"pipeline parallel ranks undone; {SAY_WHICH}"
            )
        return all_synchronized(self.torchs)

    def of(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """A parameter's gradient; the distributed optimizer reduces only a part of it on each rank."""
        main = getattr(parameter, "main_grad", None)
        local = LocalGradient(parameter.grad if main is None else main)
        wrapper = self._by_parameter.get(parameter)
        if wrapper is None:
            if main is not None and reduced:
                raise FlexError(
                    "DistributedDataParallel keeps the gradients and was not given; make the FlexModel of "
                    "the wrapped chunks"
                )
            return local
        settings, groups = wrapper.ddp_config, wrapper.param_to_bucket_group
        if parameter not in groups:
            return local  # frozen when it was wrapped
        group = groups[parameter]
        if not reduced and settings.overlap_grad_reduce:
            raise FlexError(
                "overlap_grad_reduce=True reduces gradients during the backward pass; ask for reduced ones, "
                "or turn it off"
            )
        if reduced and getattr(group, "grad_reduce_handle", None) is not None:
            raise FlexError("a reduction of gradients is under way; call finalize_model_grads() first")
        if not reduced or not settings.use_distributed_optimizer:
            return local
        part = _reduced_range(parameter, wrapper, group)
        return LocalGradient(local.tensor, part, group.intra_distributed_optimizer_instance_group)


def _ddp_wrapper(chunk: Any) -> Any:
    while not is_megatron(chunk, *MODEL_CLASSES):
        if is_megatron(chunk, "DistributedDataParallel"):
            return chunk
        chunk = chunk.module
    return None


def _reduced_range(parameter: nn.Parameter, wrapper: Any, group: Any) -> tuple[int, int]:
    """What of a parameter lies in the shard of its bucket that this rank reduces: reduce-scatter's share."""
    for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
        if parameter in buffer.param_index_map:
            start, stop, number = buffer.param_index_map[parameter]
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
            low = bucket.offset + group.intra_distributed_optimizer_instance_rank * length
            low, high = max(low, start), min(low + length, stop)
            return (low - start, high - start) if low < high else (0, 0)
    raise FlexError("a parameter is in no buffer of its DistributedDataParallel; wrap the model anew")
