"""Turns the times of scripts/bench into a table: medians, and differences within each round."""

from __future__ import annotations

import math
import statistics
from typing import Any

LABELS = {
    "a": "nothing attached",
    "b": "FlexModel attached, no hook",
    "c": "megatron_flex reads",
    "d": "hooks clone the local shard",
    "e": "flex-model 0.1.0",
    "f": "hand-written gather to rank 0",
    "g": "the bare all-gathers that an edit needs",
    "h": "hand-written edit",
    "i": "megatron_flex edits on every rank",
    "j": "megatron_flex edits on one rank",
}
IDLE_TARGET = 1.01  # (b) over (a)


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles, and the 95% interval of the median by ranks (it assumes no distribution)."""
    ordered = sorted(values)
    count = len(ordered)
    if count == 1:
        return dict.fromkeys(("median", "q1", "q3", "low", "high"), ordered[0])
    q1, median, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    half = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return {"median": median, "q1": q1, "q3": q3, "low": ordered[low], "high": ordered[high]}


def summary(ms: dict[str, list[float]], cpu_ms: dict[str, list[float]]) -> dict[str, Any]:
    """For each variant its times, and how they compare with (a), (e) and the yardstick of the same round.

    The yardstick is the hand-written gather (f) of reads, and the bare gathers (g) of edits.
    """
    yardstick = "f" if "f" in ms else "g"
    out: dict[str, Any] = {}
    for letter, times in ms.items():
        row: dict[str, Any] = {"ms": spread(times)}
        row["ratio"] = spread([t / a for t, a in zip(times, ms["a"], strict=True)])
        row["added_ms"] = spread([t - a for t, a in zip(times, ms["a"], strict=True)])
        row["added_cpu_ms"] = spread([t - a for t, a in zip(cpu_ms[letter], cpu_ms["a"], strict=True)])
        row["less_than_it_ms"] = spread([t - f for t, f in zip(times, ms[yardstick], strict=True)])
        out[letter] = row
    for row in out.values():
        for other in ("e", yardstick):
            base = out[other]["added_ms"]["median"] if other in out else 0.0
            row[f"added_over_{other}"] = row["added_ms"]["median"] / base if base > 0 else None
    return out


def report(result: dict[str, Any]) -> str:
    """The report of a run."""
    rows = result["summary"]
    lines = [_head(result), "", _table(rows), "", *_targets(rows), ""]
    lines += [f"note: {note}" for note in result["notes"]]
    seconds = result["import_seconds"]
    lines.append(
        f"import, median of 5 fresh interpreters: torch {seconds['torch']:.2f} s, torch and megatron_flex "
        f"{seconds['torch_and_megatron_flex']:.2f} s, of which ours {seconds['megatron_flex'] * 1e3:.0f} ms"
    )
    return "\n".join(lines)


def _head(result: dict[str, Any]) -> str:
    s, mib, load = result["settings"], result["mib"], result["load"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return "\n".join(
        [
            f"$ {result['command']}",
            versions,
            f"{result['cores']} cores ({result['chip']}), load {load[0]:.1f} before and {load[1]:.1f} after "
            "(this run's ranks count too)",
            f"TP={s['tp']}, gloo, one thread for each rank, {s['layers']} layers, hidden {s['hidden']}, "
            f"gated MLP {s['ffn']}, {s['seq']} tokens x {s['batch']}, fp32",
            f"edited in each layer: fc1, {mib['fc1']:g} MiB, unsharded"
            if s["edit"]
            else f"read in each layer: fc1, {mib['fc1']:g} MiB, and fc2, {mib['fc2']:g} MiB, unsharded",
            f"{s['steps']} rounds after {s['warmup']} to warm up; a step is forward and backward, "
            "as long as on its slowest rank",
            f"other processes took {_percent(result, 50)} of the machine in the median step, "
            f"{_percent(result, 90)} or more in one of ten",
        ]
    )


def _percent(result: dict[str, Any], rank: int) -> str:
    shares = sorted(share for shares in result["others"].values() for share in shares)
    return f"{shares[(len(shares) - 1) * rank // 100]:.0%}"


def _table(rows: dict[str, Any]) -> str:
    yardstick = "f" if "f" in rows else "g"
    head = [
        "variant",
        "ms (quartiles)",
        "over (a)",
        "added ms",
        f"of ({yardstick})",
        "of (e)",
        "added CPU ms",
    ]
    table = [head]
    for letter, row in sorted(rows.items()):
        ms = row["ms"]
        cells = [f"({letter}) {LABELS[letter]}", f"{ms['median']:.1f} ({ms['q1']:.1f}–{ms['q3']:.1f})"]
        if letter == "a":
            cells += ["1", "", "", "", ""]
        else:
            cells += [_interval(row["ratio"], 3), _interval(row["added_ms"], 1)]
            cells += [_share(row[f"added_over_{yardstick}"]), _share(row["added_over_e"])]
            cells.append(_interval(row["added_cpu_ms"], 1))
        table.append(cells)
    return _markdown(table)


def _markdown(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |" for cells in table
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _interval(value: dict[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _targets(rows: dict[str, Any]) -> list[str]:
    if "g" in rows:
        edit = rows["i"]["less_than_it_ms"]
        return [
            "Ratios and differences are taken within a round: their median, in brackets its 95% interval.",
            f"(i) minus (g), what editing adds to the bare gathers: {_interval(edit, 1)} ms",
        ]
    idle, read = rows["b"]["ratio"], rows["c"]["less_than_it_ms"]
    return [
        "Ratios and differences are taken within a round: their median, in brackets its 95% interval (with",
        "fewer than six rounds: all that was seen). of (f), of (e): added ms over what that one adds.",
        f"target: (b) over (a) at most {IDLE_TARGET}: {_interval(idle, 3)}, {_verdict(idle, IDLE_TARGET)}",
        f"target: (c) adds no more than (f): (c) minus (f) is {_interval(read, 1)} ms, {_verdict(read, 0.0)}",
    ]


def _verdict(value: dict[str, float], bound: float) -> str:
    said = "met" if value["median"] <= bound else "missed"
    sure = value["high"] <= bound or value["low"] > bound
    return said if sure else f"{said}, but the noise of this run would allow either"
