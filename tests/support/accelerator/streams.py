"""Streams, events, pinned memory and late copies of the simulated device.

Every operation runs when it is called, but for copies to the host that do not block. Such a copy reads its
source as late as the order of the streams allows, and writes its target when the host waits for its stream.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.accelerator.recording import Recording

CUDA = torch.device("cuda", 0)
POISON = 0x7B  # in every byte of what a GPU would leave undefined: large numbers of any dtype


class Memory:
    """A storage of the device. It is freed when no tensor of the device refers to it.

    Attributes:
        storage: the bytes.
        stream: the stream that wrote to it last, and `time` when.
        streams: those that its release must wait for (`record_stream`).
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.stream: Stream | None = None
        self.time = 0
        self.streams: set[Stream] = set()


class LateCopy:
    """A copy to the host that does not block."""

    def __init__(self, stream: Stream, memory: Memory, source: Tensor, target: Tensor) -> None:
        self.stream, self.source, self.target = stream, source, target
        self._memory, self._streams = weakref.ref(memory), memory.streams
        self._storage = memory.storage  # of this process it stays, whatever the device does with it
        self._value: Tensor | None = None
        poison(target)

    def read(self, ready: bool = True) -> None:
        """Read the source now; `ready`: whether the order of the streams has it ready."""
        if self._value is not None:
            return
        self._value = self.source.clone()
        freed = self._memory() is None and self.stream not in self._streams
        if freed or not ready:
            poison(self._value)

    def deliver(self) -> None:
        """Write the target."""
        self.read()
        assert self._value is not None
        self.target.copy_(self._value)


class Upload:
    """A copy from pinned memory that does not block: the host must leave its source alone until it waits."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._sent = source, source.clone()

    def read(self) -> None:
        """The order of the streams does not matter to the host."""

    def deliver(self) -> None:
        """See whether the source is what it was."""
        before, now = (t.contiguous().view(torch.uint8) for t in (self._sent, self._source))
        if not torch.equal(before, now):
            device_of_process().recording.violation("a source of a copy to the device is written too early")


def poison(tensor: Tensor) -> None:
    """Fill a tensor of the host with what nobody should read."""
    if tensor.numel():
        tensor.copy_(torch.full((tensor.element_size(),), POISON, dtype=torch.uint8).view(tensor.dtype)[0])


class Stream:
    """A queue of the device.

    Attributes:
        pending: the copies that the host has not waited for.
        done: up to which time the host knows its work to be done.
    """

    device = CUDA

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.pending: list[LateCopy | Upload] = []
        self.done = 0
        self._seen: dict[Stream, int] = {}  # of other streams, up to which time this one has waited for them
        self.cuda_stream = self.stream_id = device_of_process().number(self)
        self._queries = 0

    def has_seen(self, memory: Memory) -> bool:
        """Whether what was written last to a memory is there for operations of this stream."""
        writer = memory.stream
        return writer is None or writer is self or memory.time <= max(self._seen.get(writer, 0), writer.done)

    def see(self, other: Stream, time: int, seen: dict[Stream, int]) -> None:
        """Let what is called later on this stream come after `other`'s operations up to `time`."""
        for copy in other.pending:
            copy.read()
        for stream, at in {**seen, other: time}.items():
            self._seen[stream] = max(at, self._seen.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        """As of `torch.cuda.Stream`."""
        self.see(stream, device_of_process().time, stream._seen)

    def wait_event(self, event: Event) -> None:
        """As of `torch.cuda.Stream`."""
        event.wait(self)

    def finish(self, copies: list[LateCopy | Upload] | None = None) -> None:
        """Do what has been waited for: these copies, or all."""
        for copy in self.pending if copies is None else copies:
            copy.deliver()
        self.pending = [] if copies is None else [c for c in self.pending if c not in copies]
        if copies is None:
            self.done = device_of_process().time

    def synchronize(self) -> None:
        """As of `torch.cuda.Stream`."""
        device_of_process().recording.wait("a stream")
        self.finish()

    def query(self) -> bool:
        """As of `torch.cuda.Stream`: what is pending is done when it is asked for the second time."""
        self._queries += 1
        if self.pending and self._queries % 2:
            return False
        self.finish()
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """As of `torch.cuda.Stream`."""
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As of `torch.cuda.Stream`."""
        return (0, -1)

    def __enter__(self) -> Stream:
        device_of_process().stack().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        device_of_process().stack().pop()


class Event:
    """A moment of a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._copies: list[LateCopy | Upload] = []
        self._time, self._queries = 0, 0
        self._seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """As of `torch.cuda.Event`."""
        self._stream = stream or device_of_process().current_stream()
        self._copies = list(self._stream.pending)
        self._time, self._seen = device_of_process().time, dict(self._stream._seen)

    def wait(self, stream: Stream | None = None) -> None:
        """As of `torch.cuda.Event`."""
        if self._stream is not None:
            for copy in self._copies:
                copy.read()
            (stream or device_of_process().current_stream()).see(self._stream, self._time, self._seen)

    def synchronize(self) -> None:
        """As of `torch.cuda.Event`."""
        device_of_process().recording.wait("an event")
        self._finish()

    def query(self) -> bool:
        """As of `torch.cuda.Event`: what is pending is done when it is asked for the second time."""
        self._queries += 1
        if self._copies and self._queries % 2:
            return False
        self._finish()
        return True

    def elapsed_time(self, end: Event) -> float:
        """As of `torch.cuda.Event`: in milliseconds."""
        return 0.01

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.finish([c for c in self._copies if c in self._stream.pending])
            self._stream.done = max(self._stream.done, self._time)
        self._copies = []


class Device:
    """The device of this process.

    Attributes:
        recording: what is recorded.
        time: how many operations have been called.
        main: the default stream.
        refuses: the code with which memory of the host is refused, `cudaHostRegister`; 0: it is taken.
        last_error: the code that the next kernel raises.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self.time = self.refuses = self.last_error = 0
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._registered: dict[int, int] = {}  # address to size, of host memory
        self._pinned: list[torch.UntypedStorage] = []  # kept, so that no other memory gets their addresses
        self._numbers = 0
        self._stacks = threading.local()
        self._side: weakref.WeakSet[Stream] = weakref.WeakSet()

    def start(self) -> None:
        """Begin with an empty default stream."""
        self.main = Stream()
        self._stacks = threading.local()
        self.refuses = self.last_error = 0

    def number(self, stream: Stream) -> int:
        """A number for a stream."""
        self._side.add(stream)
        self._numbers += 1
        return self._numbers

    def stack(self) -> list[Stream]:
        """The streams that this thread has entered; the last is current."""
        if not hasattr(self._stacks, "streams"):
            self._stacks.streams = [self.main]
        streams: list[Stream] = self._stacks.streams
        return streams

    def current_stream(self, device: Any = None) -> Stream:
        """As of `torch.cuda`."""
        return self.stack()[-1]

    def set_stream(self, stream: Stream) -> None:
        """As of `torch.cuda`."""
        self.stack()[-1] = stream

    @contextmanager
    def stream(self, stream: Stream | None = None) -> Iterator[Stream | None]:
        """As of `torch.cuda`."""
        if stream is None:
            yield None
            return
        with stream:
            yield stream

    def synchronize(self, device: Any = None) -> None:
        """As of `torch.cuda`."""
        self.recording.wait("the device")
        for stream in list(self._side):
            stream.finish()

    # -- memory ------------------------------------------------------------------------------------------

    def memory(self, host: Tensor) -> Memory:
        """The memory in which a tensor lies."""
        storage = host.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None:
            found = self._memories[storage._cdata] = Memory(storage)
        return found

    def memory_at(self, address: int) -> Memory:
        """The memory that contains an address."""
        for memory in list(self._memories.values()):
            begin = memory.storage.data_ptr()
            if begin <= address < begin + memory.storage.nbytes():
                return memory
        raise RuntimeError(self.recording.violation("a copy from an address that is not of the device"))

    def read(self, memory: Memory) -> bool:
        """Note that an operation of the current stream reads a memory; whether that is ready for it."""
        return self.current_stream().has_seen(memory)

    def wrote(self, memory: Memory) -> None:
        """Note that an operation of the current stream writes to a memory."""
        if self.last_error:
            raise RuntimeError(self.recording.violation(f"a kernel raises the error {self.last_error}"))
        self.time += 1
        memory.stream, memory.time = self.current_stream(), self.time

    def pin(self, tensor: Tensor) -> Tensor:
        """Let a tensor of the host be pinned from now on."""
        self._pinned.append(tensor.untyped_storage())
        self._registered[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def is_pinned(self, tensor: Tensor, device: Any = None) -> bool:
        """As of `torch.Tensor`."""
        begin = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        return any(at <= begin < at + size for at, size in self._registered.items())

    @property
    def registered(self) -> dict[int, int]:
        """The addresses and sizes of host memory that the device knows, without what torch has pinned."""
        pinned = {storage.data_ptr() for storage in self._pinned}
        return {at: size for at, size in self._registered.items() if at not in pinned}

    def register(self, *arguments: Any) -> int:
        """`cudaHostRegister`."""
        address, size, _ = (a.value for a in arguments)
        if self.refuses:
            self.last_error = self.refuses
        else:
            self._registered[address] = size
        return self.last_error

    def unregister(self, address: Any) -> int:
        """`cudaHostUnregister`."""
        if self._registered.pop(address.value, None) is None:
            self.last_error = NOT_REGISTERED
        return self.last_error

    def clear_error(self) -> int:
        """`cudaGetLastError`."""
        code, self.last_error = self.last_error, 0
        return code

    # -- copies ------------------------------------------------------------------------------------------

    def copy_to_host(self, memory: Memory, source: Tensor, target: Tensor, blocking: bool) -> None:
        """Copy bytes of the device: at once if the host waits for it, else late."""
        stream = self.current_stream()
        ready = self.read(memory)
        copy = LateCopy(stream, memory, source, target)
        if stream is self.main or not ready:
            copy.read(ready)  # later operations of the same stream come after it
        stream.pending.append(copy)
        if blocking:
            self.recording.wait("a copy to the host")
            stream.finish()

    def copy_rows(self, *arguments: Any) -> int:
        """`cudaMemcpy2DAsync` to the host."""
        target, pitch, source, source_pitch, width, height, _, number = (
            getattr(a, "value", a) or 0 for a in arguments
        )
        stream = next(s for s in self._side if s.stream_id == number)
        memory = self.memory_at(source)
        with self.stream(stream):
            rows = _bytes_at(source, source_pitch * (height - 1) + width)
            goal = _bytes_at(target, pitch * (height - 1) + width)
            self.copy_to_host(
                memory,
                rows.as_strided((height, width), (source_pitch, 1)),
                goal.as_strided((height, width), (pitch, 1)),
                blocking=not self.is_pinned(goal),
            )
        return 0


def _bytes_at(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered

_device = Device()


def device_of_process() -> Device:
    """The device of this process."""
    return _device
