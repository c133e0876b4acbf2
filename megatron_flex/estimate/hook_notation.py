"""Hooks as text on a command line: what is read or edited, and where.

`PATTERN`, `PATTERN@gradient`, `PATTERN@positions=-1@heads=0,3`, `PATTERN@mean=s` to read;
`PATTERN=general`, `PATTERN=local`, `PATTERN=linear:4`, `PATTERN=scale=1.01` to edit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_flex.edits.preset_parser import parse
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.ranges import parse_count, parse_numbers
from megatron_flex.runtime.selection import CaptureSelection, Reduction, Select, reduce
from megatron_flex.sites import Pattern, describe_pattern

EDIT_KINDS = ("general", "local", "linear")
SELECTIONS = ("positions", "samples", "heads", "neurons")
REDUCTION_MAKERS: dict[str, Callable[[str], Reduction]] = {
    "mean": reduce.mean,
    "norm": reduce.norm,
    "sum": reduce.sum,
}


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook to estimate.

    Attributes:
        pattern: the sites, as for HookFunction.
        edit: empty to read; `general` for an edit of the full tensor; `local` for one on a local shard;
            `linear` for one that needs sums over sharded dims; or a preset, as `edits.parse` returns it.
        entries: for a linear edit: the number of sums it needs for each slice along the last dim.
        gradient: whether it reads or edits the gradient instead.
        selection: the selection and reduction of a read; None for the full tensor.
        text: the original text.
        gathered: whether an earlier edit at the hook point has gathered the full tensor.
        once: whether one rank runs the edit and sends its result.
        asked: the pattern with what `@` adds, as it was given; without a pattern where that was none.
    """

    pattern: Pattern
    edit: Any = ""
    entries: int = 1
    gradient: bool = False
    selection: CaptureSelection | None = None
    text: str = ""
    gathered: bool = False
    once: bool = False
    asked: str = ""

    @property
    def kind(self) -> Literal["read", "edit"]:
        return "edit" if self.edit else "read"

    def describe(self) -> str:
        return self.text or f"{self.kind} {describe_pattern(self.pattern)}"


def parse_read_hook(text: str, option: str = "--read") -> HookSpec:
    """Parse a read.

    Args:
        text: a pattern with what `@` adds.
        option: of a command line, for errors.

    Raises:
        FlexError: the text after the pattern is not valid.
    """
    pattern, *rest = text.split("@")
    gradient = False
    picked: dict[str, Any] = {}
    reduced: Reduction | None = None
    for word in rest:
        name, given, value = word.partition("=")
        if name == "gradient" and not given:
            gradient = True
        elif name in SELECTIONS and value:
            picked[name] = parse_numbers(value, f"{option} {text}:", from_end=True)
        elif name in REDUCTION_MAKERS and value and reduced is None:
            reduced = REDUCTION_MAKERS[name](value)
        else:
            known = ("gradient", *SELECTIONS, *REDUCTION_MAKERS)
            raise FlexError(
                f"{option} {text}: {word!r}{suggest_nearest(name, known)}; after a pattern write @gradient, "
                f"@{'=, @'.join((*SELECTIONS, *REDUCTION_MAKERS))}="
            )
    if not pattern:
        raise FlexError(f"{option} {text!r} names no site; write PATTERN, such as 'decoder.layers.*'")
    selection = CaptureSelection(Select(**picked), reduced) if picked or reduced is not None else None
    return HookSpec(pattern, gradient=gradient, selection=selection, text=f"read {text}", asked=text)


def parse_edit_hook(text: str) -> HookSpec:
    """Parse an edit.

    Raises:
        FlexError: there is no edit, or it is unknown.
    """
    place, given, what = text.partition("=")
    pattern, _, gradient = place.partition("@")
    if not given or not pattern or gradient not in ("", "gradient"):
        raise FlexError(
            f"--edit {text}: write PATTERN=general, PATTERN=local, PATTERN=linear:4, or a preset such as "
            "PATTERN=scale=1.01; @gradient after the pattern for an edit of the gradient"
        )
    name, _, count = what.partition(":")
    words = f"edit {text}"
    if name in EDIT_KINDS and (not count or name == "linear"):
        outputs = parse_count(count, f"--edit {text}:") if count else 1
        return HookSpec(pattern, name, outputs, bool(gradient), text=words, asked=place)
    return HookSpec(pattern, parse(what), gradient=bool(gradient), text=words, asked=place)
