"""The life cycle that all sinks share: due when a step begins, given its tensors, flushed when it ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_flex.errors import FlexWarning, list_some
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock

MAX_NAMES = 8  # bounds the names in one warning


class SinkPurpose(NamedTuple):
    """What a kind of sink is for, in messages.

    Attributes:
        what: the kind of sink, `the dump`.
        done: what it does to a tensor, `dumped`.
    """

    what: str
    done: str


DUMP_PURPOSE = SinkPurpose("the dump", "dumped")
STATISTICS_PURPOSE = SinkPurpose("the statistics", "measured")
NONFINITE_PURPOSE = SinkPurpose("the search for values that are not finite", "watched")


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a sink has to know of a step that begins.

    Attributes:
        mesh: the ranks that take part in the step.
        microbatches: the number of microbatches on each data parallel rank; 0 if not known yet.
        called: whether the step is a single call of the model outside a schedule.
    """

    mesh: Mesh
    microbatches: int = 0
    called: bool = False


class SinkCycle:
    """The steps of one sink on this rank, and what it has warned of.

    Args:
        purpose: what the sink is for.
        mesh: the run's axes.
        clock: the current step and iteration.
        exact: the names that the user gave literally, and not by a pattern.

    Attributes:
        active: whether the sink records this step.
        first: whether the sink has not recorded a whole step yet.
        iteration: of the step that was recorded last; -1 before.
    """

    def __init__(self, purpose: SinkPurpose, mesh: Mesh, clock: Clock, exact: frozenset[str]) -> None:
        self.active, self.first, self.iteration = False, True, -1
        self._purpose, self._mesh, self._clock, self._exact = purpose, mesh, clock, exact
        self._step = -1
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Record the step that begins."""
        self.active, self._step, self.iteration = True, self._clock.step, self._clock.iteration

    def complete(self) -> None:
        """Note that a whole step is recorded."""
        self.first = False

    def belongs(self, key: Key) -> bool:
        """Whether a tensor belongs to the step that is recorded; if it comes too late, warn."""
        if self.active and key.step == self._step:
            return True
        self.warn_once(
            "late",
            f"gradients of step {key.step} arrived after the step and are not {self._purpose.done}; put "
            "calls whose backward passes come later, or twice, into one `with flex.step():`",
        )
        return False

    def warn_of_missing_backward(self) -> None:
        """Warn that the backward pass of a call did not come before the next call."""
        self.warn_once(
            "late",
            f"the call of iteration {self.iteration} is {self._purpose.done} without gradients: another one "
            "began before its backward pass; take such calls together in `with flex.step():`",
        )

    @property
    def is_strict(self) -> bool:
        """Whether a tensor that cannot be recorded in this step is an error, which all ranks then raise.

        So it is in the first step, at whose end all ranks compare failures, if the user named a site.
        """
        return self.first and bool(self._exact)

    def omits_site(self, name: str, why: str) -> bool:
        """Whether a site that cannot be recorded is omitted with a warning; otherwise it is an error."""
        if self.first and name in self._exact:
            return False
        self.warn_omitted(name, why)
        return True

    def warn_omitted(self, name: str, why: str) -> None:
        """Warn that a tensor is not recorded."""
        self.warn_once(name, f"{name} is left out of {self._purpose.what}: {why}")

    def warn_of_absent(self, names: Iterable[str]) -> None:
        """Warn of the sites at which no tensor was ever recorded, beside those that were warned of."""
        absent = [n for n in names if n not in self._warned]
        if absent and not self.first:
            shown = list_some(absent, MAX_NAMES)
            self.warn_once(
                "absent", f"in the steps that were {self._purpose.done} nothing was recorded at {shown}"
            )

    def warn_once(self, topic: str, text: str, alike: bool = False) -> None:
        """Warn once on this rank; once in all, on the first rank, of what is `alike` on all ranks."""
        if topic not in self._warned:
            self._warned.add(topic)
            if not alike or self._mesh.is_first(a.name for a in self._mesh):
                warnings.warn(text, FlexWarning, stacklevel=3)
