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
    differing = [c for c in cells if c.get("upstream")]
    for cell in (c for c in cells if not c.get("upstream")):
        row = kind(str(cell["site"]))
        if row != "(none)":
            rows[row][str(cell["check"])].append(float(str(cell["error"])))
            cases[row].add(cell["case"])
    far = [float(str(c["own" if c.get("upstream") else "error"])) / float(str(c["bound"])) for c in cells]
    good = sum(f <= 1 for f in far)
    lines = [
        f"{len(cells)} cells, {good} in agreement.",
        "",
        "| site | configurations | value | gradient | edit: loss | edit: parameter gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in rows.items():
        columns = [f"{max(found[c]):.0e}" if found.get(c) else "" for c in CHECKS]
        lines.append(f"| `{row}` | {len(cases[row])} | " + " | ".join(columns) + " |")
    for why in dict.fromkeys(str(c["upstream"]) for c in differing):
        mine = [c for c in differing if c["upstream"] == why]
        names = ", ".join(
            f"`{k}`" for k in dict.fromkeys(kind(str(c["site"])) for c in mine) if k != "(none)"
        )
        lines += ["", f"Upstream itself differs from one process in {len(mine)} cells: {why}. At {names}."]
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
