"""Values sent between pipeline stages: packed once, and broadcast in the stage; or tensors as they are.

A message is bytes on the CPU, sent over a separate gloo group, not the framework's. Sending does not wait for
the receiver. Each message has its own tag and contains its number, so that a message left over from a failed
step is never mistaken for another.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.collectives.gather_scatter import broadcast_from_first
from megatron_flex.collectives.host_groups import HostWork, device_of, open_host_group, receive_from, send_to
from megatron_flex.collectives.messages import align_size, as_bytes, pack
from megatron_flex.mesh import Mesh


class StageMessage(NamedTuple):
    """The identity of a message.

    Attributes:
        step: the step.
        microbatch: the microbatch.
        virtual_stage: the virtual stage that receives it, or another one that tells it from messages between
            the same two stages.
        backward: whether the message belongs to the backward pass.
    """

    step: int
    microbatch: int
    virtual_stage: int
    backward: bool

    @property
    def tag(self) -> int:
        """A tag of 23 bits, unique among the messages that may be in transit at the same time.

        Tags recur after eight steps: the receiver then drops what a failed step left, and it is released.
        """
        step, microbatch, stage = self.step % 2**3, self.microbatch % 2**12, self.virtual_stage % 2**7
        return (((step << 12 | microbatch) << 7 | stage) << 1) | self.backward

    @property
    def number(self) -> int:
        """The identity as one number, not truncated like the tag."""
        return (self.step << 31 | self.microbatch << 11 | self.virtual_stage << 1) | self.backward


Allocate = Callable[[Tensor], Sequence[Tensor]]  # tensors to receive into, on the CPU, for a package


def allocate_nothing(package: Tensor) -> Sequence[Tensor]:
    """For a package that no tensors follow."""
    return ()


class PipelineRelay:
    """Sends packages between ranks of a model replica's stages that have the same coordinates otherwise.

    Args:
        mesh: the run's axes.
        name: the same on all ranks, and different from the name of every earlier relay.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._axis, self._name = mesh["pp"], name
        self._group: Any = None
        # By tag, as gloo may read the tensors until the receiver has taken the messages, or dropped them.
        self._sent: dict[int, list[tuple[StageMessage, list[HostWork]]]] = {}

    def open(self) -> None:
        """Create the group, if it does not exist. Collective over the ranks of the axis `pp`."""
        if self._group is None:
            self._group = open_host_group(self._name, self._axis.ranks, self._axis.coord)

    def send(
        self, package: Tensor, stage: int, message: StageMessage, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Send a package to a stage, without waiting for it.

        Args:
            package: bytes, such as the result of `pack_values`.
            stage: the receiving stage.
            message: the identity of the message.
            tensors: what follows, from its own memory; the package tells the receiver how many bytes.
        """
        body = package.cpu()
        lengths = torch.tensor([message.number, body.numel()], dtype=torch.int64)
        parts = [lengths, body, *(as_bytes(t.detach()).cpu() for t in tensors)]
        works = [
            send_to(self._group, t, stage, message.tag << 1 | (i > 0)) for i, t in enumerate(parts)
        ]  # those with one tag arrive in this order
        self._sent.setdefault(message.tag, []).append((message, works))

    def receive(self, stage: int, message: StageMessage, allocate: Allocate = allocate_nothing) -> Tensor:
        """Wait for a package from a stage; other packages with the same tag are dropped.

        Args:
            stage: the sending stage.
            message: the identity of the message.
            allocate: makes the tensors that are to hold what follows a package, contiguous.
        """
        lengths = torch.zeros(2, dtype=torch.int64)
        while True:
            receive_from(self._group, lengths, stage, message.tag << 1).wait()
            body = torch.empty(int(lengths[1]), dtype=torch.uint8)
            receive_from(self._group, body, stage, message.tag << 1 | 1).wait()
            following = [
                receive_from(self._group, as_bytes(t), stage, message.tag << 1 | 1) for t in allocate(body)
            ]
            for work in following:
                work.wait()
            if int(lengths[0]) == message.number:
                return body

    def release(self, message: StageMessage) -> None:
        """Release a package that is known to have been received, and those of failed steps with its tag.

        Messages with one tag arrive in the order in which they were sent.
        """
        for sent, works in self._sent.pop(message.tag, ()):
            if sent == message:
                for work in works:
                    work.wait()

    def settle(self, step: int) -> None:
        """Release all packages of a step that all ranks have completed."""
        for message in [sent[-1][0] for sent in self._sent.values()]:
            if message.step == step:
                self.release(message)

    def close(self) -> None:
        """Release the group, without waiting for other ranks."""
        self._sent.clear()
        self._group = None


def broadcast_package(package: Tensor | None, holders: Mesh) -> Tensor:
    """Broadcast a package from the leader to all ranks of the stage.

    Collective over `holders`: one broadcast of the length and one of the package.

    Args:
        package: on the leader, the result of `pack_values`; unused elsewhere.
        holders: the mesh of the axes along which ranks hold the same values.
    """
    axis = next((a for a in holders if a.size > 1), None)
    if axis is None:
        assert package is not None
        return package
    device = device_of(axis.group)
    size = 0 if package is None else package.numel()
    length = int(broadcast_from_first(torch.tensor([size], dtype=torch.int64, device=device), holders))
    body = torch.empty(length, dtype=torch.uint8) if package is None else package
    return broadcast_from_first(body.to(device), holders)


def pack_values(items: dict[Any, Any], refused: Callable[[Any, Exception], None]) -> Tensor:
    """Serialize items to bytes, with the data of the tensors at the end.

    Items may contain tensors anywhere in a picklable structure; tensors are sent with their current values,
    without an autograd graph.

    Args:
        items: the items, by a picklable key.
        refused: called with the key and the error of an item that cannot be pickled; the item is left out.
    """
    tensors: list[Tensor] = []
    parts: dict[Any, bytes] = {}
    for key, item in items.items():
        before = len(tensors)
        try:
            parts[key] = _pickle_item(item, tensors)
        except Exception as error:  # pickling a user's object may raise anything; reported with its name
            del tensors[before:]
            refused(key, error)
    data = [t.detach().resolve_conj().resolve_neg() for t in tensors]
    about = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
    note = torch.frombuffer(bytearray(pickle.dumps((parts, about))), dtype=torch.uint8)
    device = next((t.device for t in tensors if t.is_cuda), None)
    pieces = [torch.tensor([note.numel()], dtype=torch.int64, device=device), note, *data]
    return pack(pieces, [piece.nbytes for piece in pieces])


def unpack_values(package: Tensor) -> dict[Any, Any]:
    """The items of a package; tensors are on the same type of device as before."""
    length = int(package[:8].cpu().view(torch.int64))
    start = align_size(8)
    note = package[start : start + length].cpu().numpy().tobytes()
    parts, about = pickle.loads(note)  # noqa: S301  # a rank of this job pickled it
    tensors, start = [], start + align_size(length)
    for shape, dtype, device in about:
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        data = package[start : start + nbytes].to(device)
        tensors.append(data.clone().view(dtype).reshape(shape))
        start += align_size(nbytes)
    return {key: _Unpickler(io.BytesIO(part), tensors).load() for key, part in parts.items()}


class _Pickler(pickle.Pickler):
    """A pickler that replaces dense tensors by indices and collects the tensors."""

    def __init__(self, file: Any, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_id(self, item: Any) -> int | None:
        if type(item) not in (Tensor, nn.Parameter) or item.layout is not torch.strided:
            return None
        if item.is_quantized or item.is_meta:
            return None
        same = next((i for i, t in enumerate(self.tensors) if t is item), None)
        if same is None:
            self.tensors.append(item)
            return len(self.tensors) - 1
        return same


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self.tensors[index]


def _pickle_item(item: Any, tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(item)
    return file.getvalue()
