"""Write the table of docs/arguments.md from arguments.toml: `python -m tests.support.argument_table`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
DATA, PAGE = TESTS / "data" / "arguments.toml", TESTS.parent / "docs" / "arguments.md"
BEGIN, END = "<!-- table of arguments.toml -->", "<!-- end of the table -->"


def read() -> dict[str, Any]:
    """The groups and the fields of the config."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def rows(census: dict[str, Any]) -> str:
    """The table in Markdown: first what is refused and supported, with one row a group."""
    order = ("supported", "refused", "unaffected")
    lines = ["| arguments | status | effect on hook points |", "|---|---|---|"]
    for group in sorted(census["group"], key=lambda g: order.index(g["status"])):
        flags = " ".join(f"`--{flag}`" for flag in group["flags"].split())
        lines.append(f"| **{group['about']}**: {flags} | {group['status']} | {group['effect']} |")
    return "\n".join(lines)


def page(text: str, census: dict[str, Any]) -> str:
    """The text of the page with the table of the census in it."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{rows(census)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
