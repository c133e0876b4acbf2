"""The command line: all commands, `megatron-flex run`, and what becomes of errors (one line, exit status 2).

`run` puts torchrun in front of the script runner, in this process.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any

import typer
import typer.core

from megatron_flex.cli.command_group import CommandGroup
from megatron_flex.cli.launch_command import RUNNER_MODULE, torchrun_command
from megatron_flex.cli.spinner import spinner
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.version import __version__


def launch(context: typer.Context) -> None:
    """Start a training script with hooks, by torchrun.

    FLAGS are those of the script and --flex- flags, which --flex-help lists.

    With --dry as the first word, the command starts nothing: it checks the script and the flags, and prints
    the torchrun command.

    For example: megatron-flex run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... --flex-dump out
    """
    words = list(context.args)
    dry = words[:1] == ["--dry"]
    with spinner("loading"):
        command = torchrun_command(words[dry:])
    if dry:
        from megatron_flex.launch.run_check import check_run

        with spinner("checking"):
            lines = check_run(command[command.index(RUNNER_MODULE) + 1 :])
        for line in lines:
            typer.echo(line, err=True)
        typer.echo(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(command[0], command)


def patch(context: typer.Context) -> None:
    """Write hook points and flags into the source of Megatron or fairscale.

    PATH is a checkout's root, an installed package's folder, or a file.

    For example: megatron-flex patch --apply Megatron-LM
    """
    from megatron_flex_patches.command import main  # with LibCST, which other commands do not need

    status = main(context.args, "megatron-flex patch")
    if status:
        raise typer.Exit(status)


class PatchCommand(typer.core.TyperCommand):
    """`patch`, which parses its words itself.

    Attributes:
        rows: each option, and what it does.
    """

    rows = (
        (
            "--check",
            "List which files are patched. Exit status 0: all, 1: not all, 2: a file cannot be patched.",
        ),
        ("--diff", "Print the patch as a diff for git apply, and write nothing."),
        ("--apply", "Apply the patch. Files that are patched already stay as they are."),
        ("--revert", "Remove the patch. The original files are restored byte for byte."),
        ("--help", "Show this message and exit."),
    )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Options"):
            formatter.write_dl(self.rows)


app = typer.Typer(
    name="megatron-flex",
    cls=CommandGroup,
    help="Inspect distributed models: hook points, dumps, statistics, estimates, and where two runs differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command, kind, usage in (
    ("run", launch, typer.core.TyperCommand, "[--dry] [TORCHRUN OPTIONS] SCRIPT [FLAGS]"),
    ("patch", patch, PatchCommand, "--check | --diff | --apply | --revert PATH..."),
):
    app.command(
        name,
        cls=kind,
        options_metavar=usage,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
            "help_option_names": ["--help"],
        },
    )(command)


@app.callback(invoke_without_command=True)
def _top(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _shown(other: Callable[..., None]) -> Callable[..., None]:
    """How a warning is printed: our own in a line without the place in the code."""

    def show(message: Warning | str, category: type[Warning], *about: Any, **more: Any) -> None:
        if issubclass(category, FlexWarning):
            sys.stderr.write(f"megatron-flex: warning: {message}\n")
        else:
            other(message, category, *about, **more)

    return show


def run() -> None:
    """Run the command line. Exit status: 0; 1 where a check found something; 2 where it could not be done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of ASCII shows "?" for a dash, and no traceback
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown(warnings.showwarning)
            app(prog_name="megatron-flex")
    except FlexError as error:
        sys.stderr.write(f"megatron-flex: {error}\n")
        sys.exit(2)
