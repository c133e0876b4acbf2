"""Copies from a GPU to the host, while the model computes. Not run on a GPU yet.

What is read is copied on the device first, on the stream that made it: frameworks overwrite many tensors in
place. A stream of its own then brings that copy to the host: straight to shared memory, into pages that are
registered with the driver, or to other memory by way of pinned buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives.transport.segments import Segment

DEVICE_TO_HOST = 2  # cudaMemcpyDeviceToHost


class DeviceCopies:
    """The copies of one device that are under way."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._registered: dict[int, Segment] = {}
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._busy = False

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], segment: Segment | None = None, owned: bool = False
    ) -> None:
        """Begin to copy tensors of the device.

        Args:
            pairs: targets, which are not to be read before `finish`, and tensors.
            segment: the shared memory that the targets are in; None: they are in memory of this process.
            owned: nothing else writes to the tensors.
        """
        self._busy = True
        if segment is not None:
            self._register(segment)
        for target, source in pairs:
            kept = source.clone() if source.is_contiguous() and not owned else source.contiguous()
            self._stream.wait_stream(torch.cuda.current_stream(kept.device))
            with torch.cuda.stream(self._stream):
                if segment is not None and target.is_contiguous():
                    target.copy_(kept, non_blocking=True)
                elif segment is None or not _copy_pitched(target, kept, self._stream.cuda_stream):
                    stage = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
                    stage.copy_(kept, non_blocking=True)
                    self._staged.append((target, stage))
            kept.record_stream(self._stream)  # its memory is not used again before the copy has ended

    def finish(self) -> None:
        """Wait for all of them."""
        if not self._busy:
            return
        self._busy = False
        self._stream.synchronize()
        for target, stage in self._staged:
            target.copy_(stage)
        self._staged.clear()

    def keep(self, segments: Iterable[Segment]) -> None:
        """Release memory that is not among `segments` any more."""
        addresses = {s.address for s in segments}
        for address in [a for a in self._registered if a not in addresses]:
            torch.cuda.cudart().cudaHostUnregister(address)
            del self._registered[address]

    def close(self) -> None:
        """Wait, and release all memory."""
        self.finish()
        self.keep([])

    def _register(self, segment: Segment) -> None:
        if segment.address not in self._registered:
            # If the driver refuses, copies are slower, and still correct.
            torch.cuda.cudart().cudaHostRegister(segment.address, segment.size, 0)
            self._registered[segment.address] = segment


def _copy_pitched(target: Tensor, source: Tensor, stream: int) -> bool:
    """Copy rows with even spacing in `target`; False if it is uneven, or the driver's call is missing."""
    rows = _even_rows(target)
    call = _load_memcpy()
    if rows is None or call is None:
        return False
    height, width, pitch = rows
    size = target.element_size()
    arguments: list[Any] = [ctypes.c_void_p(target.data_ptr()), ctypes.c_size_t(pitch * size)]
    arguments += [ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(width * size)]
    arguments += [ctypes.c_size_t(width * size), ctypes.c_size_t(height)]
    return int(call(*arguments, ctypes.c_int(DEVICE_TO_HOST), ctypes.c_void_p(stream))) == 0


def _even_rows(target: Tensor) -> tuple[int, int, int] | None:
    """Number of rows, entries in a row, entries from one row to the next; None if it is not such."""
    width, dims = 1, list(zip(target.shape, target.stride(), strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == width):
        width *= dims.pop()[0]
    dims = [d for d in dims if d[0] != 1]
    if not dims:
        return 1, width, width
    height, pitch = dims.pop()
    for length, stride in reversed(dims):
        if stride != pitch * height:
            return None
        height *= length
    return height, width, pitch


def _load_memcpy() -> Any:
    # Whichever runtime torch has loaded already; it is not looked for on disk.
    try:
        call = ctypes.CDLL(None).cudaMemcpy2DAsync
    except (OSError, AttributeError):
        call = None
    if call is None:
        major = (torch.version.cuda or "0").partition(".")[0]
        try:
            call = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpy2DAsync
        except (OSError, AttributeError):
            return None
    call.restype = ctypes.c_int
    return call
