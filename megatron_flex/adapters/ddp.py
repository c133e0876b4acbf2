"""Models in torch's DistributedDataParallel: all parameters on each rank, gradients averaged as they come."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.parameter_storage import SAY_REDUCED, ModuleParameters
from megatron_flex.adapters.module_names import named_parameters
from megatron_flex.errors import FlexError


def ddp_wrappers_of(chunk: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers around a model or parts of it, the outermost first."""
    return [m for m in chunk.modules() if isinstance(m, DistributedDataParallel)]


class DDPParameters(ModuleParameters):
    """Each rank has all of its parameters, and wrappers average their gradients in the backward pass."""

    name = "DistributedDataParallel"

    def __init__(self, root: nn.Module, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().__init__(root)
        self.wrappers = wrappers
        self.why = "it is in torch's DistributedDataParallel"
        self._before: bool | str | None = None  # what was known when it was frozen
        self.scheduled = False  # a pipeline schedule averages with the last microbatch of each step

    def reduced(self) -> bool | str | None:
        """True behind a backward pass outside of `no_sync()`, if the wrappers have all parameters."""
        if self._before is not None:
            return self._before
        left = self._left_out()
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            return f"DistributedDataParallel leaves out {left[0]}{more}; {SAY_REDUCED}"
        return True if self.scheduled else all_synchronized(self.wrappers)

    def _left_out(self) -> list[str]:
        """The trained parameters that no wrapper averages."""
        averaged = {
            p
            for w in self.wrappers
            for n, p in w.module.named_parameters(remove_duplicate=False)
            if n not in w.parameters_to_ignore
        }
        return [n for n, p in named_parameters(self.root) if p.requires_grad and p not in averaged]

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and let the wrappers wait for no gradient, as in `no_sync()`.

        Raises:
            FlexError: a wrapper would take this for the way in which its graph always runs.
        """
        known = self.reduced()
        thaw = suspend_reduction(self.wrappers)
        self._before = known
        unfreeze = super().freeze()

        def undo() -> None:
            thaw()
            unfreeze()
            self._before = None

        return undo


def suspend_reduction(wrappers: Sequence[DistributedDataParallel]) -> Undo:
    """Let wrappers wait for no gradient, as in `no_sync()`, until the returned function is called.

    Raises:
        FlexError: a wrapper would take this for the way in which its graph always runs.
    """
    for wrapper in wrappers:
        if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
            raise FlexError(
                "DistributedDataParallel(static_graph=True) learns from its first step which gradients "
                "come, so that this cannot be one without any; train one step before freezing"
            )
    before = [(w.require_backward_grad_sync, w.require_forward_param_sync) for w in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False

    def undo() -> None:
        for wrapper, (backward, forward) in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward

    return undo


def all_synchronized(wrappers: Sequence[DistributedDataParallel]) -> bool | str:
    """True if the last backward pass averaged all gradients; in words why that is not known."""
    # A forward pass leaves behind whether its backward pass averages.
    if all(w.require_backward_grad_sync and w.require_forward_param_sync for w in wrappers):
        return True
    return (
        "the model last ran in DistributedDataParallel's no_sync(), which averages no gradients; "
        f"{SAY_REDUCED}"
    )
