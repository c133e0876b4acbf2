"""Switches hooks on and off during training, by a file or a signal; all ranks switch at the same step.

Only the first rank reads the file, in a separate thread, so that no step waits for a file system. Between two
steps the ranks exchange three flags; they communicate further only if one flag is set.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from megatron_flex.collectives import broadcast_object, max_over_ranks
from megatron_flex.errors import FlexError
from megatron_flex.model import FlexModel
from megatron_flex.runtime.hook_groups import ALL_GROUPS, NO_GROUP, Switches

POLL_SECONDS = 1.0  # between two reads of the file
MAX_CONTROL_BYTES = 1 << 16  # maximum size of the file
OFF_SIGNAL, ON_SIGNAL = signal.SIGUSR1, signal.SIGUSR2


class Control:
    """Switches groups of hooks between training steps. Every rank creates one and makes the same calls.

    The file contains words as in `flex.select()`: `+steer`, `-dump`, `all`, `none`, separated by white
    space, with comments after `#`. The file defines the complete state: the last word that matches a hook
    applies, and a hook that no word matches keeps its state from the launch. The file may be written,
    replaced and changed at any time; its content takes effect when two successive reads agree. A file that
    is missing, unreadable or invalid changes nothing, and the first rank prints the reason.

    Signals: SIGUSR1 to one or more ranks switches every hook off; SIGUSR2 switches the hooks on again,
    according to the current file. If one rank receives both in one step, the later one applies; if several
    ranks receive different signals, the hooks are switched off. Existing signal handlers are still called.

    Args:
        flex: the model with its hooks; the words of the file are validated against their groups.
        path: the file, which need not exist yet; None for signals alone.
        seconds: the time between two reads of the file.

    Raises:
        FlexError: on all ranks: the file is invalid at the beginning.

    Examples:
        >>> from megatron_flex.launch.hook_control import Control
        >>> edit = HookFunction("decoder.layers.2", edits.scale(2.0), groups=["steer"])
        >>> handle = flex.register_forward_hook(edit)
        >>> control = Control(flex, "control")  # then, in a shell: echo "-steer" > control
        >>> control.step_begins()
        >>> control.close()
    """

    def __init__(
        self, flex: FlexModel, path: Path | str | None = None, seconds: float = POLL_SECONDS
    ) -> None:
        self._flex, self._mesh = flex, flex.session.mesh
        self._registry = flex.session.registry
        self._axes = [axis.name for axis in self._mesh]
        self._first = self._mesh.is_first(self._axes)
        self._path = None if path is None else Path(path).expanduser()
        self._switches = Switches()
        self._off, self._steps = False, 0
        self._watcher: _FileWatcher | None = None
        if self._path is not None:
            now = read_control_file(self._path) if self._first else None
            (content,) = broadcast_object((now,), self._mesh)
            if content is None:
                self._print(f"{self._path} does not exist yet; until it does, all hooks stay as configured")
            else:
                self._switches = self._read(content)
                self._switch("at the start")
            if self._first:
                self._watcher = _FileWatcher(self._path, now, seconds)
        self._signals = _SignalListener()
        if not self._signals.heard:
            self._print("signals are not heard: Python has them in its main thread alone")

    @property
    def pending(self) -> bool:
        """On the first rank: whether the file has changed, so that the next step will apply it."""
        return self._watcher is not None and self._watcher.change is not None

    def step_begins(self, iteration: int | None = None) -> None:
        """Apply changes between two steps. Collective over the job, with three flags; raises nothing.

        Examples:
            >>> from megatron_flex.launch.hook_control import Control
            >>> control = Control(flex)
            >>> for iteration in range(2):
            ...     control.step_begins(iteration)
            ...     train_step(chunks)
            >>> control.close()
        """
        change = None if self._watcher is None else self._watcher.take()
        out, back = self._signals.take()
        out_now, back_now, read = max_over_ranks([out, back, int(change is not None)], self._mesh)
        when = f"iteration {self._steps if iteration is None else iteration}"
        self._steps += 1
        if not out_now and not back_now and not read:
            return
        why = str(self._path)
        if read:
            (content,) = broadcast_object(change or (None,), self._mesh)
            try:
                self._switches = self._read(content)
            except FlexError as error:
                self._print(f"{when}: {error}; the hooks stay as they are")
                if not out_now and not back_now:
                    return
        if out_now or back_now:
            self._off, why = bool(out_now), (OFF_SIGNAL if out_now else ON_SIGNAL).name
        self._switch(f"{when}, {why}")

    def close(self) -> None:
        """Stop watching the file and the signals; the hooks keep their state.

        Examples:
            >>> from megatron_flex.launch.hook_control import Control
            >>> control = Control(flex)
            >>> control.close()
        """
        self._signals.close()
        if self._watcher is not None:
            self._watcher.stop()

    def _read(self, content: bytes | str | None) -> Switches:
        """Parse the result of `read_control_file`: bytes, an error text, or None for no file.

        Raises:
            FlexError: the content is invalid.
        """
        if content is None:
            raise FlexError(f"{self._path} is gone")
        if isinstance(content, str):
            raise FlexError(content)
        try:
            return self._flex.session.hooks.parse_switches(parse_control_words(content))
        except FlexError as error:
            raise FlexError(f"{self._path}: {error}") from error

    def _switch(self, when: str) -> None:
        registry, before = self._registry, self._on()
        registry.switches = Switches((NO_GROUP,)) if self._off else self._switches
        after = self._on()
        counts = [
            f"{group} {on}" for group, on in after.items() if group == ALL_GROUPS or on != before[group]
        ]
        self._print(f"{when}: hooks that are on: {', '.join(counts)}")

    def _on(self) -> dict[str, str]:
        """For each group the number of its active hooks, as text."""
        switched = self._registry.switches
        groups = {**self._flex.groups, ALL_GROUPS: [e.hook for e in self._registry.entries]}
        return {
            name: f"{sum(switched.selects(h.groups, h.enabled) for h in hooks)} of {len(hooks)}"
            for name, hooks in groups.items()
        }

    def _print(self, line: str) -> None:
        if self._first:
            sys.stderr.write(f"megatron-flex: {line}\n")
            sys.stderr.flush()


def read_control_file(path: Path) -> bytes | str | None:
    """The content of the file; a text with the reason if it cannot be read; None if there is no file."""
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
        FlexError: the content is not text.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise FlexError("this is not text; write lines such as +steer, -dump, all, none") from error
    return tuple(word for line in text.splitlines() for word in line.partition("#")[0].split())


class _FileWatcher:
    """Reads a file periodically.

    Attributes:
        change: the new content, once two successive reads agree, until `take` returns it.
    """

    def __init__(self, path: Path, known: bytes | str | None, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._known = self._last = known
        self.change: tuple[bytes | str | None] | None = None
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron-flex control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            content = read_control_file(self._path)
            with self._lock:
                if content == self._last and content != self._known:
                    self._known, self.change = content, (content,)
                self._last = content

    def take(self) -> tuple[bytes | str | None] | None:
        """The new content if there is any; each change is returned once."""
        with self._lock:
            out, self.change = self.change, None
            return out

    def stop(self) -> None:
        """Stop reading, without waiting for a read that hangs."""
        self._done.set()
        self._thread.join(self._seconds)


class _SignalListener:
    """Records the two signals on this rank, and calls the existing handlers too.

    Attributes:
        heard: whether handlers could be installed.
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
        """Whether a signal to switch off, and one to switch on, has arrived since the last call."""
        last, self._last = self._last, None
        return int(last == OFF_SIGNAL), int(last == ON_SIGNAL)

    def close(self) -> None:
        """Restore the previous handlers, unless other code has replaced ours."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
