"""Compares what the quick start's two launches wrote: python scripts/quickstart_compare.py DIR"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from quickstart_data import load
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

TOLERANCE = 1e-5  # relative to the greatest entry


@dataclass(frozen=True)
class Row:
    """One tensor of both runs.

    Attributes:
        name: its site, or what was done to the model whose loss it is.
        shape: the whole's shape; empty for a loss.
        values: both means.
        difference: the greatest difference between entries.
        relative: the same over the greatest entry.
    """

    name: str
    shape: tuple[int, ...]
    values: tuple[float, float]
    difference: float
    relative: float

    @property
    def good(self) -> bool:
        """Whether the two agree; not if anything is not a number."""
        return self.relative <= TOLERANCE


def compare(parallel: dict[str, Tensor], single: dict[str, Tensor]) -> list[Row]:
    """Every tensor of the parallel run against that of one process.

    Raises:
        ValueError: one run has tensors that the other lacks, or of another shape or dtype.
    """
    if parallel.keys() != single.keys():
        raise ValueError(f"only one run has {', '.join(sorted(parallel.keys() ^ single.keys()))}")
    rows = []
    for name, ours in parallel.items():
        truth = single[name]
        if (ours.shape, ours.dtype) != (truth.shape, truth.dtype):
            raise ValueError(f"{name}: {ours.dtype}{[*ours.shape]} here, {truth.dtype}{[*truth.shape]} there")
        difference = (ours - truth).abs().max().item()
        greatest = truth.abs().max().item()
        values = ours.mean().item(), truth.mean().item()
        relative = difference / greatest if greatest else float(difference != 0)
        rows.append(Row(name, tuple(ours.shape), values, difference, relative))
    return rows


def table(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    """Print a table."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        drawn.add_column(heading, no_wrap=True, justify="right" if number else "left")
    for line in lines:
        drawn.add_row(*line)
    Console().print(drawn)


def report(rows: list[Row]) -> bool:
    """Print both tables and the verdict; whether everything agrees."""
    sites = [r for r in rows if r.shape]
    losses = [r for r in rows if not r.shape]
    ends = [(f"{r.difference:.1e}", f"{r.relative:.1e}") for r in rows]
    told = dict(zip((r.name for r in rows), ends, strict=True))
    table(
        ("site", "shape", "difference", "relative"),
        [(r.name, " × ".join(map(str, r.shape)), *told[r.name]) for r in sites],
    )
    print()
    table(
        ("held-out loss", "4 processes", "1 process", "difference", "relative"),
        [(r.name, *(f"{v:.6f}" for v in r.values), *told[r.name]) for r in losses],
    )
    bad = [r.name for r in rows if not r.good]
    print()
    if bad:
        print(f"{len(bad)} of {len(rows)} differ by more than {TOLERANCE:.0e} (relative): {', '.join(bad)}")
    else:
        print(f"all {len(sites)} sites and {len(losses)} losses agree to {TOLERANCE:.0e} relative")
    return not bad


def main(folder: Path) -> int:
    """Compare the files of a folder; the exit status."""
    return 0 if report(compare(load(folder / "parallel"), load(folder / "single"))) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
