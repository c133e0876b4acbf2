"""Copies from a device to the host: memory that the driver knows or refuses, errors that must not stay."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_flex.collectives.transport import device_copies
from megatron_flex.collectives.transport.device_copies import DeviceCopies
from megatron_flex.collectives.transport.segments import Segment
from megatron_flex.errors import FlexWarning
from tests.support.accelerator import CUDA, simulated
from tests.support.accelerator.streams import Device, Stream, device_of_process
from tests.support.messages import warns

SIZE = 1 << 16
ROWS = (16, 24)
NOT_SUPPORTED = 801  # cudaErrorNotSupported: what some containers and virtual machines answer


@pytest.fixture
def device() -> Iterator[Device]:
    with simulated() as recording:
        yield device_of_process()
        assert recording.violations == []


@pytest.fixture
def segment() -> Segment:
    return Segment(-1, SIZE)


def targets(segment: Segment) -> list[Tensor]:
    """Rows that are adjacent, rows that are apart, and rows that are spaced unevenly."""
    entries = segment.entries(torch.float32)
    wide = entries[1024 : 1024 + 2 * 16 * 24].view(16, 48)
    return [entries[: 16 * 24].view(ROWS), wide[:, :24], entries[4096:].as_strided(ROWS, (1, 17))]


def copied(copies: DeviceCopies, segment: Segment) -> bool:
    """Whether what is copied to shared memory arrives, though its source is overwritten."""
    places = targets(segment)
    sources = [torch.randn(place.shape).to(CUDA) for place in places]
    wanted = [source.cpu() for source in sources]
    for place, source in zip(places, sources, strict=True):
        copies.start([(place, source)], segment)
        source.zero_()
    copies.finish()
    return all(map(torch.equal, places, wanted))


def test_memory_is_registered_until_it_is_not_kept(device: Device, segment: Segment) -> None:
    copies, more = DeviceCopies(torch.device(CUDA)), Segment(-1, SIZE)
    assert copied(copies, segment)
    assert copied(copies, more)
    assert device.registered == {segment.address: SIZE, more.address: SIZE}
    copies.keep([more])
    assert device.registered == {more.address: SIZE}
    copies.close()
    assert device.registered == {}


def test_refused_memory_is_warned_of_once_and_leaves_no_error(device: Device, segment: Segment) -> None:
    copies = DeviceCopies(torch.device(CUDA))
    device.refuses = NOT_SUPPORTED
    with warns(FlexWarning, NOT_SUPPORTED, SIZE, "FLEX_SHARED_BYTES=0"):
        assert copied(copies, segment)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copied(copies, segment)
        assert copied(copies, Segment(-1, SIZE))
        copies.close()
    assert device.last_error == 0


def test_memory_that_is_unknown_to_the_driver_leaves_no_error(device: Device, segment: Segment) -> None:
    copies = DeviceCopies(torch.device(CUDA))
    assert copied(copies, segment)
    device._registered.clear()
    copies.close()
    assert device.last_error == 0


def test_small_copies_begin_together(
    device: Device, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, begun, other = DeviceCopies(torch.device(CUDA)), [], Stream()
    wait = Stream.wait_stream

    def counted(self: Stream, stream: Stream) -> None:
        begun.append(stream)
        wait(self, stream)

    monkeypatch.setattr(Stream, "wait_stream", counted)
    assert copied(copies, segment)
    assert len(begun) == 1
    first, second = targets(segment)[:2]
    source = torch.arange(16 * 24.0).view(ROWS)
    copies.start([(first, source.to(CUDA))], segment)
    with torch.cuda.stream(other):  # type: ignore[arg-type]
        copies.start([(second, (source + 1).to(CUDA))], segment)
    copies.finish()
    assert begun[1:] == [device.main, other]
    assert torch.equal(second, first + 1)
    monkeypatch.setattr(device_copies, "BATCH_BYTES", 1)
    copies.start([(first, source.to(CUDA))], segment)
    assert len(begun) == 4
    copies.finish()
