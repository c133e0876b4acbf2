"""The parameters and buffers of a session's model, gathered and set by global name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.errors import HookError
from megatron_flex.runtime.full_parameters import (
    ParameterIndex,
    ParameterRequest,
    gather_all_parameters,
    gather_parameter,
    set_parameter,
)


class SessionParameters:
    """Gathers and sets full parameters. Collective. `FlexModel` documents each method.

    Args:
        index: the parameters.
        buffers: the buffers that all ranks hold alike.
        check_open: raises once the model is restored.
    """

    def __init__(
        self, index: ParameterIndex, buffers: ParameterIndex, check_open: Callable[[], None]
    ) -> None:
        self.index, self.buffers, self._check_open = index, buffers, check_open
        self._alone_in_loop = False  # whether this rank runs the body of a loop that other ranks have empty

    def get(self, name: str, shape: Sequence[int | None] | None, want: ParameterRequest) -> Tensor | None:
        """Return the full tensor of one parameter or buffer, or of a gradient."""
        self._check_loop(name)
        return gather_parameter(self._find_index(name), name, want, shape)

    def set(self, name: str, value: Tensor | None, want: ParameterRequest, optimizer: Any) -> None:
        """Set all shards of one parameter or buffer, or of a gradient, from a full tensor."""
        self._check_open()
        self._check_loop(name)
        set_parameter(self._find_index(name), name, value, want, optimizer)

    def named(self, want: ParameterRequest) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the full tensors of all parameters, or of their gradients, in model order."""
        shared = any(axis.size > 1 for axis in self.index.adapter.mesh if axis.name != "dp")
        for name, full in gather_all_parameters(self.index, want):
            self._alone_in_loop = shared and not want.everywhere
            try:
                yield name, full
            finally:
                self._alone_in_loop = False

    @property
    def without_layout(self) -> dict[str, str]:
        """The parameters that no layout describes, with the classes of their modules."""
        return dict(self.index.unknown)

    def _check_loop(self, name: str) -> None:
        """Raise where the other ranks are in the next gather of the loop, and would never come here."""
        if self._alone_in_loop:
            raise HookError(
                f"{name!r} is read or set inside a loop over named_full_parameters(), which is empty on the "
                "ranks that receive nothing, so that this rank would wait for them; give the loop "
                "everywhere=True, or read and set parameters after the loop"
            )

    def _find_index(self, name: str) -> ParameterIndex:
        return self.buffers if name in self.buffers.sites else self.index
