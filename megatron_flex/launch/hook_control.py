"""Hooks go on and off while a model trains: a file, or a signal, says so, and all ranks follow in one step.

The first rank alone looks at the file, in a thread of its own, so that no step waits for a file system.
Between two steps the ranks exchange three flags; only if one is set is there more to say.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from megatron_flex.collectives import max_over_ranks, gather_objects
from megatron_flex.errors import FlexError
from megatron_flex.model import FlexModel
from megatron_flex.runtime.hook_groups import ALL_GROUPS, NO_GROUP, Switches

POLL_SECONDS = 1.0  # between two looks at the file
MAX_CONTROL_BYTES = 1 << 16  # bytes of it
OFF_SIGNAL, ON_SIGNAL = signal.SIGUSR1, signal.SIGUSR2


class Control:
    """Switches groups of hooks between the steps of a training. Every rank makes one and calls it alike.

    The file has words as `flex.select()` takes them, `+steer`, `-dump`, `all`, `none`, with white space
    between, and comments after `#`. It always says everything: of the words that mean a hook the last counts,
    and a hook that none means is as the launcher made it. It may be written, replaced and changed at any
    time; what it says counts once it has stayed the same for two looks. One that is gone, cannot be read or
    says what cannot be changes nothing: the first rank tells why.

    Signals: SIGUSR1 to any rank, or all, takes every hook out; SIGUSR2 puts them back, as the file says by
    then. Both on one rank in one step: the later counts; on several ranks: out. What a script did on these
    signals it still does.

    Args:
        flex: the model with its hooks; the file is held against their groups.
        path: the file, which need not be there yet; None for signals alone.
        seconds: how often it is looked at.

    Raises:
        FlexError: on all ranks: what the file says at the beginning cannot be.
    """

    def __init__(self, flex: FlexModel, path: Path | str | None = None, seconds: float = POLL_SECONDS) -> None:
        self._flex, self._mesh = flex, flex.session.mesh
        self._axes = [axis.name for axis in self._mesh]
        self._first = self._mesh.is_first(self._axes)
        self._path = None if path is None else Path(path).expanduser()
        self._said = Switches()
        self._out, self._steps = False, 0
        self._watcher: _FileWatcher | None = None
        if self._path is not None:
            now = read_control_file(self._path) if self._first else None
            (content, *_) = gather_objects(now, self._mesh, self._axes)
            if content is None:
                self._say(f"{self._path} is not there; until it is all hooks are as they were asked for")
            else:
                self._said = self._read(content)
                self._switch("at the start")
            if self._first:
                self._watcher = _FileWatcher(self._path, now, seconds)
        self._signals = _SignalListener()
        if not self._signals.heard:
            self._say("signals are not heard: Python has them in its main thread alone")

    @property
    def pending(self) -> bool:
        """On the first rank: whether the file says something new, which the next step will hear."""
        return self._watcher is not None and self._watcher.found is not None

    def step_begins(self, iteration: int | None = None) -> None:
        """Between two steps: hear what is new. Collective over the job, one flag each; raises nothing."""
        found = None if self._watcher is None else self._watcher.take()
        out, back = self._signals.take()
        out_now, back_now, read = max_over_ranks([out, back, int(found is not None)], self._mesh)
        when = f"iteration {self._steps if iteration is None else iteration}"
        self._steps += 1
        if not out_now and not back_now and not read:
            return
        why = str(self._path)
        if read:
            ((content,), *_) = gather_objects(found or (None,), self._mesh, self._axes)
            try:
                self._said = self._read(content)
            except FlexError as error:
                self._say(f"{when}: {error}; the hooks stay as they are")
                if not out_now and not back_now:
                    return
        if out_now or back_now:
            self._out, why = bool(out_now), (OFF_SIGNAL if out_now else ON_SIGNAL).name
        self._switch(f"{when}, {why}")

    def close(self) -> None:
        """Listen no more; the hooks stay as they are."""
        self._signals.close()
        if self._watcher is not None:
            self._watcher.stop()

    def _read(self, content: bytes | str | None) -> Switches:
        """What was found means: bytes, why there are none, or None for no file.

        Raises:
            FlexError: it cannot be.
        """
        if content is None:
            raise FlexError(f"{self._path} is gone")
        if isinstance(content, str):
            raise FlexError(content)
        try:
            return self._flex.understood(*parse_control_words(content))
        except FlexError as error:
            raise FlexError(f"{self._path}: {error}") from error

    def _switch(self, when: str) -> None:
        registry, before = self._flex.session.registry, self._on()
        registry.switches = Switches((NO_GROUP,)) if self._out else self._said
        after = self._on()
        counts = [f"{group} {on}" for group, on in after.items() if group == ALL_GROUPS or on != before[group]]
        self._say(f"{when}: hooks that are on: {', '.join(counts)}")

    def _on(self) -> dict[str, str]:
        """How many hooks of each group are on."""
        switched = self._flex.session.registry.switches
        groups = {**self._flex.groups, ALL_GROUPS: [e.hook for e in self._flex.session.registry.entries]}
        return {
            name: f"{sum(switched.takes(h.tags, h.enabled) for h in hooks)} of {len(hooks)}"
            for name, hooks in groups.items()
        }

    def _say(self, line: str) -> None:
        if self._first:
            sys.stderr.write(f"megatron-flex: {line}\n")
            sys.stderr.flush()


def read_control_file(path: Path) -> bytes | str | None:
    """What is in the file; in words why that cannot be had; None if there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONTROL_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return content if len(content) <= MAX_CONTROL_BYTES else f"{path} has more than {MAX_CONTROL_BYTES} bytes"


def parse_control_words(content: bytes) -> tuple[str, ...]:
    """The words of a control file.

    Raises:
        FlexError: it is no text.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise FlexError("this is no text; write lines such as +steer, -dump, all, none") from error
    return tuple(word for line in text.splitlines() for word in line.partition("#")[0].split())


class _FileWatcher:
    """Looks at a file now and then.

    Attributes:
        found: what it has, once that is new and has stayed so for two looks, and nobody has taken it.
    """

    def __init__(self, path: Path, known: bytes | str | None, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._known = self._last = known
        self.found: tuple[bytes | str | None] | None = None
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron-flex control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            content = read_control_file(self._path)
            with self._lock:
                if content == self._last and content != self._known:
                    self._known, self.found = content, (content,)
                self._last = content

    def take(self) -> tuple[bytes | str | None] | None:
        """What is new, once."""
        with self._lock:
            out, self.found = self.found, None
            return out

    def stop(self) -> None:
        """Look no more; a look that hangs is not waited for."""
        self._done.set()
        self._thread.join(self._seconds)


class _SignalListener:
    """Notes the two signals on this rank, beside whatever else is done on them.

    Attributes:
        heard: whether they can be.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._before: dict[int, Any] = {}
        self.heard = threading.current_thread() is threading.main_thread()
        for number in (OFF_SIGNAL, ON_SIGNAL) if self.heard else ():
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._last = number
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def take(self) -> tuple[int, int]:
        """Whether hooks were to go out, and whether they were to come back, since the last time."""
        last, self._last = self._last, None
        return int(last == OFF_SIGNAL), int(last == ON_SIGNAL)

    def close(self) -> None:
        """Put the handlers back, unless somebody has put others there since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
