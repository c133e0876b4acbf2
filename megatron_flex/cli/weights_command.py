"""`megatron-flex weights`: digests of full parameters, and whether two sets of weights are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.cli.command_options import JsonOption
from megatron_flex.cli.json_output import print_json
from megatron_flex.cli.spinner import spinner
from megatron_flex.weights import compare_weights, digest_weights
from megatron_flex.wording import count_words

weights_app = typer.Typer(
    add_completion=False,
    help="Digest full parameters, and compare two sets of weights.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@weights_app.command()
def digest(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS",
            help="A Hugging Face folder, a dump with parameters (its last iteration), or a Megatron "
            "checkpoint of the format torch_dist.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The JSON file to write.")] = Path(
        "weights.json"
    ),
) -> None:
    """Write the digest of every full parameter.

    The digest is the same for every layout: of a run that --flex-weights-digest FILE digests, of its
    checkpoint, and of the Hugging Face folder that it was loaded from. Tensors are read once, one at a time.
    """
    with spinner(f"reading {source}"):
        digested = digest_weights(source)
    digested.write(out)
    typer.echo(f"{out}: {count_words(len(digested.parameters), 'parameter')} of {digested.source}")


@weights_app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Weights, or a file of digests.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Likewise, in any layout.", show_default=False)],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Accept parameters that only one of the two has.")
    ] = False,
    most: Annotated[int, typer.Option("--rows", metavar="N", help="The number of rows of the table.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare two sets of weights bit for bit; name each parameter that differs, and the cause.

    A and B are Hugging Face folders, dumps, Megatron checkpoints of the format torch_dist, or files of
    digests. Names are those of a GPTModel. The causes: swapped with another parameter, experts, heads or rows
    permuted or repeated, transposed, rounded to a narrower dtype, scaled, few entries, stale (near A, as
    weights of another step are), zero, not finite, unrelated. Weights of two dtypes are compared in the
    narrower one.

    The exit status is 0 if all parameters are equal, 1 if some differ, and 2 if they cannot be compared:
    weights of another architecture, or a damaged file.
    """
    with spinner("reading"):
        comparison = compare_weights(a, b, allow_missing=allow_missing)
    if as_json:
        print_json(comparison.to_json())
    else:
        comparison.to_document(most).print()
    if comparison.exit_status:
        raise typer.Exit(comparison.exit_status)
