"""Writing a rank's parts: what is on disk, what memory it takes, and what a broken disk does."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.checksums import CHECKSUM_BLOCK, combine_block_checksums, compute_block_checksums
from megatron_flex.config import flex_config
from megatron_flex.dump import REPLICA, VALUE, Dump, DumpWriter, ShardEntry, host_memory
from megatron_flex.dump.part_format import DTYPE_NAMES, read_part
from megatron_flex.dump.writer import part_writer, writer_threads
from megatron_flex.dump.writer.copy_stream import CopyStream
from megatron_flex.dump.writer.host_buffers import SLAB_BYTES, HostBuffers
from megatron_flex.errors import DumpError, FlexWarning
from megatron_flex.layout import replicated
from tests.support.dumps import complete_parts
from tests.support.messages import any_names, assert_names, raises

LAYOUT = replicated("s", "h")


def writer(path: Path, rank: int = 0, **settings: Any) -> DumpWriter:
    path.mkdir(exist_ok=True)
    return DumpWriter(path, rank, {"tp": rank}, Dump(path, "x", **settings))


def tensors(iteration: int, count: int = 3, size: int = 100) -> dict[str, Tensor]:
    return {f"site{n}": torch.full((size, 4), iteration + n / 8) for n in range(count)}


def step(at: DumpWriter, iteration: int, given: dict[str, Tensor] | None = None, owned: bool = False) -> None:
    at.begin(iteration, 0, True, 1)
    for site, tensor in (tensors(iteration) if given is None else given).items():
        at.put(ShardEntry(site, VALUE, 0, 0, 0, tuple(tensor.shape), ""), LAYOUT, tensor, owned)
    at.finish()


def whole(path: Path, rank: int = 0) -> list[int]:
    """The iterations that are whole; all of them with right checksums."""
    out = []
    for folder in sorted(path.glob("0*")):
        if (found := complete_parts(folder, [rank])) is not None:
            out.append(int(folder.name))
            for file in found[rank]:
                contents(file)
    return out


def contents(file: Path) -> dict[str, Tensor]:
    part, content = read_part(file), file.read_bytes()
    out = {}
    for entry in part.index.entries:
        if entry.kind != REPLICA:
            dtype, shape, first, nbytes = part.where[entry.tensor]
            data = content[first : first + nbytes]
            assert compute_block_checksums(memoryview(data)) == entry.blocks
            assert combine_block_checksums(entry.blocks) == entry.checksum
            out[entry.site] = (
                torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
                if data
                else torch.empty(shape, dtype=dtype)
            )
    return out


def of(path: Path, iteration: int) -> dict[str, Tensor]:
    found = complete_parts(path / f"{iteration:010d}", [0])
    assert found is not None
    return {site: t for file in found[0] for site, t in contents(file).items()}


# -- what is on disk


@pytest.mark.parametrize("durable", [False, True])
def test_parts_stream_and_come_back_bit_by_bit(tmp_path: Path, durable: bool) -> None:
    at = writer(tmp_path, part_bytes=4000, durable=durable)
    for number in range(4):
        step(at, number, tensors(number, 7))
    at.close()
    assert whole(tmp_path) == [0, 1, 2, 3]
    names = sorted(p.name for p in (tmp_path / "0000000002").iterdir())
    assert names == [f"00000-00{n}.safetensors" for n in range(3)] + ["00000-003-of-004.safetensors"]
    for number in range(4):
        found = of(tmp_path, number)
        assert all(torch.equal(found[s], t) for s, t in tensors(number, 7).items())
    assert (at.tally.written, at.tally.dropped, at.tally.failed, at.held) == (4, 0, 0, 0)
    assert at.tally.nbytes == 4 * 7 * 1600


def test_checksums_release_the_gil() -> None:
    """xxhash releases the GIL for inputs of more than 64 KiB."""
    assert CHECKSUM_BLOCK > 1 << 16


def test_replicas_take_no_room_in_a_part(tmp_path: Path) -> None:
    """Tensors of all sizes are where they belong, with their checksums, after one that is not written."""
    rows = [3, 500_000, 1, 0, 1_700_001, 70_000, 8]
    given = {f"site {n}": torch.rand(count, 2) for n, count in enumerate(rows)}
    at = writer(tmp_path)
    at.begin(0, 0, True, 1)
    for number, (site, tensor) in enumerate(given.items()):
        kind = REPLICA if number in (2, 4) else VALUE
        at.put(ShardEntry(site, kind, 0, 0, 0, tuple(tensor.shape), ""), LAYOUT, tensor)
    at.finish()
    at.close()
    found = of(tmp_path, 0)
    del given["site 2"], given["site 4"]
    assert list(found) == list(given)
    assert all(torch.equal(found[s], t) for s, t in given.items())


class Meeting:
    """`os.pwritev` of two threads, each of which waits for the other one before its first call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.met = threading.Barrier(2)
        self.threads: set[int] = set()
        self.write = os.pwritev
        monkeypatch.setattr(part_writer.os, "pwritev", self)
        monkeypatch.setattr(writer_threads.os, "cpu_count", lambda: cores)

    def __call__(self, file: int, pieces: list[memoryview], at: int) -> int:
        if threading.get_ident() not in self.threads:
            self.threads.add(threading.get_ident())
            self.met.wait(60)
        return self.write(file, pieces, at)


@pytest.mark.parametrize("iterations", [1, 2])
def test_two_parts_are_written_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int
) -> None:
    """Of one iteration, and of two."""
    meeting = Meeting(monkeypatch, 2)
    at = writer(tmp_path, part_bytes=1600 * iterations)
    for number in range(iterations):
        step(at, number, tensors(number, 2))
    at.close()
    assert len(meeting.threads) == 2
    assert whole(tmp_path) == list(range(iterations))
    for number in range(iterations):
        assert all(torch.equal(of(tmp_path, number)[s], t) for s, t in tensors(number, 2).items())


def test_one_core_has_one_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(monkeypatch, 1)
    meeting.met = threading.Barrier(1)
    at = writer(tmp_path, part_bytes=1600)
    for number in range(3):
        step(at, number)
    at.close()
    assert len(meeting.threads) == 1
    assert whole(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("part_bytes", "parts"), [(32 << 20, [4, 8, 8]), (8 << 20, [2] * 10), (12 << 20, [2] + [3] * 6)]
)
def test_the_first_part_is_smaller_where_parts_are_large(
    tmp_path: Path, part_bytes: int, parts: list[int]
) -> None:
    """Of twenty tensors of 4 MiB; a first part of less than 8 MiB would not be worth a file."""
    at = writer(tmp_path, part_bytes=part_bytes)
    step(at, 0, tensors(0, 20, 1 << 18))
    at.close()
    found = complete_parts(tmp_path / f"{0:010d}", [0])
    assert found is not None
    assert [len(contents(file)) for file in found[0]] == parts


def test_parts_are_committed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is written last, and gets its name first: the last part completes an iteration."""
    monkeypatch.setattr(writer_threads.os, "cpu_count", lambda: 2)
    close, rename = os.close, os.rename
    written, renamed = threading.Event(), []

    def closed(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        if name == ".00000-000.safetensors.tmp":
            assert written.wait(60)
            time.sleep(0.1)  # for a second part that does not wait
        close(file)
        if name == ".00000-001-of-002.safetensors.tmp":
            written.set()

    def noted(old: Path, new: Path) -> None:
        renamed.append(new.name)
        rename(old, new)

    monkeypatch.setattr(part_writer.os, "close", closed)
    monkeypatch.setattr(part_writer.os, "rename", noted)
    at = writer(tmp_path, part_bytes=1600)
    step(at, 0, tensors(0, 2))
    at.close()
    assert renamed == ["00000-000.safetensors", "00000-001-of-002.safetensors"]
    assert whole(tmp_path) == [0]


@pytest.mark.parametrize("which", ["first", "last"])
def test_what_one_of_two_threads_cannot_write_costs_the_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Nothing is left of it, whichever of its parts it was; the next iteration is written."""
    monkeypatch.setattr(writer_threads.os, "cpu_count", lambda: 2)
    write, met = os.pwritev, threading.Barrier(2)
    begun: list[Path] = []

    def broken(file: int, pieces: list[memoryview], at: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.parent.name == "0000000000" and path not in begun:
            begun.append(path)
            met.wait(60)
        if path.parent.name == "0000000000" and ("-of-" in path.name) == (which == "last"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(file, pieces, at)

    monkeypatch.setattr(part_writer.os, "pwritev", broken)
    at = writer(tmp_path, part_bytes=1600, on_error="raise")
    for number in range(2):
        step(at, number, tensors(number, 2))
    at.close()
    assert not list((tmp_path / "0000000000").iterdir())
    assert whole(tmp_path) == [1]
    assert (at.tally.written, at.tally.failed, at.held) == (1, 1, 0)
    error = at.trouble()
    assert error is not None
    assert "Input/output error" in str(error)


def test_an_iteration_that_is_written_again_waits_for_its_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try's part is under way when it is abandoned; what it leaves must not be the second try's."""
    monkeypatch.setattr(writer_threads.os, "cpu_count", lambda: 2)
    gate, write, rename = threading.Event(), os.pwritev, os.rename
    begun = threading.Event()
    calls: list[str] = []

    def held(file: int, pieces: list[memoryview], at: int) -> int:
        calls.append("write")
        begun.set()
        assert gate.wait(60)
        return write(file, pieces, at)

    def noted(old: Path, new: Path) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(part_writer.os, "pwritev", held)
    monkeypatch.setattr(part_writer.os, "rename", noted)
    at = writer(tmp_path, part_bytes=1600)
    at.begin(0, 0, True, 1)
    for site, tensor in tensors(1, 2).items():
        at.put(ShardEntry(site, VALUE, 0, 0, 0, tuple(tensor.shape), ""), LAYOUT, tensor)
    assert begun.wait(60)
    at.abandon()
    step(at, 0)
    time.sleep(0.1)  # for a second thread that does not wait
    assert calls == ["write"]
    gate.set()
    at.close()
    assert calls.count("rename") == 3
    assert whole(tmp_path) == [0]
    assert not list((tmp_path / "0000000000").glob(".*"))
    assert all(torch.equal(of(tmp_path, 0)[s], t) for s, t in tensors(0).items())


def test_parts_are_written_where_the_system_gives_no_second_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start
    begun: list[str] = []

    def refused(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread.name)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(writer_threads.os, "cpu_count", lambda: 2)
    at = writer(tmp_path, part_bytes=1600)
    for number in range(3):
        step(at, number)
    at.close()
    assert whole(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("durable", [False, True])
def test_a_commit_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(file: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        calls.append(f"{old.name} to {new.name}")
        rename(old, new)

    monkeypatch.setattr(part_writer.os, "fsync", synced)
    monkeypatch.setattr(part_writer.os, "rename", renamed)
    at = writer(tmp_path / "run", durable=durable)
    step(at, 0)
    at.close()
    name, folder = "00000-000-of-001.safetensors", "0000000000"
    steps = ["run", f".{name}.tmp", f".{name}.tmp to {name}", folder]
    assert calls == (steps if durable else steps[2:3])


@pytest.mark.parametrize("left", ["a file", "a link"])
def test_a_draft_is_a_file_of_the_writers_own(tmp_path: Path, left: str) -> None:
    """A killed writer's draft is replaced; a link that somebody put there is not written through."""
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    at = writer(tmp_path / "run")
    draft = tmp_path / "run" / "0000000000" / ".00000-000-of-001.safetensors.tmp"
    draft.parent.mkdir()
    if left == "a link":
        draft.symlink_to(theirs)
    else:
        draft.write_bytes(b"x" * 100_000)
    step(at, 0)
    at.close()
    assert theirs.read_text() == "precious"
    assert whole(tmp_path / "run") == [0]
    assert not any(f.is_symlink() for f in draft.parent.iterdir())


def test_every_dtype_and_form_comes_back(tmp_path: Path) -> None:
    at = writer(tmp_path)
    given = {str(d): torch.arange(24).reshape(4, 6).to(d) for d in DTYPE_NAMES}
    given["turned"] = torch.randn(6, 4).t()
    given["strided"] = torch.randn(8, 12)[::2, ::3]
    given["none"] = torch.empty(0, 4)
    given["one"] = torch.tensor(3.5)
    given["large"] = torch.randn(SLAB_BYTES // 8 + 3)
    step(at, 0, given)
    step(at, 1, {n: t.clone() for n, t in given.items()}, owned=True)
    step(at, 2, given, owned=True)  # of larger storages, which must not be kept
    at.close()
    for number in range(3):
        found = of(tmp_path, number)
        assert set(found) == set(given)
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(
                found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            )


def test_a_tensor_may_be_overwritten_at_once(tmp_path: Path) -> None:
    at = writer(tmp_path)
    tensor = torch.zeros(64, 4)
    for number in range(20):
        tensor.fill_(number)
        at.begin(number, 0, True, 1)
        at.put(ShardEntry("x", VALUE, 0, 0, 0, (64, 4), ""), LAYOUT, tensor)
        tensor.fill_(-1)
        at.finish()
    at.close()
    assert [float(of(tmp_path, n)["x"].unique()) for n in range(20)] == list(range(20))


def test_of_a_replica_only_the_checksum_is_written(tmp_path: Path) -> None:
    at, tensor = writer(tmp_path), torch.randn(5, 4)
    at.begin(0, 0, True, 1)
    at.put(ShardEntry("x", REPLICA, 0, 0, 0, (5, 4), ""), LAYOUT, tensor)
    at.put(ShardEntry("y", VALUE, 0, 0, 0, (5, 4), ""), LAYOUT, tensor)
    at.finish()
    at.close()
    part = read_part(complete_parts(tmp_path / "0000000000", [0])[0][0])  # type: ignore[index]
    first, second = part.index.entries
    assert list(part.where) == [second.tensor]
    assert first.checksum == second.checksum == combine_block_checksums(second.blocks)
    assert (first.blocks, second.blocks) == (
        "",
        compute_block_checksums(memoryview(tensor.numpy().tobytes())),
    )
    assert first.dtype == "F32"


def test_an_abandoned_iteration_leaves_nothing(tmp_path: Path) -> None:
    at = writer(tmp_path, part_bytes=1600)
    step(at, 0)
    at.begin(1, 0, True, 1)
    for site, tensor in tensors(1, 5).items():
        at.put(ShardEntry(site, VALUE, 0, 0, 0, (100, 4), ""), LAYOUT, tensor)
    at.abandon()
    step(at, 2)
    at.begin(3, 0, True, 1)  # and never ended
    at.put(ShardEntry("x", VALUE, 0, 0, 0, (100, 4), ""), LAYOUT, torch.ones(100, 4))
    at.close()
    assert whole(tmp_path) == [0, 2]
    assert not list(tmp_path.glob("0000000001/*"))
    assert not list(tmp_path.glob("0000000003/*"))
    assert at.held == 0


# -- memory


@pytest.mark.parametrize("owned", [False, True])
def test_what_is_held_stays_within_the_bound(
    tmp_path: Path, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Semaphore(0)
    _slowly(monkeypatch, gate)
    at = writer(tmp_path, queue_bytes=100_000, part_bytes=30_000)
    feeder = threading.Thread(target=lambda: [step(at, n, tensors(n, 9, 500), owned) for n in range(6)])
    feeder.start()
    while feeder.is_alive():
        gate.release()
        feeder.join(0.002)
    for _ in range(100):
        gate.release()
    at.close()
    assert whole(tmp_path) == list(range(6))
    assert 50_000 < at.greatest <= 100_000
    assert at.tally.waited > 0


def test_a_single_larger_tensor_passes_alone(tmp_path: Path) -> None:
    at = writer(tmp_path, queue_bytes=1000, part_bytes=1 << 20)
    for number in range(3):
        step(at, number)
    at.close()
    assert whole(tmp_path) == [0, 1, 2]
    assert at.greatest <= 1792  # of 1600 bytes, in steps of an eighth


def test_buffers_are_used_again_and_bounded() -> None:
    at = HostBuffers(1 << 20)
    assert at.slab == 1 << 17
    seen = set()
    for _ in range(50):
        one, two = at.take(at.size(40_000, False), False), at.take(at.size(10, False), False)
        seen |= {one.data_ptr(), two.data_ptr()}
        at.give_back(one, False)
        at.give_back(two, False)
    assert len(seen) == 2
    for size in range(40_000, 900_000, 10_000):  # of ever other sizes
        one = at.take(at.size(size, False), False)
        assert size <= one.nbytes <= size * 9 / 8 + 64
        at.give_back(one, False)
        assert at.held + at._idle <= at.most
    assert at.held == 0
    assert at.greatest <= at.most


def test_large_buffers_are_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(host_memory, "HUGE_PAGES", 14)
    monkeypatch.setattr(host_memory, "_load_madvise", lambda: lambda *args: advised.append(args))
    at = HostBuffers(1 << 30)
    for nbytes in (40_000, host_memory.MIN_ADVISED_BYTES + 1):  # of many small tensors, and of a large one
        buffer = at.take(at.size(nbytes, False), False)
        start, length, advice = advised.pop()
        assert buffer.data_ptr() <= start < start + length <= buffer.data_ptr() + buffer.nbytes
        assert (length > buffer.nbytes - 2 * mmap.PAGESIZE, advice) == (True, 14)
        at.give_back(buffer, False)
        assert at.take(buffer.nbytes, False) is buffer
        assert not advised, "once for a buffer"


class Device:
    """What Side uses of a device, on a host; each call is noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: Any) -> Any:
        outer = self

        class Made:
            def wait_stream(self, other: Any) -> None:
                outer.calls.append(f"wait for {other}")

        return Made()

    def current_stream(self, device: Any) -> str:
        return "the model's"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("in")
        yield
        self.calls.append("out")

    def set_device(self, device: Any) -> None:
        self.calls.append(f"device {device}")

    def Event(self) -> Any:
        outer = self

        class Made:
            def record(self, stream: Any) -> None:
                outer.calls.append("record")

            def synchronize(self) -> None:
                outer.calls.append("synchronize")

        return Made()


def test_copies_from_a_device_wait_for_the_model_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors of a host through the interface of a device: the order of calls, not the device, is tested.
    device = Device()
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: device.calls.append("keep"))
    monkeypatch.setattr(
        Tensor, "clone", lambda self, **kw: device.calls.append("clone") or torch.ops.aten.clone(self)
    )
    side, host, tensor = CopyStream(torch.device("cpu"), device), torch.empty(4), torch.arange(4.0)
    side.copy(host, tensor, owned=False)
    assert device.calls == ["clone", "wait for the model's", "in", "out", "keep"]
    device.calls.clear()
    side.copy(host, tensor, owned=True)
    assert "clone" not in device.calls
    side.mark().wait()
    assert device.calls[-3:] == ["record", "device cpu", "synchronize"]
    assert torch.equal(host, tensor)


# -- dropping


def _slowly(monkeypatch: pytest.MonkeyPatch, gate: threading.Semaphore) -> None:
    """A disk that takes a file only when the gate lets one through."""
    rename = os.rename

    def renamed(*args: Any) -> None:
        gate.acquire()
        rename(*args)

    monkeypatch.setattr(part_writer.os, "rename", renamed)


def test_a_writer_says_when_it_would_wait_and_counts_what_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Semaphore(0)
    _slowly(monkeypatch, gate)
    at = writer(tmp_path, queue_bytes=40_000, when_full="drop")
    caplog.set_level(logging.INFO, "megatron_flex.dump")
    taken = []
    for number in range(30):
        if at.would_wait():
            at.drop(number)
        else:
            taken.append(number)
            step(at, number)
    assert taken == list(range(len(taken)))
    assert 0 < len(taken) < 30
    assert at.tally.waited == 0
    for _ in range(30):
        gate.release()
    at.close()
    assert whole(tmp_path) == taken
    assert at.tally.dropped == 30 - len(taken)
    assert any_names(caplog.messages, tmp_path, len(taken), 30 - len(taken), 0)


def test_progress_and_bytes_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_threads, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "megatron_flex.dump")
    first, second = writer(tmp_path), writer(tmp_path, rank=1)
    for at in (first, second):
        for number in range(3):
            step(at, number, tensors(number, 5, 10_000))
            _drain(at)  # an iteration that is written during the next one counts in the line of the first
        at.close()
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 5  # three of the first rank while its files are written, and one at each end
    assert_names(told[1], tmp_path, 2, "1.6 MB")
    assert_names(told[4], tmp_path, 1, 3, "2.4 MB")


# -- broken disks


def _told(at: DumpWriter, act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in found if w.category is FlexWarning]


def _breaks(monkeypatch: pytest.MonkeyPatch, what: str, error: BaseException) -> list[bool]:
    """`os.what` fails as long as the list is not empty."""
    good, broken = getattr(os, what), [True]

    def call(*args: Any, **kwargs: Any) -> Any:
        if broken:
            raise error
        return good(*args, **kwargs)

    monkeypatch.setattr(part_writer.os, what, call)
    return broken


@pytest.mark.parametrize("what", ["open", "pwritev", "fsync", "rename"])
def test_a_full_disk_costs_iterations_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    at = writer(tmp_path, part_bytes=1600, durable=True)
    step(at, 0)
    _drain(at)
    broken = _breaks(monkeypatch, what, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def act() -> None:
        for number in (1, 2, 3):
            step(at, number)
            _drain(at)
        broken.clear()
        step(at, 4)
        at.close()

    told = _told(at, act)
    assert len(told) == 1
    assert_names(told[0], "0000000001", os.strerror(errno.ENOSPC))
    assert whole(tmp_path) == [0, 4]
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name in "123"]
    assert not list(tmp_path.glob("*/.*.tmp"))
    assert (at.tally.written, at.tally.failed, at.held) == (2, 3, 0)


def _drain(at: DumpWriter) -> None:
    """Wait until the thread has nothing to do."""
    assert at._back._wait_until(lambda: not at._back._queue and not at._back._active)


def test_a_failing_later_part_takes_the_earlier_ones_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = writer(tmp_path, part_bytes=1600, on_error="raise")
    at.begin(0, 0, True, 1)
    given = list(tensors(0, 3).items())
    for site, tensor in given[:2]:
        at.put(ShardEntry(site, VALUE, 0, 0, 0, (100, 4), ""), LAYOUT, tensor)
    _drain(at)
    assert [p.name for p in (tmp_path / "0000000000").iterdir()] == ["00000-000.safetensors"]
    _breaks(monkeypatch, "pwritev", OSError(errno.EIO, os.strerror(errno.EIO)))
    at.put(ShardEntry("last", VALUE, 0, 0, 0, (100, 4), ""), LAYOUT, given[2][1])
    at.finish()
    at.close()
    assert not list((tmp_path / "0000000000").iterdir())
    error = at.trouble()
    assert isinstance(error, DumpError)
    assert_names(error, os.strerror(errno.EIO))
    assert error.path == str(tmp_path / "0000000000")
    assert at.trouble() is None


def test_a_small_real_disk_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root mounts a disk, and not everywhere")
    try:
        at = writer(disk / "run")

        def act() -> None:
            for number in range(5):
                step(at, number, tensors(number, 2, 2500))  # 80 kB
                _drain(at)
            shutil.rmtree(disk / "run" / "0000000000")
            step(at, 5, tensors(5, 2, 2500))
            at.close()

        told = _told(at, act)
        assert len(told) == 1
        assert "No space left on device" in told[0]
        assert whole(disk / "run") == [1, 2, 5]
        assert not list(disk.glob("run/*/.*.tmp"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    at = writer(tmp_path)
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
        told = _told(at, lambda: (step(at, 0, tensors(0, 9)), _drain(at), step(at, 1), at.close()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(told) == 1
    assert "File too large" in told[0]
    assert whole(tmp_path) == [1]


def test_a_folder_that_vanishes_or_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = writer(path)
    (path / "0000000001").write_text("not a folder")

    def act() -> None:
        for number in range(6):
            if number == 3:
                shutil.rmtree(path)
            if number == 5:
                path.mkdir()
            step(at, number)
            _drain(at)
        at.close()

    told = _told(at, act)
    assert len(told) == 2  # once for each kind
    assert "Not a directory" in told[0]
    assert "No such file or directory" in told[1]
    assert (at.tally.written, at.tally.failed) == (3, 3)
    assert whole(path) == [5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = writer(tmp_path)
    broken = _breaks(monkeypatch, "open", KeyboardInterrupt())

    def act() -> None:
        step(at, 0)
        _drain(at)
        broken.clear()
        step(at, 1)
        at.close()

    assert "KeyboardInterrupt" in _told(at, act)[0]
    assert whole(tmp_path) == [1]
    assert at.held == 0


def test_what_cannot_be_written_costs_its_iteration(tmp_path: Path) -> None:
    at = writer(tmp_path)

    def act() -> None:
        step(at, 0, {"x": torch.ones(3, dtype=torch.complex128), "y": torch.ones(3)})
        at.begin(1, 0, True, 1)
        for _ in range(2):
            at.put(ShardEntry("x", VALUE, 0, 0, 0, (2, 2), ""), LAYOUT, torch.ones(2, 2))
        at.finish()
        step(at, 2)
        at.close()

    told = _told(at, act)
    assert_names(told[0], "torch.complex128")
    assert_names(told[1], "x|value|0|0")
    assert whole(tmp_path) == [2]


def test_a_dead_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_config, "dump_seconds", 0.2)
    gate = threading.Semaphore(0)
    _slowly(monkeypatch, gate)
    at = writer(tmp_path, queue_bytes=3000)
    told = _told(at, lambda: [step(at, n) for n in range(4)] and at.close())
    assert_names(told[0], "0.2 s")
    assert any_names(told, tmp_path, "0.2 s")
    assert at.tally.failed >= 3
    for _ in range(9):
        gate.release()


# -- processes

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from megatron_flex.dump import Dump, DumpWriter, ShardEntry, VALUE
from megatron_flex.layout import replicated

path = Path(sys.argv[1])
at = DumpWriter(path, 0, {}, Dump(path, "x", part_bytes=1600))
rename = os.rename
def slow(*args):
    time.sleep(0.02)
    rename(*args)
os.rename = slow
def step(number, end=True):
    at.begin(number, 0, True, 1)
    for n in range(3):
        entry = ShardEntry(f"site{n}", VALUE, 0, 0, 0, (100, 4), "")
        at.put(entry, replicated("s", "h"), torch.full((100, 4), number + n / 8))
    if end:
        at.finish()
"""


def _script(path: Path, more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + more, str(path)],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ENDS = {
    "returns": "",
    "exits": "sys.exit(0)",
    "forks": """
pid = os.fork()
if pid == 0:
    step(50)
    at.close()
    sys.exit(0)  # with everything that is run at a process's end
assert os.waitpid(pid, 0)[1] == 0
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_was_finished_is_written_when_a_process_ends(tmp_path: Path, end: str) -> None:
    _script(tmp_path, f"for n in range(10): step(n)\nstep(10, False)\n{ENDS[end]}")
    assert whole(tmp_path) == list(range(10))
    assert torch.equal(of(tmp_path, 7)["site1"], torch.full((100, 4), 7.125))
    assert not [p for p in tmp_path.glob("0000000010/*") if p.is_file()]
    assert not (tmp_path / "0000000050").exists()


def test_a_process_of_multiprocessing_writes_what_was_finished(tmp_path: Path) -> None:
    more = """
import multiprocessing as mp
def work():
    global at
    at = DumpWriter(path, 0, {}, Dump(path, "x"))
    for n in range(5):
        step(n)
child = mp.get_context("fork").Process(target=work)
child.start()
child.join()
assert child.exitcode == 0
"""
    _script(tmp_path, more)
    assert whole(tmp_path) == list(range(5))


# -- damage


@pytest.mark.parametrize("where", [0, 8, 40, 300, -1, -700])
def test_a_flipped_bit_is_found(tmp_path: Path, where: int) -> None:
    at = writer(tmp_path)
    step(at, 0)
    at.close()
    file = next(tmp_path.glob("*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[where] ^= 4
    file.write_bytes(bytes(content))
    with pytest.raises((DumpError, AssertionError)):
        contents(file)


@pytest.mark.parametrize("left", [0, 5, 100, 2000, -1])
def test_a_cut_file_is_found(tmp_path: Path, left: int) -> None:
    at = writer(tmp_path)
    step(at, 0)
    at.close()
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:left])
    with raises(DumpError, file):
        read_part(file)
