"""Hooks in words, as a command line says them: what is read or edited, and where.

`PATTERN`, `PATTERN@gradient`, `PATTERN@positions=-1@heads=0,3`, `PATTERN@mean=s` to read;
`PATTERN=general`, `PATTERN=local`, `PATTERN=linear:4`, `PATTERN=scale=1.01` to edit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_flex.edits.preset_parser import parse
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.runtime.selection import Reduction, Select, CaptureSelection, reduce
from megatron_flex.sites import Pattern, describe_pattern

EDIT_KINDS = ("general", "local", "linear")
SELECTIONS = ("positions", "samples", "heads", "neurons")
REDUCTION_MAKERS: dict[str, Callable[[str], Reduction]] = {
    "mean": reduce.mean,
    "norm": reduce.norm,
    "sum": reduce.sum,
}


@dataclass(frozen=True, slots=True)
class PlannedHook:
    """A hook that is meant.

    Attributes:
        pattern: which sites, as for HookFunction.
        edit: empty to read; `general` for an edit of the whole; `local` for one that runs on a rank's part;
            `linear` for one that needs sums over what is cut; or a preset, as `edits.parse` gives it.
        entries: of a linear edit: how many sums it needs for each slice along the last dim.
        gradient: of the tensor's gradient instead.
        wanted: what is selected and reduced of what is read; None for all of it.
        said: as it was said.
        gathered: whether an edit before it at the place has gathered the whole.
        leads: whether one rank runs the edit, and hands on what it makes.
        asks: whether ranks ask each other behind it if it failed; None: as its edit says.
    """

    pattern: Pattern
    edit: Any = ""
    entries: int = 1
    gradient: bool = False
    wanted: CaptureSelection | None = None
    said: str = ""
    gathered: bool = False
    leads: bool = False
    asks: bool | None = None

    @property
    def kind(self) -> Literal["read", "edit"]:
        return "edit" if self.edit else "read"

    def describe(self) -> str:
        """In words."""
        return self.said or f"{self.kind} {describe_pattern(self.pattern)}"


def parse_read_hook(said: str) -> PlannedHook:
    """A read in words.

    Raises:
        FlexError: what is said behind the pattern is none of what can be said there.
    """
    pattern, *rest = said.split("@")
    gradient = False
    picked: dict[str, Any] = {}
    reduced: Reduction | None = None
    for word in rest:
        name, given, value = word.partition("=")
        if name == "gradient" and not given:
            gradient = True
        elif name in SELECTIONS and value:
            picked[name] = _parse_indices(said, value)
        elif name in REDUCTION_MAKERS and value and reduced is None:
            reduced = REDUCTION_MAKERS[name](value)
        else:
            known = ("gradient", *SELECTIONS, *REDUCTION_MAKERS)
            raise FlexError(
                f"--read {said}: {word!r}{suggest_nearest(name, known)}; behind a pattern say @gradient, "
                f"@{'=, @'.join((*SELECTIONS, *REDUCTION_MAKERS))}="
            )
    if not pattern:
        raise FlexError(f"--read {said!r} names no site; say PATTERN, such as 'decoder.layers.*'")
    wanted = CaptureSelection(Select(**picked), reduced) if picked or reduced is not None else None
    return PlannedHook(pattern, gradient=gradient, wanted=wanted, said=f"read {said}")


def _parse_indices(said: str, value: str) -> slice | list[int]:
    try:
        if ":" in value:
            return slice(*(int(n) if n else None for n in value.split(":")))
        return [int(n) for n in value.split(",")]
    except (ValueError, TypeError):
        raise FlexError(f"--read {said}: {value!r} are no indices; say 3, or 0,3, or -2, or 0:4") from None


def parse_edit_hook(said: str) -> PlannedHook:
    """An edit in words.

    Raises:
        FlexError: no edit is said, or none that is known.
    """
    place, given, what = said.partition("=")
    pattern, _, gradient = place.partition("@")
    if not given or not pattern or gradient not in ("", "gradient"):
        raise FlexError(
            f"--edit {said}: say PATTERN=general, PATTERN=local, PATTERN=linear:4, or a preset such as "
            "PATTERN=scale=1.01; @gradient behind the pattern for an edit of the gradient"
        )
    name, _, count = what.partition(":")
    words = f"edit {said}"
    if name in EDIT_KINDS and (not count or (name == "linear" and count.isdigit() and int(count))):
        return PlannedHook(pattern, name, int(count or 1), bool(gradient), said=words)
    return PlannedHook(pattern, parse(what), gradient=bool(gradient), said=words)
