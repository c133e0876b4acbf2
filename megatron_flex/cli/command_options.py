"""What options of several commands say."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.ranges import parse_spans, select_present
from megatron_flex.sites import find_recorded_names

DumpArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The folder of the dump, which contains run-0000.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
IterationsOption = Annotated[
    str | None,
    typer.Option(
        "--iterations",
        "-i",
        metavar="WHICH",
        help="Only these iterations, such as 100, 100,200 or 0:1000:100.",
        show_default=False,
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an earlier export, but no other folder.")]


def select_iterations(text: str | None, available: list[int], where: str = "the dump") -> list[int]:
    """The iterations that are meant, of those that are there.

    Raises:
        FlexError: it says no numbers, or one that is not there, or nothing is left.
    """
    return available if text is None else select_present(parse_spans(text, "--iterations"), available, where)


def select_names(
    patterns: list[str] | None, available: list[str], where: str = "the dump", layers: str = ""
) -> list[str]:
    """The names that some pattern matches, in their order; all without one.

    One that matches no full name may be what `find_recorded_names` accepts: a module's name, or its end, or a
    GPTModel's name. `layers` is as for that function.

    Raises:
        FlexError: a pattern matches nothing.
    """
    if not patterns:
        return available
    chosen: set[str] = set()
    for word in (word for pattern in patterns for word in pattern.split(",") if word):
        matched = [name for name in available if fnmatchcase(name, word)]
        matched = matched or find_recorded_names(word, available, where, layers)
        if not matched:
            raise FlexError(f"nothing in {where} is named {word!r}{suggest_nearest(word, available)}")
        chosen.update(matched)
    return [name for name in available if name in chosen]
