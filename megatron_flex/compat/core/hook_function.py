"""HookFunction as it was: a place, a shape, an editing function and which tensor of an output is meant."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_flex.compat.distributed.offload_strategies import (
    BaseOffloadStrategy,
    CPUPinnedMemoryOffloadStrategy,
)
from megatron_flex.errors import HookError
from megatron_flex.runtime.hooks import EditingFunction, HookType

if TYPE_CHECKING:
    from megatron_flex.compat.distributed.state import ParallelState


def default_editing_function(
    current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict
) -> Tensor:
    """Return the tensor as it is: what a HookFunction without an editing function does."""
    return inputs


@dataclass(frozen=True)
class SharedState:
    """What all hooks of one FlexModel share.

    Attributes:
        fmps: ranks and groups.
        output_ptr: the person's dict.
        save_ctx: what editing functions keep from one call to another.
        modules: the trainable modules.
    """

    fmps: ParallelState
    output_ptr: dict[str, list[Tensor]]
    save_ctx: Namespace
    modules: nn.ModuleDict


class HookFunction:
    """What is wanted at one module, or at one parameter's gradient. It is registered once.

    Args:
        module_name: the module's or parameter's name, layers counted over the whole model; wrappers' prefixes
            (`module.`) may stand in front. It is the key of `output_ptr`.
        expected_shape: the whole's shape, None for a dim of any length. Checked, not needed. The batch dim
            may be that of one data parallel rank or of all.
        editing_function: `(current_module, inputs, save_ctx, modules) -> Tensor`, called by position, on the
            whole tensor; it returns one of the same shape. `current_module` is None for `register_hook`.
        unpack_idx: which tensor of an output with several, depth first; None and numbers do not count.

    Attributes:
        offload_strategy: where what is read is kept; may be set until the first tensor comes.
    """

    def __init__(
        self,
        module_name: str,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int = 0,
    ) -> None:
        if not isinstance(module_name, str) or any(c in module_name for c in "*?["):
            raise HookError(
                f"module_name {module_name!r} must be one module's name; create_hook_group() makes a hook "
                "for each of many"
            )
        self.module_name = module_name
        self.expected_shape = None if expected_shape is None else tuple(expected_shape)
        self.editing_function: EditingFunction = editing_function or default_editing_function
        self.unpack_idx = unpack_idx
        self.offload_strategy: BaseOffloadStrategy | type[BaseOffloadStrategy] = (
            CPUPinnedMemoryOffloadStrategy
        )
        self._shared_state: SharedState | None = None
        self._hook_type: HookType | None = None

    @property
    def edits(self) -> bool:
        """Whether a person's function is to be run."""
        return self.editing_function is not default_editing_function

    def keep(self, tensor: Tensor, output_ptr: dict[str, list[Tensor]]) -> None:
        """Hand one tensor that was read to the offload strategy."""
        if isinstance(self.offload_strategy, type):
            self.offload_strategy = self.offload_strategy.initialize(self.module_name, output_ptr)
        self.offload_strategy.execute(tensor)
