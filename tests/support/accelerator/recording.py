"""What a simulated device records: host waits, collectives, and what a GPU would not have allowed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

PACKAGE = "megatron_flex"
STAND_INS = f"{PACKAGE}.cpu"  # what lets Megatron run without a GPU is not what is tested
HERE = __name__.rpartition(".")[0]
MODEL, BACKWARD = threading.main_thread().name, "autograd of cuda:0"  # threads that the model runs in
BETWEEN = frozenset({"torch", "numpy", *sys.stdlib_module_names})  # who calls these is who is meant


@dataclass(frozen=True)
class Wait:
    """A time at which the host waited for the device.

    Attributes:
        what: what it waited for, such as "item".
        place: the function of megatron_flex that did it.
    """

    what: str
    place: str


@dataclass(frozen=True)
class Waits:
    """How often a rank's host waited in one step.

    Attributes:
        passes: from the begin of the step until its last backward pass is over.
        end: after that.
    """

    passes: int
    end: int


@dataclass(frozen=True)
class Collective:
    """One operation on a communicator, as far as all its ranks must agree about it.

    Attributes:
        group: the name of the communicator, which is the same on its ranks.
        ranks: its ranks, by their global numbers.
        operation: the name of the operation.
        tensors: shapes and dtypes.
        peers: the sender and the receiver, of a message between two ranks.
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    peers: tuple[int, int] | None = None


@dataclass
class Recording:
    """What was recorded on one rank.

    Attributes:
        waits: of functions of megatron_flex, in order.
        collectives: of anyone, in order.
        violations: what a GPU or NCCL would not have allowed, or what would have been a race.
    """

    waits: list[Wait] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _counting: bool = False
    _in_passes: int = 0

    def wait(self, what: str) -> None:
        """Record that the host waits, if megatron_flex makes it wait, and the model with it."""
        if not self._counting or threading.current_thread().name not in (MODEL, BACKWARD):
            return
        if (place := _caller()) is not None:
            self.waits.append(Wait(what, place))

    def violation(self, text: str) -> str:
        """Record, and return, what would not have been allowed, and who did it."""
        text = f"{text}, in {_caller() or 'other code'}"
        self.violations.append(text)
        return text

    def pass_is_over(self) -> None:
        """Note that a backward pass has ended."""
        self._in_passes = len(self.waits)

    def begin_step(self) -> None:
        """Count the waits from now on."""
        self.waits.clear()
        self._counting, self._in_passes = True, 0

    def pause(self) -> None:
        """Count no more waits."""
        self._counting = False

    def clear(self) -> None:
        """Forget everything."""
        for records in (self.waits, self.collectives, self.violations):
            records.clear()
        self._counting, self._in_passes = False, 0

    def count(self) -> Waits:
        """How often the host waited."""
        return Waits(self._in_passes, len(self.waits) - self._in_passes)


def _caller() -> str | None:
    """The function of megatron_flex that called torch; None if the nearest caller is of another package."""
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in BETWEEN or module.startswith(HERE):
            continue
        if module.partition(".")[0] != PACKAGE or module.startswith(STAND_INS):
            return None
        return f"{module}:{frame.f_code.co_qualname}"
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def differences(logs: Sequence[Sequence[Collective]]) -> list[str]:
    """Where ranks would call the collectives that they share in different orders, which stops NCCL.

    Of two ranks everything counts that both take part in, over all communicators together, for a device has
    one queue. Messages count for each direction by itself.

    Args:
        logs: of each rank, in order of their global numbers.
    """
    out = []
    for low in range(len(logs)):
        for high in range(low + 1, len(logs)):
            for name, pick in _shared(low, high).items():
                ours, theirs = ([c for c in logs[rank] if pick(c)] for rank in (low, high))
                if ours != theirs:
                    at = next(
                        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                        min(len(ours), len(theirs)),
                    )
                    seen = [str(c[at]) if at < len(c) else "nothing" for c in (ours, theirs)]
                    out.append(f"{name} {at}: rank {low} has {seen[0]}, rank {high} has {seen[1]}")
    return out


def _shared(low: int, high: int) -> dict[str, Any]:
    return {
        "collective": lambda c: c.peers is None and {low, high} <= set(c.ranks),
        f"message from {low} to {high}": lambda c: c.peers == (low, high),
        f"message from {high} to {low}": lambda c: c.peers == (high, low),
    }
