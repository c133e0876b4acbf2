"""The tables of docs/contributing/comparison.md: a pure function of what tests/data/detection.json keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
NOT_MEASURED, EARLIER = "", " °"  # a mark of cells
COMPARERS = {True: "present", False: "earlier"}
SEEDS = {"right": "of calibration", "held-out": "held out"}


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The text of each section of the page, by its name."""
    return {
        "comparer": comparer(kept),
        "right pairs": right_pairs(kept),
        "detected": summary(kept),
        "bugs": bugs(kept),
        "dumps": size(kept),
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_present(kept: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether the present comparer measured a result."""
    return found.get("comparer") == kept.get("comparer")


def comparer(kept: Mapping[str, Any]) -> str:
    """How many results the present comparer measured, of each part and precision."""
    rows = []
    for kind, name in {**{k: f"correct runs, seeds {s}" for k, s in SEEDS.items()}, "bug": "bugs"}.items():
        for precision in PRECISIONS:
            start = f"{kind}/{precision}/"
            found = [r for k, r in kept["results"].items() if k.startswith(start) and "error" not in r]
            present = sum(is_present(kept, r) for r in found)
            if found:
                rows.append([name, precision, str(present), str(len(found) - present)])
    version = kept.get("comparer", "unknown")
    return table(["part", "precision", f"comparer {version}", "an earlier comparer"], rows)


def right_pairs(kept: Mapping[str, Any]) -> str:
    """Alarms of correct runs, by precision, seeds and comparer, and how near they came to one."""
    rows = []
    for precision in PRECISIONS:
        for kind, seeds in SEEDS.items():
            start = f"{kind}/{precision}/"
            every = [r for k, r in kept["results"].items() if k.startswith(start) and "error" not in r]
            for present, name in COMPARERS.items():
                found = [r for r in every if is_present(kept, r) == present]
                if found:
                    rows.append([precision, seeds, name, *right_row(found)])
    heads = ["pairs", "steps each", "tensors", "false alarms", "largest error / tolerance"]
    return table(["precision", "seeds", "comparer", *heads], rows)


def right_row(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of a row of right pairs."""
    return [
        str(len(found)),
        ", ".join(map(str, sorted({r["steps"] for r in found}))),
        f"{sum(r['tensors'] for r in found):,}",
        str(sum(r["status"] != 0 for r in found)),
        f"{max(r['closest'] for r in found):.2f}",
    ]


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
        for at, known in enumerate(found.values()):
            cells[at] += "" if known is None or is_present(kept, known) else EARLIER
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
        f"imports (peak {found['mib_most']:,} MiB). The peak counts pages of the mapped files, up to "
        f"{2 * found['mib']:,} MiB, which the system takes back when it needs them; a few blocks of one "
        "tensor for each core are in memory besides."
    )
