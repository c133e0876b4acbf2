"""`megatron-flex compare`: where two dumps first differ by more than round-off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_flex.cli.options import Json
from megatron_flex.cli.terminal import console, say_json, table
from megatron_flex.compare import Comparison
from megatron_flex.compare import compare as run
from megatron_flex.errors import FlexError

NARROW = 120  # columns; where there are fewer, the worst elements are told of the first divergence only
STYLES = {"diverges": "bold red", "round-off": "green", "equal": "green"}


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A dump.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of any layout.", show_default=False)],
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            "-t",
            metavar="[PATTERN=]X",
            help="How far right runs may differ, as a part of a tensor's norm; of all sites, or of "
            "those that match; may be repeated. Else derived from dtype and depth.",
            show_default=False,
        ),
    ] = None,
    tolerance_from: Annotated[
        Path | None,
        typer.Option(
            metavar="C",
            help="A dump of a run that is right but for round-off; what differs there is the tolerance.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[int, typer.Option("--rows", metavar="N", help="Rows of the table.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare two dumps and name the first site that diverges.

    They are aligned by site, iteration, sample and token, and walked in the order of execution, gradients
    after values. What is round-off follows from dtype and depth, unless it is said or measured.

    Exit status 1 if they diverge; 0 if they are equal, or differ by round-off.
    """
    found = run(a, b, _tolerance(tolerance), tolerance_from)
    if as_json:
        say_json(found.to_json())
    else:
        tell_comparison(console(), found, most)
    if found.exit_status:
        raise typer.Exit(found.exit_status)


def _tolerance(said: list[str] | None) -> float | dict[str, float] | None:
    if not said:
        return None
    out: dict[str, float] = {}
    for word in said:
        pattern, _, value = word.rpartition("=")
        try:
            out[pattern or "*"] = float(value)
        except ValueError:
            raise FlexError(f"--tolerance {word}: say a number, or PATTERN=NUMBER") from None
    return out["*"] if list(out) == ["*"] else out


def tell_comparison(out: Console, found: Comparison, most: int = 20) -> None:
    """The table, the first divergence marked in it, and the verdict below."""
    wide = out.width >= NARROW
    worst = ("worst element", ">A", ">B") if wide else ()
    rows = table("", "site", ">iteration", ">relative", ">tolerance", ">cosine", ">max abs", *worst)
    for row in found.shown(most):
        first = row is found.first
        cells = [
            "→" if first else "",
            row.name,
            str(row.iteration),
            "equal" if row.equal else f"{row.relative:.2e}",
            f"{row.tolerance:.1e}",
            f"{row.cosine:.6f}",
            f"{row.max_abs:.2e}",
        ]
        if wide and row.worst is not None:
            cells += [row.worst.place(), f"{row.worst.a:.6g}", f"{row.worst.b:.6g}"]
        rows.add_row(*cells, style="bold red" if first else "red" if row.diverges else None)
    out.print(rows)
    if (hidden := len(found.rows) - len(found.shown(most))) > 0:
        out.print(f"and {hidden:,} more; --rows N shows them, --json has all")
    out.print()
    for line in found.summary():
        verdict = line.partition(":")[0]
        out.print(line, style=STYLES.get(verdict), soft_wrap=True)
