"""`megatron-flex compare`: where two dumps first differ by more than round-off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.alignment import align_dumps, are_of_both_frameworks
from megatron_flex.cli.align_command import show_alignment
from megatron_flex.cli.command_options import IterationsOption, JsonOption
from megatron_flex.cli.json_output import print_json
from megatron_flex.compare import Comparison
from megatron_flex.compare import compare as run
from megatron_flex.compare.compared_result import describe_result
from megatron_flex.compare.statistics_comparison import find_statistics
from megatron_flex.document import Note, make_console
from megatron_flex.errors import FlexError
from megatron_flex.ranges import parse_spans

MIN_WIDTH_FOR_WORST = 120  # columns of a terminal; with fewer, the table is without the worst elements
WORST_COLUMNS = 3  # the last ones

ToleranceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        "-t",
        metavar="[PATTERN=]X",
        help="The relative difference that correct runs may have: for all hook points, or for those that "
        "match PATTERN. May be repeated. The default is derived from dtype and depth.",
        show_default=False,
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        "--tolerance-from",
        metavar="C",
        help="A dump of a run that differs from A by round-off only, such as A with weights perturbed in the "
        "last digit. The tolerance is derived from its difference from A.",
        show_default=False,
    ),
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write an HTML page with the two models side by side, for dumps of Hugging Face and Megatron.",
        show_default=False,
    ),
]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A dump.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another dump, in any layout.", show_default=False)],
    tolerance: ToleranceOption = None,
    reference: ReferenceOption = None,
    iterations: IterationsOption = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="LR",
            help="The learning rate, which bounds the difference of parameters that were not dumped.",
            show_default=False,
        ),
    ] = None,
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Accept hook points and iterations that only one dump has."),
    ] = False,
    most: Annotated[
        int | None,
        typer.Option(
            "--rows",
            metavar="N",
            help="The number of rows of the table; by default 20 if something diverges, none otherwise.",
            show_default=False,
        ),
    ] = None,
    html: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two dumps; name the first hook point that diverges.

    The dumps are aligned by hook point, iteration, sample and token, and compared in the order of execution,
    gradients after values. The bound for round-off is derived from dtype and depth, unless --tolerance or
    --reference is given. A dump of a Hugging Face model can be compared with one of a Megatron model.

    The exit status is 0 if the dumps are equal or not distinguishable from round-off, 1 if they diverge, and
    2 if they cannot be compared: a dump is damaged, the tokens differ, or only one dump has a hook point or
    an iteration and --allow-missing is not given.
    """
    measured = any(find_statistics(source) is not None for source in (a, b))
    if reference is None and not measured and are_of_both_frameworks(a, b):
        _compare_frameworks(a, b, tolerance, as_json, html)
        return
    if html is not None:
        raise FlexError(
            f"--html {html} is for a dump of a Hugging Face model and one of Megatron; "
            f"megatron-flex view {a} {b} --out {html} writes the page of other dumps"
        )
    comparison = run(
        a,
        b,
        _parse_tolerance(tolerance),
        reference,
        allow_missing=allow_missing,
        iterations=None if iterations is None else parse_spans(iterations, "--iterations"),
        learning_rate=learning_rate,
    )
    _print_and_exit(comparison, most, as_json)


def _print_and_exit(comparison: Comparison, rows: int | None, as_json: bool) -> None:
    """Print a comparison; its status is that of the command."""
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison, rows)
    if comparison.exit_status:
        raise typer.Exit(comparison.exit_status)


def _compare_frameworks(
    a: Path, b: Path, tolerance: list[str] | None, as_json: bool, html: Path | None
) -> None:
    """Compare a dump of a Hugging Face model with one of a Megatron model."""
    parsed = _parse_tolerance(tolerance)
    if isinstance(parsed, dict):
        raise FlexError("--tolerance PATTERN=X is for two dumps of one framework; give one number")
    show_alignment(align_dumps(a, b, parsed).to_json(), as_json, html)


def _parse_tolerance(words: list[str] | None) -> float | dict[str, float] | None:
    if not words:
        return None
    out: dict[str, float] = {}
    for word in words:
        pattern, _, value = word.rpartition("=")
        try:
            out[pattern or "*"] = float(value)
        except ValueError:
            raise FlexError(f"--tolerance {word}: give a number, or PATTERN=NUMBER") from None
    return out["*"] if list(out) == ["*"] else out


def print_comparison(comparison: Comparison, most: int | None = None) -> None:
    """Print the verdict, and below it the table, in which the first divergence is marked.

    Args:
        comparison: the comparison.
        most: so many rows; by default there is a table only where something diverges.
    """
    rows = (
        []
        if most is None and comparison.first is None
        else comparison.table_rows(*([] if most is None else [most]))
    )
    narrow = None if make_console().width >= MIN_WIDTH_FOR_WORST else -WORST_COLUMNS
    shown = describe_result("", comparison.summary(), comparison.HEADS[:narrow], rows)
    if rows and (hidden := len(comparison.rows) - len(rows)):
        more = Note(f"and {hidden:,} more; --rows N shows them, --json has all")
        shown = replace(shown, parts=[*shown.parts, more])
    shown.print()
