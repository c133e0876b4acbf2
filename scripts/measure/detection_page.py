"""The tables of docs/detection.md: a pure function of what docs/detection.json keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
NOT_MEASURED = ""


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The text of each section of the page, by its name."""
    return {
        "right pairs": right_pairs(kept),
        "detected": summary(kept),
        "bugs": bugs(kept),
        "dumps": size(kept),
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def right_pairs(kept: Mapping[str, Any]) -> str:
    """Alarms of right runs, by precision, and how near they came to one."""
    rows = []
    for precision in PRECISIONS:
        found = [
            r
            for key, r in kept["results"].items()
            if key.startswith(f"right/{precision}/") and "error" not in r
        ]
        if not found:
            continue
        alarms = [r for r in found if r["status"]]
        steps = sorted({r["steps"] for r in found})
        closest = max(r["closest"] for r in found)
        tensors = sum(r["tensors"] for r in found)
        rows.append(
            [
                precision,
                str(len(found)),
                ", ".join(map(str, steps)),
                f"{tensors:,}",
                str(len(alarms)),
                f"{closest:.2f}",
            ]
        )
    return table(
        ["precision", "pairs", "steps each", "tensors", "false alarms", "largest error / tolerance"], rows
    )


def of(kept: Mapping[str, Any], name: str, precision: str) -> Mapping[str, Any] | None:
    """The sweep of a bug, if it was measured."""
    found = kept["results"].get(f"bug/{precision}/{name}")
    return None if found is None or "error" in found else found


def least(found: Mapping[str, Any]) -> Sequence[Any] | None:
    """The probe of the least magnitude that was detected."""
    seen = [p for p in found["probes"] if p[1]]
    return min(seen, key=lambda p: p[0]) if seen else None


def summary(kept: Mapping[str, Any]) -> str:
    """How many bugs are detected at their greatest magnitude, where, and with which hint."""
    rows = []
    for precision in PRECISIONS:
        probes = [f["probes"][0] for name in kept["bugs"] if (f := of(kept, name, precision)) is not None]
        if not probes:
            continue
        found = [p for p in probes if p[1]]
        hinted = [p for p in found if p[3] is not None]
        rows.append(
            [
                precision,
                f"{len(found)} of {len(probes)}",
                f"{sum(bool(p[2]) for p in found)} of {len(found)}",
                f"{sum(bool(p[3]) for p in hinted)} of {len(hinted)}",
            ]
        )
    return table(["precision", "detected", "at the right first site", "class and group named"], rows)


def cell(found: Mapping[str, Any] | None, sweep: Sequence[float] | None) -> str:
    """The least magnitude that is detected."""
    if found is None:
        return NOT_MEASURED
    if found["alarm"]:
        return "false alarm"
    probe = least(found)
    if probe is None:
        return f"not at {sweep[1]:.2g}" if sweep else "no"
    mark = "" if probe[2] else " †"
    return (f"{probe[0]:.1e}" if sweep else "yes") + mark


def bugs(kept: Mapping[str, Any]) -> str:
    """All bugs: the least magnitude that is detected, and whether the greatest is named."""
    rows = []
    for name, about in kept["bugs"].items():
        found = {p: of(kept, name, p) for p in PRECISIONS}
        cells = [cell(found[p], about["sweep"]) for p in PRECISIONS]
        named = [f["probes"][0][3] for f in found.values() if f is not None and f["probes"][0][1]]
        hints = "" if None in named or not named else f"{sum(map(bool, named))} of {len(named)}"
        rows.append([about["group"], name, about["measure"] if about["sweep"] else "", *cells, hints])
    return table(["in", "bug", "magnitude", *PRECISIONS, "named"], rows)


def size(kept: Mapping[str, Any]) -> str:
    """Time and memory of comparing large dumps."""
    found = kept.get("size")
    if not found:
        return "Not measured."
    more = found["mib_most"] - found["mib_before"]
    return (
        f"Two dumps of {found['mib']:,} MiB each, one rank each, fp32: {found['seconds']} s "
        f"({found['cpu_seconds']} s of CPU), and {more:,} MiB of memory more than the process had after its "
        f"imports (peak {found['mib_most']:,} MiB). At most a few blocks of one tensor are in memory at a "
        "time."
    )
