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
MAX_NOTE_BYTES = 1 << 16  # bytes of a note
_CREDENTIALS = struct.Struct("3i")


class NodeConnection:
    """A connection to one other rank of the node."""

    def __init__(self, connected: socket.socket, other: str) -> None:
        self._socket, self.other = connected, other
        connected.settimeout(SECONDS)
        _connections.add(self)

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
            text, fds, _, _ = socket.recv_fds(self._socket, MAX_NOTE_BYTES, 1)
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


class NodeServer:
    """Where the ranks of a node connect to its first one."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: this system has no such sockets.
        """
        self.name = f"megatron_flex-{os.getuid()}-{secrets.token_hex(16)}"
        self._socket = _make_socket()
        self._socket.bind("\0" + self.name)  # no file: the name goes with the process
        self._socket.listen(1024)

    def let_in(self, others: dict[int, str]) -> dict[int, NodeConnection]:
        """The lines to those ranks, all of which have connected already."""
        self._socket.settimeout(60)
        lines: dict[int, NodeConnection] = {}
        while len(lines) < len(others):
            connected, _ = self._socket.accept()
            if _peer_user(connected) != os.getuid():
                connected.close()
                continue
            line = NodeConnection(connected, "a rank of this node")
            number = line.receive()[0]["rank"]
            line.other = others[number]
            lines[number] = line
        return lines

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def connect_to_node(name: str, rank: int, other: str) -> NodeConnection | None:
    """Connect to the door of that name; None if it is not on this node, or another user's."""
    try:
        connecting = _make_socket()
    except (OSError, AttributeError):  # not on this system
        return None
    try:
        connecting.connect("\0" + name)
    except OSError:
        connecting.close()
        return None
    if _peer_user(connecting) != os.getuid():
        connecting.close()
        return None
    line = NodeConnection(connecting, other)
    line.send({"rank": rank})
    return line


def _make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _peer_user(connected: socket.socket) -> int:
    peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(peer)[1])


_connections: weakref.WeakSet[NodeConnection] = weakref.WeakSet()


def _close_after_fork() -> None:
    # A worker that outlives its rank would hide that the rank is gone.
    for line in list(_connections):
        line.close()


os.register_at_fork(after_in_child=_close_after_fork)
