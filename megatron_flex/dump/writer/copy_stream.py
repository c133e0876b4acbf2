"""Copies from a GPU to pinned memory, on a stream of their own, while the model runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class CopyStream:
    """A stream of a device, on which tensors go to pinned memory.

    Args:
        device: of the tensors.
        module: torch's module for the kind of device, such as `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = module or torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def copy(self, host: Tensor, tensor: Tensor, owned: bool) -> None:
        """Begin to copy; the model may overwrite `tensor` at once, unless the caller `owned` it alone.

        Args:
            host: of the same shape and dtype, in pinned memory; not to be read before `mark`'s event.
            tensor: on the device, ready on the current stream.
            owned: nothing else writes to it.
        """
        source = tensor.contiguous() if owned else tensor.clone(memory_format=torch.contiguous_format)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # its memory is free for others only after the copy

    def mark(self) -> CopyMark:
        """A mark that is reached when all copies that have begun have ended."""
        event = self.module.Event()
        event.record(self.stream)
        return CopyMark(self.device, self.module, event)


class CopyMark(NamedTuple):
    """A moment of a device's stream: its device, torch's module for that kind of device, and the event."""

    device: torch.device
    module: Any
    event: Any

    def wait(self) -> None:
        """Wait until the moment is reached, in a thread that has no device of its own.

        A new thread's device is the first one: to wait there would make a context on the first GPU for every
        process of the node, about 0.5 GB each.
        """
        self.module.set_device(self.device)
        self.event.synchronize()
