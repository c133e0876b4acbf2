"""Draws what scripts/bench --hooks measured: what a hook adds over the tensor's size, a line for each way."""

from __future__ import annotations

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


def lines(runs: list[dict[str, Any]]) -> dict[str, tuple[list[float], list[dict[str, float]]]]:
    """Way -> sizes in MiB, and the spread of what a hook of that size adds; smallest first."""
    ordered = sorted(runs, key=lambda run: run["mib"])
    out: dict[str, tuple[list[float], list[dict[str, float]]]] = {}
    for name in COLORS:
        there = [run for run in ordered if name in run["ms"]]
        if there:
            out[name] = [run["mib"] for run in there], [spread(added(run, name)) for run in there]
    return out


def draw(result: dict[str, Any], path: Path) -> None:
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

    numbers = list(dict.fromkeys(run["tp"] for run in result["hooks"]))
    figure, panels = plt.subplots(
        1, len(numbers), figsize=(7 * len(numbers) + 3, 7.5), sharey=True, squeeze=False, layout="constrained"
    )
    for tp, axes in zip(numbers, panels[0], strict=True):
        for name, (sizes, spreads) in lines([r for r in result["hooks"] if r["tp"] == tp]).items():
            _line(axes, name, sizes, spreads)
        axes.set(
            xscale="log", yscale="log", xlabel="tensor, unsharded, MiB", title=f"tensor parallel {tp}, gloo"
        )
        ticks = sorted({run["mib"] for run in result["hooks"]})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("added to a step by a hook, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right upper", title="dashed: by hand, the floor\ndotted: 0.1.0"
    )
    figure.supxlabel(caption(result), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _line(axes: Any, name: str, sizes: list[float], spreads: list[dict[str, float]]) -> None:
    seen = [(x, s) for x, s in zip(sizes, spreads, strict=True) if s["median"] > 0]  # others are within noise
    if not seen:
        return
    places, middle = [x for x, _ in seen], [s["median"] for _, s in seen]
    below = [s["median"] - max(s["low"], s["median"] / 10) for _, s in seen]  # a decade at most: log axes
    above = [s["high"] - s["median"] for _, s in seen]
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
        "median over rounds and its 95% interval; a median that is not above zero, within noise, is left out"
    )
