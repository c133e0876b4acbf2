"""Models in fairscale's ShardedDataParallel: the gradient of each parameter is averaged on one rank only.

That rank is the one whose shard of the optimizer (`OSS`) contains the parameter. On the other ranks the
gradient is dropped, or is in a buffer whose contents are undefined after the reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters import data_parallel, dtensor_parameters
from megatron_flex.adapters.adapter_base import LocalGradient, Undo
from megatron_flex.adapters.module_names import (
    DEEPSPEED_ENGINE,
    SHARDED_DDP,
    is_deepspeed,
    is_fairscale_class,
    named_parameters,
)
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.parameter_storage import REDUCED_REMEDY, ModuleParameters
from megatron_flex.errors import FlexError, list_some
from megatron_flex.mesh import Mesh

DROPPED_GRADIENT = (
    "ShardedDataParallel over ranks {ranks} drops the gradient of a parameter that is in no bucket of its, "
    "as it compares a rank's number in its group with that in the job; give it a greater reduce_buffer_size "
    "(its default has room for all)"
)
OUT_OF_BUCKET = (
    "zero_grad(set_to_none=True), torch's default, has removed gradients from the buffer in which "
    "ShardedDataParallel reduces them, so that each rank keeps its own; clear them by the wrapper's "
    "zero_grad(), or the optimizer's zero_grad(set_to_none=False); reduced=False reads each rank's own"
)
UNREDUCED_GRADIENT = (
    "a rank that ShardedDataParallel does not reduce it to has a gradient of its own, from a backward pass "
    "in no_sync(), or of an earlier forward pass than the last one; run the last one outside of no_sync(), "
    "and the others in it"
)


def sharded_ddp_wrappers_of(chunk: nn.Module) -> list[Any]:
    """The ShardedDataParallel wrappers around a model or its parts, the outermost first."""
    return walk_modules(chunk).of_classes(lambda kind: is_fairscale_class(kind, SHARDED_DDP))


def check_sharded_ddp(wrappers: Sequence[Any], chunk: nn.Module, mesh: Mesh) -> None:
    """Refuse wrappers that do not fit the mesh, their optimizers, or other wrappers around the model.

    Raises:
        FlexError: on all ranks, since all of them have the same information.
    """
    for wrapper in wrappers:
        ranks = sorted(dist.get_process_group_ranks(wrapper._process_group))
        if ranks != sorted(mesh["dp"].ranks) and (len(ranks) > 1 or mesh["dp"].size > 1):
            raise FlexError(
                f"ShardedDataParallel is over ranks {ranks}, but with {mesh.describe()} this rank's data "
                f"parallel ones are {sorted(mesh['dp'].ranks)}; give it and its optimizer that process_group"
            )
        for optimizer in wrapper._sharded_optimizers:
            stepped = sorted(dist.get_process_group_ranks(optimizer.group))
            if stepped != ranks:
                raise FlexError(
                    f"ShardedDataParallel is over ranks {ranks} and its OSS optimizer over {stepped}, so "
                    "that gradients are not reduced where they are stepped; give both the same group"
                )
    engines = [m for m in chunk.modules() if is_deepspeed(m, DEEPSPEED_ENGINE)]
    others = [*engines, *data_parallel.ddp_wrappers_of(chunk), *data_parallel.fsdp_wrappers_of(chunk)]
    other = (
        type(others[0]).__name__ if others else "DTensors" if dtensor_parameters.has_dtensors(chunk) else ""
    )
    if other:
        raise FlexError(
            f"the model has {other} in or around fairscale's ShardedDataParallel, and how the two reduce "
            "gradients together is not known; use one of them"
        )


class GradientOwners:
    """The rank that owns the averaged gradient of each parameter, and whether the gradient is averaged yet.

    Args:
        wrappers: the wrappers around a model or its parts.
    """

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self.wrappers = wrappers

    def _of(self, parameter: nn.Parameter) -> tuple[Any, int] | None:
        """The wrapper that reduces a parameter's gradient, and the owner's rank in the wrapper's group."""
        for wrapper in self.wrappers:
            for optimizer in wrapper._sharded_optimizers:
                owner = optimizer._param_to_rank.get(parameter)
                if owner is not None:
                    return wrapper, int(owner)
        return None

    def left_out(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        """The names of trained parameters in no sharded optimizer; their gradients are not reduced."""
        return [n for n, p in named if p.requires_grad and self._of(p) is None]

    def reduced(self) -> bool | str:
        """True if the last backward pass averaged gradients; otherwise the reason why that is unknown.

        Depends only on state that is the same on all ranks.
        """
        buckets = [bucket for wrapper in self.wrappers for bucket in wrapper._bucket_list]
        if any(_left_bucket(bucket, parameter) for bucket in buckets for parameter in bucket._params):
            return OUT_OF_BUCKET
        for wrapper in self.wrappers:
            waiting = wrapper._grad_to_be_reduced
            if wrapper._should_accumulate_grads or (wrapper._accumulate_grads_flipped and any(waiting)):
                why = "the model last ran in ShardedDataParallel's no_sync(), which averages no gradients"
            elif not wrapper._grad_hooks and waiting:
                why = "the model last ran in evaluation mode, in which ShardedDataParallel averages nothing"
            elif waiting and all(waiting):
                why = "ShardedDataParallel has averaged no gradients since the model last ran"
            else:
                continue
            return f"{why}; {REDUCED_REMEDY}"
        return True

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The owner's averaged gradient if `reduced`, otherwise each rank's own gradient.

        Raises:
            FlexError: a rank that is not the owner still has an unreduced gradient, or the owner's gradient
                was dropped.
        """
        owned = self._of(parameter)
        if owned is None or not reduced:
            return LocalGradient(parameter.grad)
        wrapper, owner = owned
        group = wrapper._process_group
        if dist.get_world_size(group) == 1:
            return LocalGradient(parameter.grad)
        bucket = next((b for b in wrapper._bucket_list if id(parameter) in b._param_ids), None)
        bucketed, is_owner = bucket is not None, dist.get_rank(group) == owner
        if bucketed and _left_bucket(bucket, parameter):
            raise FlexError(OUT_OF_BUCKET)
        ranks = dist.get_process_group_ranks(group)
        if parameter.requires_grad and not bucketed and ranks != list(range(len(ranks))):
            raise FlexError(DROPPED_GRADIENT.format(ranks=ranks))
        if is_owner:
            return LocalGradient(parameter.grad, (0, parameter.numel()), group)
        if parameter.grad is not None and not bucketed and bool(parameter.grad.any()):
            raise FlexError(UNREDUCED_GRADIENT)
        return LocalGradient(None, (0, 0), group)

    def accumulates(self) -> bool:
        """Whether each rank accumulates its own gradients, as in `no_sync()`."""
        return any(w._should_accumulate_grads or w._accumulate_grads_flipped for w in self.wrappers)

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether this rank holds the averaged gradient of the parameter."""
        owned = self._of(parameter)
        return owned is None or dist.get_rank(owned[0]._process_group) == owned[1]

    def at_rest(self) -> Undo:
        """Hide frozen parameters from the wrappers, until the returned function is called.

        Otherwise the wrappers would rebuild their buckets and the optimizer's, and again after thawing.
        """
        before = [w._auto_refresh_trainable for w in self.wrappers]
        for wrapper in self.wrappers:
            wrapper._auto_refresh_trainable = False

        def undo() -> None:
            for wrapper, refreshes in zip(self.wrappers, before, strict=True):
                wrapper._auto_refresh_trainable = refreshes

        return undo


def _left_bucket(bucket: Any, parameter: nn.Parameter) -> bool:
    """Whether a gradient that the wrapper reduces in a bucket is no longer a view of the bucket."""
    grad = parameter.grad
    if grad is None:
        return False
    return bool(grad.untyped_storage().data_ptr() != bucket.buffer.untyped_storage().data_ptr())


class ShardedDDPParameters(ModuleParameters):
    """Parameters replicated on all ranks, whose gradients are averaged only on the rank that updates them.

    Args:
        root: the model without the wrappers around all of it.
        wrappers: the wrappers around the model or its parts.
    """

    name = SHARDED_DDP

    def __init__(self, root: nn.Module, wrappers: Sequence[Any]) -> None:
        super().__init__(root)
        self.owners = GradientOwners(wrappers)
        self.why = "it is in fairscale's ShardedDataParallel"
        self._before: bool | str | None = None  # the result of `reduced()` at freezing

    def reduced(self, called: bool = False) -> bool | str:
        """True after a backward pass outside `no_sync()`, if the optimizers contain all parameters."""
        if self._before is not None:
            return self._before
        if left_out := self.owners.left_out(named_parameters(self.root)):
            names = list_some(left_out, 1)
            return f"the optimizers of ShardedDataParallel leave out {names}; {REDUCED_REMEDY}"
        return self.owners.reduced()

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The owner's averaged gradient if `reduced`, otherwise each rank's own gradient."""
        return self.owners.gradient(parameter, reduced)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write the gradient on the owner, or on each rank where gradients are not averaged."""
        unaveraged = self.owners.accumulates() or (parameter.grad is not None and self.reduced() is not True)
        if unaveraged or self.owners.keeps(parameter):
            super().put_gradient(parameter, value, reduced)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off without a rebuild of the wrappers' buckets."""
        known = self.reduced()
        thaw = self.owners.at_rest()
        self._before = known
        unfreeze = super().freeze()

        def undo() -> None:
            unfreeze()
            thaw()
            self._before = None

        return undo
