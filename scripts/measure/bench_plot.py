"""Draws what scripts/bench --hooks measured: what a hook adds over the tensor's size, a line for each way.

This draws the tables of a page again:
`python scripts/measure/bench_plot.py build/overhead.md docs/contributing/hooks.png`
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench_hooks_report import LABELS, _versions, added
from bench_report import spread

COLORS = {  # way -> color; the same for a way and the floor that it is measured by
    "clone": "tab:blue",
    "read": "tab:blue",
    "gather": "tab:cyan",
    "flex-model read": "tab:gray",
    "clone of one": "tab:green",
    "selected": "tab:green",
    "local by hand": "tab:orange",
    "local": "tab:orange",
    "linear": "tab:olive",
    "all-gather": "tab:red",
    "general": "tab:red",
    "flex-model edit": "black",
    "statistics": "tab:purple",
    "dump": "tab:brown",
    "trainable": "tab:pink",
}
BY_HAND = {"clone", "gather", "clone of one", "local by hand", "all-gather"}
THEIRS = {"flex-model read", "flex-model edit"}
BAND = "median over rounds with its 95% interval; left out where the interval includes zero"

Lines = dict[str, tuple[list[float], list[dict[str, float]]]]


def lines(runs: list[dict[str, Any]]) -> Lines:
    """Way -> sizes in MiB, and the spread of what a hook of that size adds; smallest first."""
    ordered = sorted(runs, key=lambda run: run["mib"])
    out: Lines = {}
    for name in COLORS:
        there = [run for run in ordered if name in run["ms"]]
        if there:
            out[name] = [run["mib"] for run in there], [spread(added(run, name)) for run in there]
    return out


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG of a result.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    numbers = dict.fromkeys(run["tp"] for run in result["hooks"])
    draw_lines(
        {tp: lines([r for r in result["hooks"] if r["tp"] == tp]) for tp in numbers}, caption(result), path
    )


def read_page(text: str) -> tuple[dict[int, Lines], str]:
    """The lines of each number of ranks, and the caption, from the tables that the benchmark wrote."""
    text = text.partition("<!-- hooks: written by scripts/bench -->")[2].partition("<!-- hooks: end -->")[0]
    ways = {label: name for name, label in LABELS.items() if name in COLORS}
    panels: dict[int, Lines] = {}
    for tp, table in re.findall(r"^(\d+) ranks, added ms of a hook:\n\n((?:\|.*\n)+)", text, re.M):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        sizes = [float(cell.removesuffix(" MiB")) for cell in rows[0] if cell.endswith(" MiB")]
        for label, *cells in rows[2:]:
            if label in ways:
                spreads = [_numbers(cell) for cell in cells[: len(sizes)]]
                panels.setdefault(int(tp), {})[ways[label]] = sizes, spreads
    head = text.strip().partition("\n")[0].partition("; load")[0]
    return panels, f"{textwrap.fill(head.replace('`', ''), 110)}\n{BAND}"


def _numbers(cell: str) -> dict[str, float]:
    return dict(zip(("median", "low", "high"), map(float, re.findall(r"-?[\d.]+", cell)), strict=True))


def draw_lines(panels: dict[int, Lines], title: str, path: Path) -> None:
    """Write a PNG: one panel for each number of ranks, both axes logarithmic.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("error: the plot needs matplotlib: pip install 'megatron-flex[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        1, len(panels), figsize=(5 * len(panels) + 3.5, 6), sharey=True, squeeze=False, layout="constrained"
    )
    for (tp, found), axes in zip(panels.items(), grid[0], strict=True):
        for name, (sizes, spreads) in found.items():
            _line(axes, name, sizes, spreads)
        axes.set(
            xscale="log", yscale="log", xlabel="full tensor, MiB", title=f"{tp} tensor parallel ranks, gloo"
        )
        ticks = sorted({size for sizes, _ in found.values() for size in sizes})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("added to a step by a hook, ms")
    known = {
        label: line for axes in grid[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [LABELS[name].replace("`", "") for name in COLORS]
    figure.legend(
        [known[name] for name in names if name in known],
        [name for name in names if name in known],
        loc="outside right upper",
        title="dashed: hooks by hand\ndotted: flex-model 0.1.0",
        fontsize=8,
    )
    figure.supxlabel(title, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _line(axes: Any, name: str, sizes: list[float], spreads: list[dict[str, float]]) -> None:
    seen = [(x, s) for x, s in zip(sizes, spreads, strict=True) if s["low"] > 0]  # others are within noise
    if not seen:
        return
    places, middle = [x for x, _ in seen], [s["median"] for _, s in seen]
    below = [max(s["median"] - s["low"], 0.0) for _, s in seen]
    above = [max(s["high"] - s["median"], 0.0) for _, s in seen]
    style = "--" if name in BY_HAND else ":" if name in THEIRS else "-"
    axes.errorbar(
        places,
        middle,
        [below, above],
        linestyle=style,
        marker="s" if name in BY_HAND else "^" if name in THEIRS else "o",
        color=COLORS[name],
        label=LABELS[name].replace("`", ""),
        elinewidth=0.7,
        capsize=2,
        markersize=5,
    )


def caption(result: dict[str, Any]) -> str:
    """Under the plot: the command, the machine, versions, and what the bands are."""
    return (
        f"{textwrap.fill(result['command'].replace('`', ''), 110)}\n"
        f"{result['cores']} cores ({result['chip']}), {_versions(result)}, {result['date']}\n"
        f"{BAND}"
    )


if __name__ == "__main__":
    draw_lines(*read_page(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
