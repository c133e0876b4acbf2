"""Who may connect to what listens: ranks of a node, and a person's debugger. Nobody else delays them."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux alone has such sockets")

FC1 = "decoder.layers.0.mlp.linear_fc1"
STRANGERS = (
    b"",
    b"\x00\xff garbage",
    b'{"rank": 1, "tok',
    b'{"rank": 1, "token": "0"}',
    b'{"rank": 1}',
    b"[1]",
)


def connected(name: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(20)
    stranger.connect("\0" + name)
    return stranger


def answer(stranger: socket.socket) -> bytes:
    """What it is told: nothing, once it is closed."""
    try:
        return stranger.recv(100)
    except ConnectionResetError:
        return b""


def dribble(stranger: socket.socket) -> None:
    """Send a byte now and then."""
    for byte in b'{"rank": 1, "token": "0123456789"}':
        try:
            stranger.send(bytes([byte]))
        except OSError:
            return
        time.sleep(0.05)


def read(case: Case) -> Any:
    """A step whose reads are passed in shared memory, with strangers at the door before any rank."""
    import megatron_flex as mf
    from megatron_flex.collectives.transport import node_sockets, shared_memory

    strangers: list[socket.socket] = []
    threads: list[threading.Thread] = []
    boards: list[Any] = []
    opened, make = node_sockets.NodeServer.__init__, shared_memory.SharedMemoryTransport

    def visited(door: Any) -> None:
        opened(door)
        for words in STRANGERS:
            strangers.append(connected(door.name))
            if words:
                strangers[-1].send(words)
        strangers.append(connected(door.name))
        threads.append(threading.Thread(target=dribble, args=(strangers[-1],), daemon=True))
        threads[-1].start()

    def made(*args: Any) -> Any:
        boards.append(make(*args))
        return boards[-1]

    changes.setattr(node_sockets.NodeServer, "__init__", visited)
    changes.setattr(shared_memory, "SharedMemoryTransport", made)
    chunks = ranks.start(case)
    begun = time.monotonic()
    with mf.attach(chunks, [mf.HookFunction(FC1)]) as flex:
        gpt.step(case, chunks, 0)
        seconds = time.monotonic() - begun
        with ranks.counting() as counts:
            gpt.step(case, chunks, 0)
        got = [t.clone() for t in flex.output_dict.get(f"{FC1}:output", ())]
        with flex.hooks(), ranks.counting() as plain:
            gpt.step(case, chunks, 0)
    closed = [answer(stranger) for stranger in strangers]  # each would wait 20 s
    for thread in threads:
        thread.join(10)
    for stranger in strangers:
        stranger.close()
    return got, seconds, closed, dict(counts - plain), len(boards)


def test_strangers_delay_no_step() -> None:
    (leader, other) = run(2, read, Case("tp2", tp=2, layers=1), timeout=60)
    for _, seconds, closed, more, boards in (leader, other):
        assert seconds < 15, "a silent connection delays nobody"
        assert set(closed) == {b""}
        assert len(closed) == len(STRANGERS) + 1
        assert boards == 1
        assert more == {"all_reduce": 1}, "flags at the step's end: what is read goes through shared memory"
    assert len(leader[0]) == 4
    assert all(t.shape[-1] == 2 * gpt.FFN for t in leader[0])
    assert all(torch.equal(a, b) for a, b in zip(leader[0][:2], leader[0][2:], strict=True))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron_flex.collectives.transport import node_sockets

    monkeypatch.setattr(node_sockets, "GREETING", 0.3)
    monkeypatch.setattr(node_sockets, "JOINING", 5.0)
    return node_sockets


def test_a_silent_connection_is_closed_in_time(notes: Any) -> None:
    door = notes.NodeServer()
    silent = connected(door.name)
    gone: list[float] = []
    lines: list[Any] = []

    def come() -> None:
        silent.recv(1)
        gone.append(time.monotonic())
        lines.append(notes.connect_to_node(door.name, door.token, 7, "the first rank"))

    begun = time.monotonic()
    late = threading.Thread(target=come, daemon=True)
    late.start()
    (line,) = door.let_in({7: "rank 7"}).values()
    late.join(5)
    assert 0.2 < gone[0] - begun < 3
    assert line.other == "rank 7"
    lines[0].send({"a": 1})
    assert line.receive() == ({"a": 1}, None)
    door.close()
    assert notes.connect_to_node(door.name, door.token, 7, "the first rank") is None, "it is closed"
    for one in (line, lines[0], silent):
        one.close()


def test_many_silent_connections_are_not_all_kept(notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "GREETING", 60.0)
    monkeypatch.setattr(notes, "WAITING", 4)
    door = notes.NodeServer()
    strangers = [connected(door.name) for _ in range(20)]
    line = notes.connect_to_node(door.name, door.token, 1, "the first rank")
    found = door.let_in({1: "rank 1"})
    assert list(found) == [1]
    assert all(stranger.recv(1) == b"" for stranger in strangers)
    for one in (*strangers, line, *found.values(), door):
        one.close()


def test_a_rank_that_does_not_come_is_named(notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flex import FlexError

    monkeypatch.setattr(notes, "JOINING", 0.5)
    door = notes.NodeServer()
    strangers = [connected(door.name) for _ in range(2)]
    strangers[0].send(json.dumps({"rank": 1, "token": "0" * 32}).encode())
    strangers[1].send(json.dumps({"rank": 2, "token": door.token}).encode())
    with raises(FlexError, "rank 1", "0.5 s", "FLEX_SHARED_BYTES=0"):
        door.let_in({1: "rank 1"})
    assert all(stranger.recv(1) == b"" for stranger in strangers)
    for one in (*strangers, door):
        one.close()


def test_the_name_of_a_door_is_not_its_token(notes: Any) -> None:
    door = notes.NodeServer()
    names = Path("/proc/net/unix").read_text()  # for everybody
    assert door.name in names
    assert door.token not in names
    door.close()


def test_a_debuggers_port_drops_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    from megatron_flex.runtime.debug import edit_debugger

    said: list[str] = []
    monkeypatch.setattr(edit_debugger, "to_stderr", said.append)
    monkeypatch.setattr(edit_debugger, "TYPING", 0.4)
    held: list[Any] = []
    waiting = threading.Thread(target=lambda: held.extend(edit_debugger._served(0)), daemon=True)
    waiting.start()
    while not said:
        time.sleep(0.01)
    found = re.search(r"nc 127\.0\.0\.1 (\d+).*\b([0-9a-f]{16,})$", said[0])
    assert found is not None
    address, token = ("127.0.0.1", int(found[1])), found[2].encode()
    silent = [socket.create_connection(address, timeout=10) for _ in range(6)]
    silent[0].sendall(token[:3])
    silent[1].sendall(token[:-1] + b"x\n")
    begun = time.monotonic()
    assert [s.recv(1) for s in silent] == [b""] * 6
    assert time.monotonic() - begun < 5
    with socket.create_connection(address, timeout=10) as person:
        person.sendall(token + b"\nwords\n")
        waiting.join(5)
        reading, writing = held
        assert reading.readline() == "words\n"
        writing.write("answer\n")
        writing.flush()
        assert person.recv(100) == b"answer\n"
        reading.close()
        writing.close()
    for one in silent:
        one.close()
