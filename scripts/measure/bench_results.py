"""Where the figures of scripts/bench go: the terminal, a JSON file, a section of a page."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any


def add_result_flags(parser: argparse.ArgumentParser, each: str = "each round") -> None:
    """Add --json, which writes what `each` names, and --write."""
    parser.add_argument("--json", metavar="FILE", help=f"write {each} there")
    parser.add_argument("--write", metavar="PAGE", help="put the table between the page's comments")


def put(page: str, name: str, text: str) -> str:
    """A page with the text between the two comments of that name replaced.

    Raises:
        ValueError: the page does not have them.
    """
    begin, end = f"<!-- {name}: written by scripts/bench -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(
            f"the page has no lines {begin.strip()!r} and {end!r}; put them where the text shall be"
        )
    return f"{before}{begin}{text}\n{end}{after}"


def check_page(args: argparse.Namespace, section: str) -> None:
    """Raise before minutes of measuring, and not after them, if the page has no such section."""
    if args.write:
        put(Path(args.write).read_text(encoding="utf-8"), section, "")


def command_line() -> str:
    """The command that was run, as one types it."""
    return shlex.join(["scripts/bench", *sys.argv[1:]])


def publish(args: argparse.Namespace, section: str, result: dict[str, Any], text: str) -> None:
    """Print the text, and write the result and the section of the page as the flags say."""
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.write:
        page = Path(args.write)
        page.write_text(put(page.read_text(encoding="utf-8"), section, text), encoding="utf-8")
