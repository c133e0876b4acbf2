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
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an earlier export, and nothing else.")]


def select_iterations(text: str | None, there: list[int], where: str = "the dump") -> list[int]:
    """The iterations that are meant, of those that are there.

    Raises:
        FlexError: it says no numbers, or one that is not there, or nothing is left.
    """
    return there if text is None else select_present(parse_spans(text, "--iterations"), there, where)


def select_names(
    patterns: list[str] | None, there: list[str], where: str = "the dump", layers: str = ""
) -> list[str]:
    """The names that some pattern matches, in their order; all without one.

    One that matches no full name may be what `find_recorded_names` accepts: a module's name, or its end, or a
    GPTModel's name. `layers` is as for that function.

    Raises:
        FlexError: a pattern matches nothing.
    """
    if not patterns:
        return there
    chosen: set[str] = set()
    for word in (word for pattern in patterns for word in pattern.split(",") if word):
        found = [name for name in there if fnmatchcase(name, word)]
        found = found or find_recorded_names(word, there, where, layers)
        if not found:
            raise FlexError(f"nothing in {where} is named {word!r}{suggest_nearest(word, there)}")
        chosen.update(found)
    return [name for name in there if name in chosen]
