"""`megatron-flex align`: where a Megatron run differs first from the Hugging Face model it was made of."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flex.alignment import Alignment
from megatron_flex.alignment.alignment_page import write_alignment
from megatron_flex.cli.command_options import JsonOption
from megatron_flex.cli.json_output import print_json
from megatron_flex.cli.launch_command import torchrun_command
from megatron_flex.compare.compared_result import TableRow, describe_result
from megatron_flex.document import make_console
from megatron_flex.errors import FlexError


def align(
    folder: Annotated[
        Path,
        typer.Argument(metavar="HF_FOLDER", help="A folder that save_pretrained wrote.", show_default=False),
    ],
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- [TORCHRUN OPTIONS] SCRIPT [FLAGS]",
            help="The Megatron run, which loads its checkpoint with --load.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON with a list of token ids for each sequence, or with input_ids and attention_mask. "
            "The default is random tokens.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page with the two models side by side.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a Megatron run with a Hugging Face model.

    The command names the first hook point at which the two models differ. It starts the script with torchrun,
    as `megatron-flex run` does. The script loads its checkpoint. Both models then run on the same tokens, and
    the script exits instead of training.

    The exit status is 0 if the models agree, 1 if they differ, and 2 if they could not be compared.

    For example: megatron-flex align llama-3-8b -- --nproc-per-node 8 pretrain_gpt.py --load out ...
    """
    if not (folder / "config.json").exists():
        raise FlexError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "alignment.json"
        flags = ["--flex-align", str(folder), "--flex-align-report", str(report)]
        if tokens is not None:
            flags += ["--flex-align-tokens", str(tokens)]
        command = [*torchrun_command(run or []), *flags]
        sys.stdout.flush()
        done = subprocess.run(command, check=False, stdout=sys.stderr)
        if done.returncode or not report.exists():
            raise FlexError(
                f"the run ended with status {done.returncode} before it was compared; its messages are above"
            )
        alignment: dict[str, Any] = json.loads(report.read_text())
    show_alignment(alignment, as_json, html)


def show_alignment(alignment: dict[str, Any], as_json: bool, html: Path | None) -> None:
    """Print an alignment, and write its page.

    Args:
        alignment: as `Alignment.to_json` returns it.
        as_json: print JSON instead of text.
        html: the file of the page; None for no page.

    Raises:
        Exit: with status 1, if the models differ.
    """
    if html is not None:
        write_alignment(alignment, html)
    if as_json:
        print_json(alignment)
    else:
        print_alignment(alignment)
        if html is not None:
            make_console().print(f"{html}: open it in a browser", soft_wrap=True)
    if not alignment["agrees"]:
        raise typer.Exit(1)


def print_alignment(alignment: dict[str, Any]) -> None:
    """The summary, and below it the two verdicts of each layer where the models differ."""
    rows = [] if alignment["agrees"] else [TableRow(**row) for row in alignment["table"]]
    describe_result("", alignment["summary"], Alignment.HEADS, rows).print()
