"""A disk of one rank that is full or slow: what is dropped is dropped on all ranks."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_flex as mf
from tests.distributed.test_dump_disks import STEPS, model, trained
from tests.support.pool import run
from tests.support.rank import changes


def broken(what: str, iterations: range) -> None:
    """From now on `os.what` fails on this rank for files of these iterations."""
    from megatron_flex.dump.writer import part_writer

    good = getattr(os, what)

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).parent.name in {f"{n:010d}" for n in iterations}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return good(path, *args, **kwargs)

    changes.setattr(part_writer.os, what, call)


def with_a_full_disk(path: str, on_error: Any) -> dict[str, Any]:
    bare = model()
    for number in range(STEPS):
        trained(bare, number)
    net = model()
    if dist.get_rank() == 1:
        broken("open", range(2, 5))
    raised: list[tuple[int, str]] = []
    number = 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            with mf.attach(net, dumps=mf.Dump(path, ["0"], on_error=on_error)) as flex:
                for number in range(STEPS):
                    try:
                        with flex.step():
                            trained(net, number)
                    except mf.DumpError as error:
                        raised.append((number, str(error)))
                    if dist.get_rank() == 1:  # until the thread has tried
                        _drain(flex)
        except mf.DumpError as error:
            raised.append((STEPS, str(error)))
    same = all(torch.equal(a, b) for a, b in zip(bare.parameters(), net.parameters(), strict=True))
    told = [str(w.message) for w in found if issubclass(w.category, mf.FlexWarning)]
    return {"same": same, "raised": raised, "warned": [t for t in told if "No space left on device" in t]}


def _drain(flex: mf.FlexModel) -> None:
    for dumped in flex.session.sinks.dumps:
        assert dumped._taking is not None
        back = dumped._taking.writer._back
        deadline = time.monotonic() + 60
        while back._queue or back._active:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_full_disk_of_one_rank_costs_iterations_and_a_warning(tmp_path: Path) -> None:
    first, second = run(2, with_a_full_disk, str(tmp_path), "warn")
    assert first["same"]
    assert second["same"]
    assert (first["raised"], second["raised"], first["warned"]) == ([], [], [])
    assert len(second["warned"]) == 1
    assert "0000000002" in second["warned"][0]
    with mf.open_dump(tmp_path) as dump:
        assert dump.iterations == [0, 1, 5, 6, 7]


def test_a_full_disk_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run(2, with_a_full_disk, str(tmp_path), "raise")
    assert first == second
    assert first["same"]
    assert first["warned"] == []
    assert 1 <= len(first["raised"]) <= 3  # failures of steps that are over are raised together
    assert "No space left on device" in first["raised"][0][1]
    assert all(2 <= n <= 5 for n, _ in first["raised"])
    with mf.open_dump(tmp_path) as dump:
        assert dump.iterations == [0, 1, 5, 6, 7]


def with_a_slow_disk(path: str) -> list[int]:
    from megatron_flex.dump.writer import part_writer

    net, gate, rename = model(), threading.Event(), os.rename

    def slow(*args: Any) -> None:
        gate.wait()
        rename(*args)

    if dist.get_rank() == 1:
        changes.setattr(part_writer.os, "rename", slow)
    dump = mf.Dump(path, ["0"], when_full="drop", queue_bytes=2000)
    with mf.attach(net, dumps=dump) as flex:
        for number in range(STEPS):
            with flex.step():
                trained(net, number)
        gate.set()
        taking = flex.session.sinks.dumps[0]._taking
        assert taking is not None
        writer = taking.writer
        _drain(flex)
        assert writer.tally.waited == 0
        dist.barrier()
        with flex.step():
            trained(net, STEPS)
    return [writer.tally.written, writer.tally.dropped, writer.tally.failed]


@pytest.mark.filterwarnings("ignore::megatron_flex.FlexWarning")
def test_iterations_are_dropped_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run(2, with_a_slow_disk, str(tmp_path))
    assert first == second
    written, dropped, failed = first
    assert (written + dropped, failed) == (STEPS + 1, 0)
    assert dropped >= 2  # the queue takes five iterations of 384 bytes
    with mf.open_dump(tmp_path) as dump:
        assert dump.iterations == [*range(written - 1), STEPS]
