"""Storage of captures: on the CPU, pinned or not, on the GPU, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from megatron_flex.compat.gone import refuse_gone

OutputDict = dict[str, list[Tensor]]


class BaseOffloadStrategy:
    """Gets every captured tensor, on the ranks that receive captures.

    Args:
        offload_fn: called with each tensor: detached, on the CPU, a separate copy.
    """

    def __init__(self, offload_fn: Callable[[Tensor], Any]) -> None:
        self.offload_fn = offload_fn

    @classmethod
    def initialize(cls, name: str, output_ptr: OutputDict) -> Self:
        """Create the strategy of one hook.

        Args:
            name: the hook's `module_name`.
            output_ptr: the dict that the FlexModel was given.
        """
        raise NotImplementedError(f"{cls.__name__} must implement initialize(name, output_ptr)")

    def execute(self, tensor: Tensor) -> None:
        """Keep one tensor."""
        self.offload_fn(tensor)


class NullMemoryOffloadStrategy(BaseOffloadStrategy):
    """Store nothing."""

    @classmethod
    def initialize(cls, name: str, output_ptr: OutputDict) -> Self:
        """Create one."""
        return cls(lambda tensor: None)


class CPUPinnedMemoryOffloadStrategy(BaseOffloadStrategy):
    """Append to `output_ptr[name]`, in pinned memory where there is a GPU."""

    @classmethod
    def initialize(cls, name: str, output_ptr: OutputDict) -> Self:
        """Create one."""
        pin = torch.cuda.is_available()
        return cls(lambda t: output_ptr.setdefault(name, []).append(t.pin_memory() if pin else t))


class CPUPagedMemoryOffloadStrategy(BaseOffloadStrategy):
    """Append to `output_ptr[name]`."""

    @classmethod
    def initialize(cls, name: str, output_ptr: OutputDict) -> Self:
        """Create one."""
        return cls(lambda t: output_ptr.setdefault(name, []).append(t))


class GPUMemoryOffloadStrategy(BaseOffloadStrategy):
    """Append to `output_ptr[name]` on the current GPU; on the CPU where there is none."""

    @classmethod
    def initialize(cls, name: str, output_ptr: OutputDict) -> Self:
        """Create one."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(lambda t: output_ptr.setdefault(name, []).append(t.to(device)))


__getattr__ = refuse_gone(__name__)
