"""The storage of parameters' gradients in Megatron, their reduction, and pending changes of parameters.

Also freezing all parameters, in Megatron's wrappers and under its recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import LocalGradient, NormListener, Undo
from megatron_flex.adapters.data_parallel import all_synchronized, ddp_wrappers_of
from megatron_flex.adapters.megatron_core.model_parts import config_of, parts_of
from megatron_flex.adapters.megatron_core.module_classes import is_megatron_class
from megatron_flex.adapters.megatron_core.optimizer_steps import watch_optimizer_steps
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.taps import add_hook
from megatron_flex.errors import FlexError

REDUCED_REMEDY = "pass reduced=True after finalize_model_grads(), reduced=False before it"


class MegatronParameters:
    """The parameters and gradients of one model, with the DistributedDataParallel around its chunks, if any.

    Attributes:
        wrappers: Megatron's DistributedDataParallel wrappers.
        torchs: torch's DistributedDataParallel wrappers.
    """

    name = "the chunks"
    why = "Megatron's optimizer keeps what it shards, and gathers parameters before the model runs"

    def __init__(self, chunks: list[nn.Module], roots: list[Any]) -> None:
        self._roots, self.config = roots, config_of(roots[0])
        self.wrappers: list[Any] = [w for c in chunks for w in walk_modules(c).of_classes(_is_ddp)]
        self.torchs = [w for chunk in chunks for w in ddp_wrappers_of(chunk)]
        self._by_parameter = {p: w for w in self.wrappers for p in w.parameters()}

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """None: parameters are not sharded over data parallel ranks while the model does not run."""
        return {}

    def value(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)

    def wait_until_ready(self) -> None:
        """Finish the gathering that the distributed optimizer defers to the next forward pass."""
        for wrapper in self.wrappers:
            if wrapper.ddp_config.overlap_param_gather:
                wrapper.start_param_sync(force_sync=True)

    def reduced(self, called: bool = False) -> bool | str:
        """True if the schedule finalizes gradients, False if nothing can, text if only the user knows."""
        if self.torchs:
            return self._reduced_by_torch()
        if not self.wrappers:
            return False
        if self.config.finalize_model_grads_func is None:
            return f"no finalize_model_grads_func is set; {REDUCED_REMEDY}"
        return f"the model ran outside the schedule; {REDUCED_REMEDY}" if called else True

    @contextmanager
    def finalization(self) -> Iterator[None]:
        """Let a schedule finalize gradients in this block, without the scale of an optimizer's loss.

        Megatron's `finalize_model_grads` does so where the user has set no function and chunks are wrapped.
        """
        finalize = None
        if self.wrappers:
            from megatron.core.distributed import finalize_model_grads

            finalize = self.config.finalize_model_grads_func or finalize_model_grads
        undos = [
            _set_attribute(self.config, "finalize_model_grads_func", finalize),
            _set_attribute(self.config, "grad_scale_func", None),
        ]
        try:
            yield
        finally:
            _undo_all(undos)

    @contextmanager
    def activations_only(self) -> Iterator[None]:
        """Let a schedule differentiate activations alone: no parameter gets a gradient."""
        unset = ("finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func")
        undos = [_set_attribute(self.config, name, None) for name in unset]
        undos.append(_set_attribute(self.config, "calculate_per_token_loss", False))
        undos.append(self.freeze())
        try:
            yield
        finally:
            _undo_all(undos)

    def _reduced_by_torch(self) -> bool | str:
        """`reduced` where torch's wrapper averages over data parallel ranks, and nothing else is reduced."""
        config = self.config
        if getattr(config, "sequence_parallel", False) or config.pipeline_model_parallel_size > 1:
            return (
                "torch's DistributedDataParallel leaves what finalize_model_grads() does over tensor and "
                f"pipeline parallel ranks undone; {REDUCED_REMEDY}"
            )
        return all_synchronized(self.torchs)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write to the tensor that `gradient` returns."""
        target = self.gradient(parameter, reduced).tensor
        if target is None:
            target = parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            target.copy_(value)

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Trace the steps of Megatron's optimizers."""
        return watch_optimizer_steps(self._roots, listener)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and make DistributedDataParallel wait for no gradient."""
        undos = [_set_attribute(p, "requires_grad", False) for root in self._roots for p in root.parameters()]
        # Read of all wrappers before any is changed: they may share one config.
        overlapped = [bool(w.ddp_config.overlap_grad_reduce) for w in self.wrappers]
        for wrapper, waits in zip(self.wrappers, overlapped, strict=True):
            undos += _suspend_wrapper(wrapper, waits)
        return lambda: _undo_all(undos)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """`main_grad` where Megatron keeps it, `grad` otherwise.

        The distributed optimizer reduces only a part of it on each rank.
        """
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
                "overlap_grad_reduce=True reduces gradients during the backward pass; read reduced ones, "
                "or turn it off"
            )
        if reduced and getattr(group, "grad_reduce_handle", None) is not None:
            raise FlexError("a reduction of gradients is under way; call finalize_model_grads() first")
        if not reduced or not settings.use_distributed_optimizer:
            return local
        part = _reduced_range(parameter, wrapper, group)
        return LocalGradient(local.tensor, part, group.intra_distributed_optimizer_instance_group)


def _is_ddp(kind: type) -> bool:
    return is_megatron_class(kind, "DistributedDataParallel")


def _reduced_range(parameter: nn.Parameter, wrapper: Any, group: Any) -> tuple[int, int]:
    """The part of a parameter within the shard of its bucket that this rank reduces."""
    for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
        if parameter in buffer.param_index_map:
            start, stop, number = buffer.param_index_map[parameter]
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
            low = bucket.offset + group.intra_distributed_optimizer_instance_rank * length
            low, high = max(low, start), min(low + length, stop)
            return (low - start, high - start) if low < high else (0, 0)
    raise FlexError("a parameter is in no buffer of its DistributedDataParallel; wrap the model again")


def _suspend_wrapper(wrapper: Any, waits: bool) -> list[Undo]:
    """Make a wrapper neither wait for gradients nor gather parameters, which do not change."""
    undos: list[Undo] = []
    if waits:
        groups = [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups]
        for group in groups:
            group.reset()
        if all(hasattr(group, "is_first_batch") for group in groups):
            # As in a first batch, in which the wrapper does not know yet which gradients come.
            undos += [_set_attribute(group, "is_first_batch", True) for group in groups]
        else:
            # Megatron-core before 0.16 waits for a reduction that the last gradient would have started.
            undos.append(_set_attribute(wrapper.ddp_config, "overlap_grad_reduce", False))
            undos.append(_set_attribute(wrapper.config, "grad_sync_func", None))
    if wrapper.ddp_config.overlap_param_gather:
        wrapper.start_param_sync(force_sync=True)
        # Its hooks ignore parameters that are in no bucket, and require that the others are trained.
        undos.append(_set_attribute(wrapper, "param_to_bucket_group", {}))
        undos.append(_set_attribute(wrapper.config, "param_sync_func", None))
    return undos


def _set_attribute(owner: Any, name: str, value: Any) -> Undo:
    before: Any = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def open_recomputed_regions(roots: list[nn.Module]) -> Undo:
    """Make the input of the layers require a gradient, even where the embedding is frozen.

    Megatron's recomputed regions propagate gradients only if their inputs require them; trained ones inside
    would get none. Inputs from another pipeline stage require them anyway.
    """
    undos = []
    for part in (part for root in roots for part in parts_of(root)):
        config: Any = part.module.config
        embedding = getattr(part.module, "embedding", None)
        if config.recompute_granularity is not None and isinstance(embedding, nn.Module):
            undos.append(add_hook(embedding, _require_gradient))
    return lambda: _undo_all(undos)


def _require_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    opens = isinstance(output, Tensor) and torch.is_grad_enabled() and output.is_floating_point()
    return output.detach().requires_grad_() if opens and not output.requires_grad else output


def _undo_all(undos: list[Callable[[], None]]) -> None:
    for undo in reversed(undos):
        undo()
