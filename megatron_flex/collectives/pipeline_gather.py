"""Sends the captures of each pipeline stage to the first stage: a header, and one message of small tensors.

What a stage sends (names, shapes, dtypes) is described once, and again only in a step in which it differs
from the step before. Captures are on the host, and go from host to host.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.host_groups import HOST, device_of, open_host_group, receive_from, send_to
from megatron_flex.collectives.messages import as_bytes, group_by_size, message_offsets, pack
from megatron_flex.collectives.rank_agreement import gather_objects
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, FlexWarning, describe_error
from megatron_flex.mesh import Mesh

Tag = Any  # a string, or a tuple of strings and integers
Base = tuple[int, int]
PACKED_BYTES = 1 << 16  # a larger tensor is sent by itself, without a copy
Description = list[tuple[Tag, tuple[int, ...], torch.dtype]]


class PipelineGather:
    """The transfer of one session's captures up the pipeline.

    Args:
        mesh: the run's axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axis = mesh, mesh["pp"]
        self._group: Any = None  # of the hosts; None where messages go over the axis's own group
        self._sent: tuple[Description, int] | None = None  # the description sent last, with its number
        self._known: dict[int, tuple[int, Description]] = {}  # by stage, the description received last

    def open(self) -> None:
        """Connect the hosts, where the axis's own group takes only tensors of a device. Collective over `pp`
        among the stages' leaders.
        """
        axis, group = self._axis, None
        if axis.size == 1 or self._device() == "cpu":
            return
        name = gather_objects(uuid4().hex, self._mesh, ["pp"])[0]
        try:
            group, why = open_host_group(f"stages/{name}", axis.ranks, axis.coord), ""
        except RuntimeError as error:
            why = describe_error(error)
        reasons = gather_objects(why, self._mesh, ["pp"])
        if not any(reasons):
            self._group = group
        elif axis.coord == 0:
            stage, why = next((n, why) for n, why in enumerate(reasons) if why)
            warnings.warn(
                f"the hosts of pipeline stages cannot connect (rank {axis.ranks[stage]}: {why}); captures "
                "pass through the memory of the devices: name a network interface that all nodes have "
                "(GLOO_SOCKET_IFNAME)",
                FlexWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Release the connections, without waiting for other ranks."""
        self._group = None

    def gather(
        self, items: Sequence[tuple[Tag, Tensor]], base: Base = (0, 0)
    ) -> list[tuple[Base, Tag, Tensor]]:
        """Send the items of each stage's leader to the leader of the first stage.

        Collective over `pp` among the stages' leaders; everything is sent point to point, in messages that
        wait together for at most FLEX_PENDING_BYTES, or for one tensor.

        Args:
            items: tags, which JSON can express, with tensors on the CPU, in any number.
            base: two numbers of the step, which come with the items.

        Returns:
            On the first stage its own items, followed by those of the other stages in order; elsewhere an
            empty list.

        Raises:
            FlexError: a stage refers to a description that this rank has not received.
        """
        axis = self._axis
        if axis.size == 1 or axis.coord == 0:
            local_items = [(base, tag, tensor) for tag, tensor in items]
            return local_items if axis.size == 1 else [*local_items, *self._receive()]
        self._send(items, base)
        return []

    def _send(self, items: Sequence[tuple[Tag, Tensor]], base: Base) -> None:
        described = [(tag, tuple(t.shape), t.dtype) for tag, t in items]
        last, self._sent = self._sent, None  # described again if this step does not come to its end
        note = b""
        if last is None or last[0] != described:
            note = json.dumps([(tag, shape, str(dtype)[6:]) for tag, shape, dtype in described]).encode()
            last = described, crc32(note)
        small = [t for _, t in items if 0 < t.nbytes <= PACKED_BYTES]
        sent = [torch.tensor([len(note), last[1], *base], dtype=torch.int64).view(torch.uint8)]
        sent += [torch.frombuffer(bytearray(note), dtype=torch.uint8)] if note else []
        sent += [pack(small, [t.nbytes for t in small])] if small else []
        sent += [as_bytes(t) for _, t in items if t.nbytes > PACKED_BYTES]
        for window in group_by_size([t.nbytes for t in sent], flex_config.pending_bytes):
            _wait([self._begin_send(sent[n]) for n in window])
        self._sent = last

    def _receive(self) -> list[tuple[Base, Tag, Tensor]]:
        stages = range(1, self._axis.size)
        headers = {stage: torch.empty(32, dtype=torch.uint8) for stage in stages}
        self._receive_into(list(headers.items()))
        rows = {stage: header.view(torch.int64).tolist() for stage, header in headers.items()}
        notes = {n: torch.empty(row[0], dtype=torch.uint8) for n, row in rows.items() if row[0]}
        self._receive_into(list(notes.items()))
        for stage, row in rows.items():
            if stage in notes:
                self._known[stage] = row[1], _parse(notes[stage].numpy().tobytes())
            elif stage not in self._known or self._known[stage][0] != row[1]:
                raise FlexError(
                    f"rank {self._axis.ranks[stage]} sent captures as it described them in an earlier step, "
                    "which this rank did not receive: an error ended that step; restart the run"
                )
        arriving = {stage: _Arriving(self._known[stage][1]) for stage in stages}
        self._receive_into([(stage, m) for stage, of in arriving.items() for m in of.messages])
        return [
            ((rows[stage][2], rows[stage][3]), tag, tensor)
            for stage, of in arriving.items()
            for tag, tensor in of.unpack()
        ]

    def _receive_into(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        """Receive messages of the host, each with the stage that it comes from."""
        device = self._device()
        for window in group_by_size([m.nbytes for _, m in messages], flex_config.pending_bytes):
            received = [messages[n] for n in window]
            buffers = [m if device == "cpu" else torch.empty_like(m, device=device) for _, m in received]
            _wait([self._begin_receive(b, stage) for b, (stage, _) in zip(buffers, received, strict=True)])
            for buffer, (_, message) in zip(buffers, received, strict=True):
                if buffer is not message:
                    message.copy_(buffer)

    def _begin_send(self, message: Tensor) -> Any:
        if self._group is not None:
            return send_to(self._group, message, 0)
        return dist.isend(message.to(self._device()), self._axis.ranks[0], group=self._axis.group)

    def _begin_receive(self, buffer: Tensor, stage: int) -> Any:
        if self._group is not None:
            return receive_from(self._group, buffer, stage)
        return dist.irecv(buffer, self._axis.ranks[stage], group=self._axis.group)

    def _device(self) -> str:
        """Whose tensors are sent."""
        return HOST if self._group is not None else device_of(self._axis.group)


class _Arriving:
    """The tensors of one stage.

    Attributes:
        messages: the memory to receive in, in the order of sending.
    """

    def __init__(self, described: Description) -> None:
        self._tags = [tag for tag, _, _ in described]
        self._tensors = [torch.empty(shape, dtype=dtype) for _, shape, dtype in described]
        self._packed = [t for t in self._tensors if 0 < t.nbytes <= PACKED_BYTES]
        self._places, length = message_offsets([t.nbytes for t in self._packed])
        self._small = torch.empty(length, dtype=torch.uint8)
        self.messages = [self._small] if length else []
        self.messages += [as_bytes(t) for t in self._tensors if t.nbytes > PACKED_BYTES]

    def unpack(self) -> list[tuple[Tag, Tensor]]:
        """The tensors, each in memory of its own."""
        for tensor, at in zip(self._packed, self._places, strict=True):
            as_bytes(tensor).copy_(self._small[at : at + tensor.nbytes])
        return list(zip(self._tags, self._tensors, strict=True))


def gather_up_pipeline(items: Sequence[tuple[Any, Tensor]], mesh: Mesh) -> list[tuple[Any, Tensor]]:
    """Send the items of each stage's leader to that of the first stage, once: see `PipelineGather.gather`."""
    return [(tag, tensor) for _, tag, tensor in PipelineGather(mesh).gather(items)]


def _parse(note: bytes) -> Description:
    return [
        (tag if isinstance(tag, str) else tuple(tag), tuple(shape), getattr(torch, dtype))
        for tag, shape, dtype in json.loads(note)
    ]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
