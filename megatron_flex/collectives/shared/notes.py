"""Tiny messages between the ranks of a node, over sockets: no collective, and a rank that dies is noticed.

Sending and receiving are system calls, which order memory: what a rank wrote to shared memory before it sent
a note is there for who has received it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import weakref
from typing import Any

from megatron_flex.errors import FlexError

SECONDS = 1800.0  # as torch's collectives wait; a rank that has died is noticed at once
LARGEST = 1 << 16  # bytes of a note
_CREDENTIALS = struct.Struct("3i")


class Line:
    """A connection to one other rank of the node."""

    def __init__(self, connected: socket.socket, other: str) -> None:
        self._socket, self.other = connected, other
        connected.settimeout(SECONDS)
        _lines.add(self)

    def send(self, note: dict[str, Any], fd: int | None = None) -> None:
        """Send a note, and with it what `fd` is open on.

        Raises:
            FlexError: the other rank is gone, or does not read.
        """
        try:
            socket.send_fds(self._socket, [json.dumps(note).encode()], [] if fd is None else [fd])
        except OSError as error:
            raise FlexError(self._lost(error)) from error

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next note, and what was sent with it.

        Raises:
            FlexError: the other rank is gone, or says nothing.
        """
        try:
            text, fds, _, _ = socket.recv_fds(self._socket, LARGEST, 1)
        except OSError as error:
            raise FlexError(self._lost(error)) from error
        if not text:
            raise FlexError(self._lost(None))
        return json.loads(text), (fds[0] if fds else None)

    def close(self) -> None:
        """Hang up; the other notices."""
        self._socket.close()

    def _lost(self, error: OSError | None) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"{self.other} did not say within {SECONDS:g} s that its part of what is read is there; "
                "it hangs, or ended its step without the others"
            )
        return f"{self.other} is gone, whose part of what is read is needed; see what ended it"


class Door:
    """Where the ranks of a node connect to its first one."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: this system has no such sockets.
        """
        self.name = f"megatron_flex-{os.getuid()}-{secrets.token_hex(16)}"
        self._socket = _socket()
        self._socket.bind("\0" + self.name)  # no file: the name goes with the process
        self._socket.listen(1024)

    def let_in(self, others: dict[int, str]) -> dict[int, Line]:
        """The lines to those ranks, all of which have connected already."""
        self._socket.settimeout(60)
        lines: dict[int, Line] = {}
        while len(lines) < len(others):
            connected, _ = self._socket.accept()
            if _user(connected) != os.getuid():
                connected.close()
                continue
            line = Line(connected, "a rank of this node")
            number = line.receive()[0]["rank"]
            line.other = others[number]
            lines[number] = line
        return lines

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def knock(name: str, rank: int, other: str) -> Line | None:
    """Connect to the door of that name; None if it is not on this node, or another user's."""
    try:
        connecting = _socket()
    except (OSError, AttributeError):  # not on this system
        return None
    try:
        connecting.connect("\0" + name)
    except OSError:
        connecting.close()
        return None
    if _user(connecting) != os.getuid():
        connecting.close()
        return None
    line = Line(connecting, other)
    line.send({"rank": rank})
    return line


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user(connected: socket.socket) -> int:
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _forked() -> None:
    # A worker that outlives its rank would hide that the rank is gone.
    for line in list(_lines):
        line.close()


os.register_at_fork(after_in_child=_forked)
