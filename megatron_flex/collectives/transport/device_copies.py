"""Copies from a GPU to the host, while the model computes. Not run on a GPU yet.

What is read is copied on the device first, on the stream that made it: frameworks overwrite many tensors in
place. A stream of its own then brings those copies to the host, several at a time: straight to shared memory,
into pages that are registered with the driver, or to other memory by way of pinned buffers.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives.transport.segments import Segment
from megatron_flex.errors import FlexWarning

DEVICE_TO_HOST = 2  # cudaMemcpyDeviceToHost
BATCH_BYTES = 8 << 20  # of copies that begin together: each begin waits for the streams that made the tensors


class HostCopy(NamedTuple):
    """A copy that has not begun.

    Attributes:
        target: of the host.
        kept: of the device; nobody writes to it.
        direct: whether the pages of `target` are registered.
    """

    target: Tensor
    kept: Tensor
    direct: bool


class DeviceCopies:
    """The copies of one device that are under way."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._runtime = CudaRuntime()
        self._registered: dict[int, Segment] = {}
        self._refused: dict[int, Segment] = {}
        self._batch: list[HostCopy] = []
        self._sources: dict[Any, None] = {}  # the streams that made the tensors of the batch
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._nbytes, self._busy, self._warned = 0, False, False

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], segment: Segment | None = None, owned: bool = False
    ) -> None:
        """Copy tensors of the device, which the caller may overwrite afterwards.

        Args:
            pairs: targets, which are not to be read before `finish`, and tensors.
            segment: the shared memory that the targets are in; None: they are in memory of this process.
            owned: nothing else writes to the tensors.
        """
        direct = segment is not None and self._register(segment)
        for target, source in pairs:
            copied = source.clone() if source.is_contiguous() and not owned else source.contiguous()
            self._batch.append(HostCopy(target, copied, direct))
            self._nbytes += copied.nbytes
        self._sources[torch.cuda.current_stream(self._device)] = None
        if self._nbytes >= BATCH_BYTES:
            self._begin()

    def finish(self) -> None:
        """Wait for all of them."""
        self._begin()
        if not self._busy:
            return
        self._busy = False
        self._stream.synchronize()
        for target, stage in self._staged:
            target.copy_(stage)
        self._staged.clear()

    def keep(self, segments: Iterable[Segment]) -> None:
        """Release memory that is no longer among `segments`."""
        addresses = {s.address for s in segments}
        for known in (self._registered, self._refused):
            for address in [a for a in known if a not in addresses]:
                if known is self._registered:
                    self._runtime.unregister(address)
                del known[address]

    def close(self) -> None:
        """Wait, and release all memory."""
        self.finish()
        self.keep([])

    def _begin(self) -> None:
        """Begin the copies of the batch, after what made their tensors."""
        if not self._batch:
            return
        for stream in self._sources:
            self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            for target, source, direct in self._batch:
                if direct and target.is_contiguous():
                    target.copy_(source, non_blocking=True)
                elif not direct or not self._copy_rows(target, source):
                    stage = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    stage.copy_(source, non_blocking=True)
                    self._staged.append((target, stage))
                source.record_stream(self._stream)  # its memory is not used again before the copy has ended
        self._batch, self._sources, self._nbytes, self._busy = [], {}, 0, True

    def _copy_rows(self, target: Tensor, source: Tensor) -> bool:
        """Copy rows with even spacing in `target`; False if it is uneven, or the driver refuses."""
        rows = _even_rows(target)
        return rows is not None and self._runtime.copy_rows(target, source, rows, self._stream.cuda_stream)

    def _register(self, segment: Segment) -> bool:
        """Whether the driver knows the pages of a segment; one that it refused is not tried again."""
        address = segment.address
        if address in self._registered or address in self._refused:
            return address in self._registered
        code = self._runtime.register(address, segment.size)
        (self._refused if code else self._registered)[address] = segment
        if code and not self._warned:
            self._warned = True
            warnings.warn(
                f"cudaHostRegister refused {segment.size} bytes of shared memory with code {code}: captures "
                "take one copy more, through pinned memory: raise the limit of locked memory (ulimit -l), or "
                "use no shared memory (FLEX_SHARED_BYTES=0)",
                FlexWarning,
                stacklevel=2,
            )
        return not code


class CudaRuntime:
    """Functions of the CUDA runtime that torch has loaded.

    They return an error's code. An error that is not asked for stays until the next launch of a kernel, which
    raises it: in the user's model.
    """

    NOT_LOADED = -1

    def __init__(self) -> None:
        self._library = _load_runtime()

    def register(self, address: int, size: int) -> int:
        """Register pages with the driver: 0, or an error's code."""
        return self._call(
            "cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0)
        )

    def unregister(self, address: int) -> int:
        """The opposite of `register`."""
        return self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def copy_rows(self, target: Tensor, source: Tensor, rows: tuple[int, int, int], stream: int) -> bool:
        """Begin to copy a contiguous tensor of the device to evenly spaced rows of the host.

        Args:
            target: registered or pinned.
            source: of the device.
            rows: their number, entries in a row, entries from one row to the next.
            stream: the handle of the stream that copies.
        """
        size = target.element_size()
        height, width, pitch = rows[0], rows[1] * size, rows[2] * size
        arguments: list[Any] = [ctypes.c_void_p(target.data_ptr()), ctypes.c_size_t(pitch)]
        arguments += [ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(width)]
        arguments += [ctypes.c_size_t(width), ctypes.c_size_t(height), ctypes.c_int(DEVICE_TO_HOST)]
        return self._call("cudaMemcpy2DAsync", *arguments, ctypes.c_void_p(stream)) == 0

    def _call(self, name: str, *arguments: Any) -> int:
        if self._library is None:
            return self.NOT_LOADED
        code = int(getattr(self._library, name)(*arguments))
        if code:
            self._library.cudaGetLastError()
        return code


def _load_runtime() -> Any:
    # Whichever runtime torch has loaded already; it is not looked for on disk.
    major = (torch.version.cuda or "0").partition(".")[0]
    for name in (None, f"libcudart.so.{major}"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "cudaMemcpy2DAsync"):
            return library
    return None


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
