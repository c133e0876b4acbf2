"""Sends the captures of each pipeline stage to the first stage: a header, and one message of small tensors.

What a stage sends (names, shapes, dtypes) is described once, and again only in a step in which it differs
from the step before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.messages import align_size, as_bytes, message_offsets, pack
from megatron_flex.errors import FlexError
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
        self._axis = mesh["pp"]
        self._sent: tuple[Description, int] | None = None  # the description sent last, with its number
        self._known: dict[int, tuple[int, Description]] = {}  # by stage, the description received last

    def gather(
        self, items: Sequence[tuple[Tag, Tensor]], base: Base = (0, 0)
    ) -> list[tuple[Base, Tag, Tensor]]:
        """Send the items of each stage's leader to the leader of the first stage.

        Collective over `pp` among the stages' leaders; the tensors are sent point to point.

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
            own = [(base, tag, tensor) for tag, tensor in items]
            return own if axis.size == 1 else [*own, *self._receive()]
        self._send(items, base)
        return []

    def _send(self, items: Sequence[tuple[Tag, Tensor]], base: Base) -> None:
        axis, device = self._axis, self._device()
        described = [(tag, tuple(t.shape), t.dtype) for tag, t in items]
        last, self._sent = self._sent, None  # described again if this step does not come to its end
        note = b""
        if last is None or last[0] != described:
            note = json.dumps([(tag, shape, str(dtype)[6:]) for tag, shape, dtype in described]).encode()
            last = described, crc32(note)
        header = torch.tensor([len(note), last[1], *base], dtype=torch.int64, device=device)
        run_collective(dist.gather, header, None, axis.ranks[0], group=axis.group)
        small = [t for _, t in items if 0 < t.nbytes <= PACKED_BYTES]
        sent = [torch.frombuffer(bytearray(note), dtype=torch.uint8)] if note else []
        sent += [pack(small, [t.nbytes for t in small])] if small else []
        sent += [as_bytes(t) for _, t in items if t.nbytes > PACKED_BYTES]
        works = [dist.isend(t.to(device), axis.ranks[0], group=axis.group) for t in sent]
        _wait(works)
        self._sent = last

    def _receive(self) -> list[tuple[Base, Tag, Tensor]]:
        axis, device = self._axis, self._device()
        header = torch.zeros(4, dtype=torch.int64, device=device)
        headers = [torch.empty_like(header) for _ in range(axis.size)]
        run_collective(dist.gather, header, headers, axis.ranks[0], group=axis.group)
        rows = [h.tolist() for h in headers[1:]]
        notes: dict[int, Tensor] = {}
        works = []
        for source, row in zip(axis.ranks[1:], rows, strict=True):
            if row[0]:
                notes[source] = torch.empty(row[0], dtype=torch.uint8, device=device)
                works.append(dist.irecv(notes[source], source, group=axis.group))
        _wait(works)
        for source, row in zip(axis.ranks[1:], rows, strict=True):
            if source in notes:
                self._known[source] = row[1], _parse(notes[source].cpu().numpy().tobytes())
            elif source not in self._known or self._known[source][0] != row[1]:
                raise FlexError(
                    f"rank {source} sent captures as it described them in an earlier step, which this rank "
                    "did not receive: an error ended that step; restart the run"
                )
        arriving = [_Arriving(self._known[source][1], device) for source in axis.ranks[1:]]
        _wait(
            [
                dist.irecv(message, source, group=axis.group)
                for source, stage in zip(axis.ranks[1:], arriving, strict=True)
                for message in stage.messages
            ]
        )
        return [
            ((row[2], row[3]), tag, tensor)
            for row, stage in zip(rows, arriving, strict=True)
            for tag, tensor in stage.unpack()
        ]

    def _device(self) -> str:
        return "cuda" if dist.get_backend(self._axis.group) == "nccl" else "cpu"


class _Arriving:
    """The tensors of one stage.

    Attributes:
        messages: the memory to receive in, in the order of sending.
    """

    def __init__(self, described: Description, device: str) -> None:
        self._described = described
        self._tensors = [
            torch.empty(shape, dtype=dtype, device="cpu" if _is_packed(shape, dtype) else device)
            for _, shape, dtype in described
        ]
        widths = [t.nbytes for t in self._tensors]
        self._packed = [n for n, width in enumerate(widths) if 0 < width <= PACKED_BYTES]
        self._places, length = message_offsets([widths[n] for n in self._packed])
        self._small = torch.empty(align_size(length), dtype=torch.uint8, device=device)
        self.messages = [self._small[:length]] if length else []
        self.messages += [as_bytes(t) for t in self._tensors if t.nbytes > PACKED_BYTES]

    def unpack(self) -> list[tuple[Tag, Tensor]]:
        """The tensors, on the CPU, each in memory of its own."""
        small = self._small.cpu()
        for n, at in zip(self._packed, self._places, strict=True):
            tensor = self._tensors[n]
            tensor.copy_(small[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        return [(tag, t.cpu()) for (tag, _, _), t in zip(self._described, self._tensors, strict=True)]


def gather_up_pipeline(items: Sequence[tuple[Any, Tensor]], mesh: Mesh) -> list[tuple[Any, Tensor]]:
    """Send the items of each stage's leader to that of the first stage, once: see `PipelineGather.gather`."""
    return [(tag, tensor) for _, tag, tensor in PipelineGather(mesh).gather(items)]


def _is_packed(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return torch.Size(shape).numel() * dtype.itemsize <= PACKED_BYTES


def _parse(note: bytes) -> Description:
    return [
        (tag if isinstance(tag, str) else tuple(tag), tuple(shape), getattr(torch, dtype))
        for tag, shape, dtype in json.loads(note)
    ]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
