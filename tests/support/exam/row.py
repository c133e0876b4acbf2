"""What a row of the exam is, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.bugs.bug import Bug, Kind, Patch, State
from tests.support.gpt import Case


@contextmanager
def nothing(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The run as Megatron has it."""
    yield


@dataclass(frozen=True)
class Row:
    """A bug that was reported in public, and where it must show first.

    Attributes:
        name: of the row.
        threads: where it was reported: `owner/repository#number`, the words that follow are printed.
        bug: what is wrong, in one sentence.
        configuration: of the model and the training, in words.
        case: the run that has it; it is compared with one process.
        first: the first site, or parameter, that differs; the beginnings of names that are right.
        cause: a regular expression that what is said must match; empty where the numbers give no cause away.
        kind: of what differs there first.
        patch: plants the bug; `nothing` if the installed Megatron has it.
        mend: mends it, in the clean run.
        clean: the case of the clean run, if it is another one.
        setting: of the training in both runs, by its name in `settings.SETTINGS`.
        clean_setting: of the clean runs, if it is another one.
        replica: a site or parameter, with `.grad` for a gradient, of which ranks hold different copies.
        steps: training steps; with more than one, Megatron's optimizer runs.
        precision: one of `planted.PRECISIONS`.
        tool: what must find it: the comparison of dumps, or `verify()` of the run alone.
        ddp: of DistributedDataParallelConfig, for `verify()`.
    """

    name: str
    threads: tuple[str, ...]
    bug: str
    configuration: str
    case: Case
    first: str | tuple[str, ...]
    cause: str
    kind: Kind = "value"
    patch: Patch = nothing
    mend: Patch = nothing
    clean: Case | None = None
    setting: str = ""
    clean_setting: str | None = None
    replica: str = ""
    steps: int = 1
    precision: str = "fp32"
    tool: Literal["compare", "verify"] = "compare"
    ddp: tuple[tuple[str, Any], ...] = ()

    @property
    def planted(self) -> bool:
        """Whether the installed Megatron does not have the bug."""
        return self.patch is not nothing

    @property
    def expected(self) -> Bug:
        """The row as a planted bug, to which a comparison is held."""
        return Bug(
            self.name,
            "exam",
            self.case,
            self.patch,
            first=self.first,
            kind=self.kind,
            hint=self.cause,
            replica=self.replica,
            steps=self.steps,
        )
