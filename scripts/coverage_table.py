"""Write the README's coverage table from compared cells: `scripts/test --cells FILE`, then this with FILE."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- coverage -->\n", "<!-- /coverage -->"
CHECKS = ("value", "gradient", "edited loss", "edited parameter gradients")


def kind(site: str) -> str:
    """A site with its layer's number folded away."""
    return re.sub(r"layers\.\d+", "layers.N", site).replace("final_norm", "final_layernorm")


def table(cells: list[dict[str, object]]) -> str:
    """The cells as a Markdown table: one row for each kind of site."""
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    cases: dict[str, set[object]] = defaultdict(set)
    for cell in cells:
        row = kind(str(cell["site"]))
        if row != "(none)":
            rows[row][str(cell["check"])].append(float(str(cell["error"])))
            cases[row].add(cell["case"])
    good = sum(float(str(c["error"])) <= float(str(c["bound"])) for c in cells)
    lines = [
        f"{len(cells)} cells, {good} in agreement.",
        "",
        "| site | configurations | value | gradient | edit: loss | edit: parameter gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in rows.items():
        columns = [f"{max(found[c]):.0e}" if found.get(c) else "" for c in CHECKS]
        lines.append(f"| `{row}` | {len(cases[row])} | " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def main(path: str) -> None:
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        sys.exit(f"error: {README.name} has no '{BEGIN.strip()}' ... '{END}' to write between; put them back")
    README.write_text(head + BEGIN + table(json.loads(Path(path).read_text())) + END + tail, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/coverage_table.py FILE, which 'scripts/test --cells FILE' wrote")
    main(sys.argv[1])
