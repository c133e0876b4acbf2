"""`breakpoint()` in an editing function: a debugger on one rank, while the others wait for the result of
the edit.
"""

from __future__ import annotations

import hmac
import os
import pdb
import secrets
import socket  # noqa: TID251
import sys
import time
from types import FrameType
from typing import Any, TextIO

from megatron_flex.collectives import global_rank, is_leader
from megatron_flex.config import flex_config
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import HookFunction


def to_stderr(line: str) -> None:
    """Print a line with this rank's number."""
    sys.stderr.write(f"[flex rank {global_rank()}] {line}\n")  # one write: other ranks write to it too
    sys.stderr.flush()


TERMINAL = "/dev/tty"
TYPING = 30.0  # seconds for a connection to send the token; the connection is closed afterwards


RunningEdit = tuple[HookFunction, Key, Mesh]  # the edit that runs on this rank now


class CurrentEdit:
    """Tells `breakpoint` which edit runs.

    Attributes:
        edit: the edit; None while none runs.
    """

    edit: RunningEdit | None = None


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
        >>> edit = HookFunction("decoder.layers.2", look, run="once")
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
        in_foreground = os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        in_foreground = False
    if not in_foreground:
        os.close(descriptor)
        return None
    return os.fdopen(os.dup(descriptor), "r"), os.fdopen(descriptor, "w")


def _served(port: int) -> tuple[TextIO, TextIO]:
    """Wait on a port of localhost until a connection sends the token that this process prints.

    Every user of the machine can connect, and pdb runs any code. Connections have their turn one after the
    other; one that sends something else, or does not send the token in TYPING seconds, is closed.
    """
    token = secrets.token_hex(8)
    with socket.create_server(("127.0.0.1", port)) as server:
        to_stderr(f"waiting for a debugger: nc 127.0.0.1 {server.getsockname()[1]}, and type {token}")
        while True:
            connection, _ = server.accept()
            if _sends(connection, token.encode() + b"\n"):
                break
            connection.close()
    connection.settimeout(None)
    reading, writing = connection.makefile("r"), connection.makefile("w")
    connection.close()  # the files keep the connection open
    return reading, writing


def _sends(connection: socket.socket, line: bytes) -> bool:
    """Whether a connection sends a line in time; no more is read, as the rest is for the debugger."""
    end, received = time.monotonic() + TYPING, b""
    try:
        while len(received) < len(line) and b"\n" not in received:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            piece = connection.recv(len(line) - len(received))
            if not piece:
                return False
            received += piece
    except OSError:
        return False
    return hmac.compare_digest(received, line)


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
