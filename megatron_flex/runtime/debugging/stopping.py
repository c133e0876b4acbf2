"""`breakpoint()` in an editing function: a debugger on one rank, while the others wait for what it makes."""

from __future__ import annotations

import hmac
import os
import pdb
import secrets
import selectors
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO, cast

from megatron_flex.collectives import is_leader
from megatron_flex.errors import HookError
from megatron_flex.config import flex_config
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debugging.telling import to_stderr
from megatron_flex.runtime.hooks import HookFunction

TERMINAL = "/dev/tty"


@dataclass(frozen=True, slots=True)
class RunningEdit:
    """The edit that runs on this rank now."""

    hook: HookFunction
    key: Key
    mesh: Mesh


class _CurrentEdit:
    edit: RunningEdit | None = None


@contextmanager
def track_edit(hook: HookFunction, key: Key, mesh: Mesh) -> Iterator[None]:
    """Let `breakpoint` know which edit runs."""
    before, _CurrentEdit.edit = _CurrentEdit.edit, RunningEdit(hook, key, mesh)
    try:
        yield
    finally:
        _CurrentEdit.edit = before


def breakpoint() -> None:
    """Stop in pdb in the editing function that calls it.

    It stops on one rank, the leader of the stage in the first data parallel replica, and the others go on to
    their next collective and wait there, until their process group's timeout. With `run="leader"` what is
    changed in the debugger counts for all ranks. Where every rank runs the edit the others have run theirs:
    then look, and change nothing. `c` goes on; `q` ends the edit with an error, which all ranks raise when
    the step is over.

    pdb has the terminal, if this process may read from it; or with FLEX_DEBUG_PORT a port of localhost.

    Raises:
        HookError: no editing function runs, or there is neither a terminal nor a port.
    """
    now = _CurrentEdit.edit
    if now is None:
        raise HookError("mf.breakpoint() stops in an editing function; elsewhere call Python's breakpoint()")
    if not is_leader(now.mesh) or now.mesh["dp"].coord:
        return
    frame = sys._getframe(1)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    alone = now.hook.run == "leader" or all(now.mesh[a].size == 1 for a in ("tp", "cp"))
    others = (
        "the other ranks wait for what this one returns"
        if alone
        else "the other ranks run the edit too and wait behind it: change nothing here, or take run='leader'"
    )
    at = f"{now.key.site}, iteration {now.key.iteration}, microbatch {now.key.microbatch}"
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
    """The terminal, if this process is in its foreground: one that is not would be stopped by reading."""
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
    """Wait on a port of localhost until somebody connects who types a word that this process tells.

    Anybody on the machine can connect, and a debugger runs what it is told. Others are let go; one that
    connects and says nothing keeps nobody waiting.
    """
    word = secrets.token_hex(8)
    with socket.create_server(("127.0.0.1", port)) as server, selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ, b"")
        to_stderr(f"waiting for a debugger: nc 127.0.0.1 {server.getsockname()[1]}, and type {word}")
        connection = None
        while connection is None:
            connection = _who_knows(word.encode(), server, waiting)
        for key in list(waiting.get_map().values()):
            if key.fileobj not in (server, connection):
                cast(socket.socket, key.fileobj).close()
    connection.setblocking(True)
    reading, writing = connection.makefile("r"), connection.makefile("w")
    connection.close()  # the files hold it
    return reading, writing


def _who_knows(word: bytes, server: socket.socket, waiting: selectors.BaseSelector) -> socket.socket | None:
    """Hear what connections say next; the one that has typed the word, if one has."""
    for key, _ in waiting.select():
        if key.fileobj is server:
            new, _ = server.accept()
            new.setblocking(False)
            waiting.register(new, selectors.EVENT_READ, b"")
            continue
        one = cast(socket.socket, key.fileobj)
        try:  # to the end of the word and its line, and no further: what follows is for the debugger
            came = one.recv(len(word) + 1 - len(key.data))
        except OSError:
            came = b""
        said = key.data + came
        if came and len(said) <= len(word) and b"\n" not in said:
            waiting.modify(one, selectors.EVENT_READ, said)
        elif hmac.compare_digest(said, word + b"\n"):
            return one
        else:
            waiting.unregister(one)
            one.close()
    return None


class _Debugger(pdb.Pdb):
    """pdb on two files, which it closes when it is done."""

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
