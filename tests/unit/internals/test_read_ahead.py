"""Reading arrays of a dump in several threads: blocks ahead of their use, and pieces of one array."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.dump.reader import array_sources
from megatron_flex.dump.reader.read_ahead import THREAD_BYTES, read_ahead, read_pieces
from megatron_flex.dump.reader.tensor_assembly import AssembledTensor
from megatron_flex.errors import DumpError
from tests.support import dumps
from tests.support.dumps import WEIGHT, Given, random
from tests.support.messages import raises
from tests.unit.test_dump_reading import MESHES, sites

# --- reading ahead


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_the_next_block_is_read_while_this_one_is_used(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun = [threading.Event() for _ in range(count)]
    threads, used = set(), []

    def read(number: int) -> int:
        threads.add(threading.current_thread())
        begun[number].set()
        return number * number

    for number, found in read_ahead(range(count), read):
        used.append((number, found))
        if number + 1 < count:
            assert begun[number + 1].wait(30), "it is read before it is asked for"
        assert not any(event.is_set() for event in begun[number + 2 :]), "one block ahead, no more"
    assert used == [(n, n * n) for n in range(count)]
    assert len(threads) == min(count, 2), "the caller reads the first block, a thread all others"
    assert not any(thread.is_alive() for thread in threads - {threading.current_thread()})


def test_several_threads_read_and_blocks_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    both = threading.Barrier(2)

    def read(number: int) -> int:
        if number in (1, 2):
            both.wait(30)  # they are read at the same time
        return -number

    assert list(read_ahead(range(6), read, threads=2)) == [(n, -n) for n in range(6)]


def test_small_blocks_are_read_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = dict(read_ahead(range(5), lambda _: threading.current_thread(), lambda number: number != 3))
    assert [thread is threading.current_thread() for thread in found.values()] == [True] * 3 + [False, True]


def test_a_block_that_cannot_be_read_is_an_error_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = read_ahead([4, 2, 0, 1], lambda number: 4 // number)
    used = [next(found), next(found)]
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert used == [(4, 1), (2, 2)]


# --- reading in pieces


def test_pieces_are_read_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many as the array is large; the caller is one of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3)
    threads: list[threading.Thread] = []

    def piece() -> None:
        if threading.current_thread() not in threads:
            threads.append(threading.current_thread())
            together.wait(30)

    read_pieces([piece] * 20, 3 * THREAD_BYTES)
    assert len(threads) == 3
    assert threading.current_thread() in threads
    assert not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())


@pytest.mark.parametrize(("nbytes", "cores"), [(2 * THREAD_BYTES - 1, 3), (3 * THREAD_BYTES, 1)])
def test_the_caller_reads_small_arrays_and_on_one_core(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    used: list[threading.Thread] = []

    def piece() -> None:
        used.append(threading.current_thread())
        time.sleep(0.01)  # for another thread that might begin

    read_pieces([piece] * 5, nbytes)
    assert used == [threading.current_thread()] * 5


def test_the_caller_reads_where_the_system_gives_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", refused)
    used: list[threading.Thread] = []
    read_pieces([lambda: used.append(threading.current_thread())] * 5, 2 * THREAD_BYTES)
    assert used == [threading.current_thread()] * 5


def test_a_thread_that_reads_ahead_reads_pieces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    used: dict[int, set[threading.Thread]] = {0: set(), 1: set()}

    def read(number: int) -> None:
        together = threading.Barrier(1 if number else 2)

        def piece() -> None:
            if threading.current_thread() not in used[number]:
                used[number].add(threading.current_thread())
                together.wait(30)
            time.sleep(0.01)  # for another thread that might begin

        read_pieces([piece] * 8, 2 * THREAD_BYTES)

    assert len(list(read_ahead(range(2), read))) == 2
    assert [len(threads) for threads in used.values()] == [2, 1]
    assert threading.current_thread() not in used[1]


def test_the_first_piece_that_fails_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    both = threading.Barrier(2)
    called: list[int] = []

    def piece(number: int) -> None:
        called.append(number)
        both.wait(30)
        raise DumpError(f"piece {number}")

    with raises(DumpError, "piece 0"):
        read_pieces([partial(piece, n) for n in range(6)], 2 * THREAD_BYTES)
    assert sorted(called) == [0, 1], "those that follow are not read"


@pytest.mark.parametrize(
    "key",
    [
        (),
        (0,),
        (slice(None), slice(1, 7), slice(3, 14, 2)),
        (slice(None), [6, 1, 2], slice(None), slice(2, 7)),
        (1, 3),
        (slice(None), slice(None), 5),
        (slice(None), slice(None), [9, 0, 4]),
    ],
)
def test_an_array_in_pieces_is_the_same_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[Any, ...]
) -> None:
    """Of every kind of layout; with pieces of a few tokens or rows, in several threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    given = sites()
    parameter = {"w": Given(random(2, 16, 24, seed=3), WEIGHT)}
    dumps.write(tmp_path / "d", given, parameters=parameter, mesh=MESHES[3], microbatches=2)
    with mf.open_dump(tmp_path / "d") as dump:
        expected = {name: dump[name][key].torch() for name in given}
        rows = dump.parameter("w")[:, 3:].torch()
    monkeypatch.setattr("megatron_flex.dump.reader.read_ahead.THREAD_BYTES", 1)
    monkeypatch.setattr(array_sources, "PIECE_BYTES", 256)
    pieces: list[int] = []
    region = AssembledTensor.region

    def counted(self: AssembledTensor, *args: Any) -> Tensor:
        pieces.append(1)
        return region(self, *args)

    monkeypatch.setattr(AssembledTensor, "region", counted)
    with mf.open_dump(tmp_path / "d") as dump:
        for name, tensor in expected.items():
            assert torch.equal(dump[name][key].torch(), tensor)
        assert torch.equal(dump.parameter("w")[:, 3:].torch(), rows)
    assert len(pieces) > 2 * len(given) + 2
