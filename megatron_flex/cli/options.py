"""What options of several commands say."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.dump.said import spans_said
from megatron_flex.dump.selection import among
from megatron_flex.errors import FlexError, nearest

DumpPath = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="The dump's folder, which has run-0000 in it.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Iterations = Annotated[
    str | None,
    typer.Option(
        "--iterations",
        "-i",
        metavar="WHICH",
        help="Such as 100, or 100,200, or 0:1000:100.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def chosen_iterations(said: str | None, there: list[int], where: str = "the dump") -> list[int]:
    """The iterations that are meant, of those that are there.

    Raises:
        FlexError: it says no numbers, or one that is not there, or nothing is left.
    """
    if said is None:
        return there
    out: set[int] = set()
    for span in spans_said(said):
        if isinstance(span, slice):
            out |= {n for n in there if among(n, span)}
        elif span in there:
            out.add(span)
        else:
            raise FlexError(f"iteration {span} is not in {where}, which has {_few(there)}")
    if not out:
        raise FlexError(f"no iteration is within {said}; {where} has {_few(there)}")
    return sorted(out)


def _few(there: list[int]) -> str:
    return f"{there[0]} to {there[-1]}" if len(there) > 8 else ", ".join(map(str, there)) or "none"


def chosen_names(patterns: list[str] | None, there: list[str], where: str = "the dump") -> list[str]:
    """The names that some pattern matches, in their order; all without one.

    Raises:
        FlexError: a pattern matches nothing.
    """
    if not patterns:
        return there
    words = [word for pattern in patterns for word in pattern.split(",") if word]
    for word in words:
        if not any(fnmatchcase(name, word) for name in there):
            raise FlexError(f"nothing in {where} is named {word!r}{nearest(word, there)}")
    return [name for name in there if any(fnmatchcase(name, word) for word in words)]
