"""Who may connect to a person's debugger, which listens. Nobody else delays it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest


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
