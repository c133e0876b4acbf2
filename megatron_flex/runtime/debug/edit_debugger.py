"""`breakpoint()` in an editing function: a debugger on one rank, while the others wait for the result of
the edit.
"""

from __future__ import annotations

import hmac
import os
import pdb
import secrets
import selectors
import socket  # noqa: TID251
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO, cast

import torch.distributed as dist

from megatron_flex.collectives import is_leader
from megatron_flex.config import flex_config
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import HookFunction


def to_stderr(line: str) -> None:
    """Print a line with this rank's number."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    sys.stderr.write(f"[flex rank {rank}] {line}\n")  # one write: other ranks write to it too
    sys.stderr.flush()


TERMINAL = "/dev/tty"
TYPING = 120.0  # seconds for a connection to send the token; the connection is closed afterwards
WAITING = 16  # connections that may wait at the same time


RunningEdit = tuple[HookFunction, Key, Mesh]  # the edit that runs on this rank now


class CurrentEdit:
    """Tells `breakpoint` which edit runs.

    Attributes:
        edit: the edit; None while none runs.
    """

    edit: RunningEdit | None = None


@contextmanager
def track_edit(hook: HookFunction, key: Key, mesh: Mesh) -> Iterator[None]:
    """Tell `breakpoint` which edit runs, within the context."""
    before, CurrentEdit.edit = CurrentEdit.edit, (hook, key, mesh)
    try:
        yield
    finally:
        CurrentEdit.edit = before


def breakpoint() -> None:
    """Stop in pdb in the editing function that calls this.

    One rank stops, the leader of the stage in the first data parallel replica; the other ranks continue to
    their next collective and wait there, until the timeout of their process group. With `run="once"`, changes
    made in the debugger apply to all ranks. With `run="replicated"` the other ranks have run the edit
    themselves: inspect, but change nothing. `c` continues; `q` ends the edit with an error, which all ranks
    raise at the end of the step.

    pdb uses the terminal, if this process may read from it; or with FLEX_DEBUG_PORT a port of localhost.

    Raises:
        HookError: no editing function runs, or there is neither a terminal nor a port.

    Examples:
        >>> def look(current_module, inputs, save_ctx, modules):
        ...     mf.breakpoint()  # at (Pdb): p inputs.abs().max(), then c
        ...     return inputs
        >>> edit = HookFunction("decoder.layers.2", editing_function=look, run="once")
    """
    now = CurrentEdit.edit
    if now is None:
        raise HookError("mf.breakpoint() stops in an editing function; elsewhere call Python's breakpoint()")
    hook, key, mesh = now
    if not is_leader(mesh) or mesh["dp"].coord:
        return
    frame = sys._getframe(1)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    alone = hook.run == "once" or all(mesh[a].size == 1 for a in ("tp", "cp"))
    others = (
        "the other ranks wait for what this one returns"
        if alone
        else "the other ranks run the edit too and wait after it: change nothing here, or take run='once'"
    )
    at = f"{key.site}, iteration {key.iteration}, microbatch {key.microbatch}"
    to_stderr(f"stopped in {place} at {at}; {others}")
    _stop(frame)


def _stop(frame: FrameType) -> None:
    if flex_config.debug_port >= 0:
        _Debugger(*_served(flex_config.debug_port)).set_trace(frame)
        return
    terminal = _terminal()
    if terminal is None:
        raise HookError(
            "breakpoint(): this process has no terminal to read from; set FLEX_DEBUG_PORT=5678 and connect "
            "with nc 127.0.0.1 5678"
        )
    _Debugger(*terminal).set_trace(frame)


def _terminal() -> tuple[TextIO, TextIO] | None:
    """The terminal, if this process is in its foreground: a background process that reads would be
    stopped.
    """
    try:
        descriptor = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return None
    try:
        mine = os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        mine = False
    if not mine:
        os.close(descriptor)
        return None
    return os.fdopen(os.dup(descriptor), "r"), os.fdopen(descriptor, "w")


def _served(port: int) -> tuple[TextIO, TextIO]:
    """Wait on a port of localhost until a connection sends the token that this process prints.

    Every user of the machine can connect, and pdb runs any code. A connection that sends another token, or
    does not send the token in TYPING seconds, is closed and delays no other; beyond WAITING the oldest is
    closed.
    """
    token = secrets.token_hex(8)
    with socket.create_server(("127.0.0.1", port)) as server, selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ)
        to_stderr(f"waiting for a debugger: nc 127.0.0.1 {server.getsockname()[1]}, and type {token}")
        connection = None
        while connection is None:
            _drop_silent(server, waiting)
            connection = _authenticated(token.encode(), server, waiting)
        for key in list(waiting.get_map().values()):
            if key.fileobj not in (server, connection):
                cast(socket.socket, key.fileobj).close()
    connection.setblocking(True)
    reading, writing = connection.makefile("r"), connection.makefile("w")
    connection.close()  # the files keep the connection open
    return reading, writing


def _drop_silent(server: socket.socket, waiting: selectors.BaseSelector) -> None:
    """Close connections that have not sent the token in time, and the oldest ones if there are too many."""
    new = sorted((k for k in waiting.get_map().values() if k.fileobj is not server), key=lambda k: k.data[0])
    for place, key in enumerate(new):
        if key.data[0] < time.monotonic() or place < len(new) - WAITING:
            waiting.unregister(key.fileobj)
            cast(socket.socket, key.fileobj).close()


def _authenticated(
    token: bytes, server: socket.socket, waiting: selectors.BaseSelector
) -> socket.socket | None:
    """Receive data of the connections; return the connection that has sent the token, if one has."""
    for key, _ in waiting.select(TYPING / 10):
        if key.fileobj is server:
            new, _ = server.accept()
            new.setblocking(False)
            waiting.register(new, selectors.EVENT_READ, (time.monotonic() + TYPING, b""))
            continue
        end, before = key.data
        connection = cast(socket.socket, key.fileobj)
        try:  # only the line of the token: the rest is for the debugger
            new_bytes = connection.recv(len(token) + 1 - len(before))
        except OSError:
            new_bytes = b""
        received = before + new_bytes
        if new_bytes and len(received) <= len(token) and b"\n" not in received:
            waiting.modify(connection, selectors.EVENT_READ, (end, received))
        elif hmac.compare_digest(received, token + b"\n"):
            return connection
        else:
            waiting.unregister(connection)
            connection.close()
    return None


class _Debugger(pdb.Pdb):
    """pdb on two files, which are closed at the end."""

    def __init__(self, reading: TextIO, writing: TextIO) -> None:
        super().__init__(stdin=reading, stdout=writing, nosigint=True, readrc=False)
        self.use_rawinput = False
        self._files: tuple[Any, ...] = (reading, writing)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._close()

    def set_quit(self) -> None:
        super().set_quit()
        self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()
