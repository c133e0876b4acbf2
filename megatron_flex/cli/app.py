"""The command line: all commands, `megatron-flex run`, and what becomes of errors (one line, exit status 2).

`run` puts torchrun in front of the script runner, in this process.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

import typer

from megatron_flex.cli.command_group import CommandGroup
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.version import __version__

RUNNER_MODULE = "megatron_flex.launch"


def launch(context: typer.Context) -> None:
    """Start a training script with hooks, by torchrun.

    Options in front of SCRIPT are torchrun's, those after it the script's, --flex- flags among them. --dry,
    first of all, only prints the command.

    For example: megatron-flex run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... --flex-dump out
    """
    words = list(context.args)
    dry = words[:1] == ["--dry"]
    command = torchrun_command(words[dry:])
    if dry:
        typer.echo(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(command[0], command)


def torchrun_command(words: Sequence[str]) -> list[str]:
    """The whole command: Python, torchrun's options, the runner, the script and its arguments.

    Raises:
        FlexError: no script is named, or an option is given that leaves no place for the runner.
        SystemExit: torchrun does not know an option; its own words are printed.
    """
    from torch.distributed.run import get_args_parser

    if not words or words[0].startswith("--flex-"):
        what = f"{words[0]} comes before it" if words else "none is named"
        raise FlexError(f"no script, {what}: megatron-flex run [torchrun's options] SCRIPT [flags]")
    found = get_args_parser().parse_args(list(words))
    for name in ("no_python", "run_path"):
        if getattr(found, name, False):
            option = f"--{name.replace('_', '-')}"
            raise FlexError(f"{option}: torchrun would start the script without hooks; leave it out")
    at = len(words) - len(found.training_script_args) - 1
    at -= words[at] != found.training_script  # argparse removes a `--` after it
    options = [o for o in words[:at] if o not in ("-m", "--module", "--")]
    module = ["-m"] if found.module else []
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        RUNNER_MODULE,
        *module,
        *words[at:],
    ]


app = typer.Typer(
    name="megatron-flex",
    cls=CommandGroup,
    help="Look at distributed models: what they dumped, estimates before a run, where two runs differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(
    "run",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
    },
)(launch)


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
