"""Short messages between the ranks of a node, over sockets: no collective, and a rank that dies is noticed.

Sending and receiving are system calls, which order memory: what a rank wrote to shared memory before it sent
only the process that received a note has it.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket  # noqa: TID251
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

from megatron_flex.errors import FlexError, describe_error

POLL_SECONDS = 1.0  # seconds until a rank that waits for a note calls its watcher
SECONDS = 1800.0  # as torch's collectives wait; a rank that has died is noticed at once
JOINING = 60.0  # in which the ranks of a node connect to each other
GREETING = 5.0  # in which a new connection sends its rank and token; it is closed otherwise
WAITING = 64  # new connections that may take that time together
MAX_NOTE_BYTES = 1 << 16  # bytes of a note
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # this process or machine has no more
_CREDENTIALS = struct.Struct("3i")


class NodeConnection:
    """A connection to one other rank of the node."""

    def __init__(self, connected: socket.socket, other: str) -> None:
        self._socket, self.other = connected, other
        _connections.add(self)

    def send(self, note: dict[str, Any], fd: int | None = None) -> None:
        """Send a note, and with it what `fd` is open on.

        Raises:
            FlexError: the other rank has ended, or does not read.
        """
        try:
            self._socket.settimeout(SECONDS)
            socket.send_fds(self._socket, [json.dumps(note).encode()], [] if fd is None else [fd])
        except OSError as error:
            raise FlexError(self._lost(error)) from error

    def receive(self, watch: Callable[[], None] | None = None) -> tuple[dict[str, Any], int | None]:
        """The next note, and what was sent with it; `watch` is called now and then until it arrives.

        Raises:
            FlexError: the other rank has ended, or sends nothing.
        """
        end = time.monotonic() + SECONDS
        while True:
            try:
                # The socket's own timeout: `select.select` fails on descriptors above 1,023.
                self._socket.settimeout(SECONDS if watch is None else POLL_SECONDS)
                text, fds, _, _ = socket.recv_fds(self._socket, MAX_NOTE_BYTES, 1)
                break
            except TimeoutError as error:
                if watch is None or time.monotonic() > end:
                    raise FlexError(self._lost(error)) from error
            except OSError as error:
                raise FlexError(self._lost(error)) from error
            watch()
        if not text:
            raise FlexError(self._lost(None))
        return json.loads(text), (fds[0] if fds else None)

    def close(self) -> None:
        """Disconnect; the other notices."""
        self._socket.close()

    def _lost(self, error: OSError | None) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"{self.other} did not report within {SECONDS:g} s that its shards are written; "
                "it hangs, or ended its step without the others"
            )
        if error is not None and not isinstance(error, (BrokenPipeError, ConnectionError)):
            return f"the connection to {self.other} failed ({describe_error(error)})"
        return f"{self.other} has ended, or closed its connection to this rank; see its own error"


class NodeServer:
    """The socket at which the ranks of a node connect to the first one.

    Any process of the machine can connect, for the names of such sockets are no secret. A connection is
    accepted if it is of this user and sends the token, which the ranks have from their process group. A
    connection that sends anything else, or nothing for GREETING seconds, is closed, and delays no other.

    Attributes:
        name: of the socket.
        token: what a rank has to send.
    """

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: this system has no such sockets.
        """
        self.name = f"megatron_flex-{os.getuid()}-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(16)
        self._socket = _make_socket()
        self._socket.bind("\0" + self.name)  # no file: the name goes with the process
        self._socket.listen(1024)
        self._socket.setblocking(False)

    def let_in(self, others: dict[int, str]) -> dict[int, NodeConnection]:
        """The connections to those ranks, all of which have connected already.

        Raises:
            FlexError: one of them did not.
            OSError: this process cannot open more connections.
        """
        lines: dict[int, NodeConnection] = {}
        end = time.monotonic() + JOINING
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._socket, selectors.EVENT_READ)
            try:
                while len(lines) < len(others):
                    self._drop_silent(waiting)
                    if time.monotonic() > end:
                        missing = ", ".join(what for n, what in others.items() if n not in lines)
                        raise FlexError(
                            f"{missing} did not connect within {JOINING:g} s, so that captures can use "
                            "shared memory; run again with FLEX_SHARED_BYTES=0, which uses none"
                        )
                    for key, _ in waiting.select(min(GREETING, end - time.monotonic()) / 4):
                        if key.fileobj is self._socket:
                            self._accept(waiting)
                            continue
                        connected = cast(socket.socket, key.fileobj)
                        waiting.unregister(connected)
                        number = self._greeted(connected, others.keys() - lines.keys())
                        if number is None:
                            connected.close()
                        else:
                            lines[number] = NodeConnection(connected, others[number])
            except BaseException:
                for line in lines.values():
                    line.close()
                raise
            finally:
                for key in list(waiting.get_map().values()):
                    if key.fileobj is not self._socket:
                        cast(socket.socket, key.fileobj).close()
        return lines

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        try:
            connected, _ = self._socket.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return  # it has gone again
        if _peer_user(connected) != os.getuid():
            connected.close()
            return
        connected.setblocking(False)
        waiting.register(connected, selectors.EVENT_READ, time.monotonic() + GREETING)

    def _drop_silent(self, waiting: selectors.BaseSelector) -> None:
        """Close connections that sent nothing in time, and the oldest ones where there are many."""
        new = [k for k in waiting.get_map().values() if k.data is not None]
        new.sort(key=lambda k: float(k.data))
        for place, key in enumerate(new):
            if key.data < time.monotonic() or place < len(new) - WAITING:
                waiting.unregister(key.fileobj)
                cast(socket.socket, key.fileobj).close()

    def _greeted(self, connected: socket.socket, expected: set[int]) -> int | None:
        """The rank that a connection belongs to; None if its greeting is wrong."""
        try:
            peer = json.loads(connected.recv(MAX_NOTE_BYTES))
            token, number = str(peer["token"]), int(peer["rank"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        good = hmac.compare_digest(token.encode(), self.token.encode()) and number in expected
        return number if good else None

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def connect_to_node(name: str, token: str, rank: int, other: str) -> NodeConnection | None:
    """Connect to the server of that name; None if it is on another node, another user's, or refuses."""
    try:
        connecting = _make_socket()
    except (OSError, AttributeError):  # not on this system
        return None
    line = NodeConnection(connecting, other)
    try:
        connecting.settimeout(JOINING)
        connecting.connect("\0" + name)
        if _peer_user(connecting) != os.getuid():
            raise PermissionError(f"the socket {name} is another user's")
        line.send({"rank": rank, "token": token})
    except (OSError, FlexError):
        line.close()
        return None
    return line


def _make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _peer_user(connected: socket.socket) -> int:
    peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(peer)[1])


_connections: weakref.WeakSet[NodeConnection] = weakref.WeakSet()


def _close_after_fork() -> None:
    # A worker that outlives its rank would hide that the rank has ended.
    for line in list(_connections):
        line.close()


os.register_at_fork(after_in_child=_close_after_fork)
