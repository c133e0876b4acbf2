"""The commands, and what becomes of errors: one line, exit status 2."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from megatron_flex.cli.compare_command import compare
from megatron_flex.cli.dump_command import dump_app as dump
from megatron_flex.cli.plan_command import plan
from megatron_flex.cli.running import launch as launch
from megatron_flex.cli.sites_command import sites
from megatron_flex.cli.stats_command import stats_app as statistics
from megatron_flex.cli.view_command import view
from megatron_flex.errors import FlexError
from megatron_flex.version import __version__

app = typer.Typer(
    name="megatron-flex",
    help="Look at distributed models: what they dumped, what a dump costs, where two runs differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(dump, name="dump")
app.add_typer(statistics, name="stats")
app.command()(sites)
app.command()(view)
app.command()(plan)
app.command()(compare)
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


def run() -> None:
    """Run the command line. Exit status: 0; 1 where a check found something; 2 where it could not be done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of ASCII shows "?" for a dash, and no traceback
    try:
        app(prog_name="megatron-flex")
    except FlexError as error:
        sys.stderr.write(f"megatron-flex: {error}\n")
        sys.exit(2)
