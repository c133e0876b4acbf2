"""The page of Megatron's arguments, from tests/data/arguments.toml.

`python -m tests.support.argument_table` prints it, and `scripts/docs` has it in the site.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

CENSUS = Path(__file__).parents[1] / "data" / "arguments.toml"
HEAD = """# Megatron's arguments

What each command line argument of Megatron-LM (megatron-core 0.19) means for hooks.

- **supported**: hook points, layouts and schedules follow the setting. If the setting hides a hook point,
  `flex.sites()` gives the reason, and a hook there raises an error that names the argument to change.
- **refused**: `attach` raises on all ranks, before the first step, and names the argument to change.
- **unaffected**: the setting changes neither which tensors exist nor how they are sharded.

Arguments that need a GPU, Transformer Engine or NCCL have not been run: fp8 and fp4, fused and flash
attention, the op fuser, userbuffers, offloading and the flex dispatcher are classified by reading
Megatron's source.
"""


def read() -> dict[str, Any]:
    """The groups and the fields of the config."""
    return tomllib.loads(CENSUS.read_text(encoding="utf-8"))


def rows(census: dict[str, Any]) -> str:
    """The table in Markdown: first what is supported, then what is refused, with one row for each group."""
    order = ("supported", "refused", "unaffected")
    lines = ["| arguments | status | effect on hook points |", "|---|---|---|"]
    for group in sorted(census["group"], key=lambda g: order.index(g["status"])):
        flags = " ".join(f"`--{flag}`" for flag in group["flags"].split())
        lines.append(f"| **{group['about']}**: {flags} | {group['status']} | {group['effect']} |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    return f"{HEAD}\n{rows(read())}\n"


if __name__ == "__main__":
    print(page(), end="")
