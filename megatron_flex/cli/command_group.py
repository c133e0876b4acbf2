"""The group of all commands: each command's module is imported when the command runs, not when it is listed.

`megatron-flex --help` and `--version` therefore import neither torch nor the modules of the commands.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from megatron_flex.cli.spinner import spinner


class CommandSource(NamedTuple):
    """Where a command is defined.

    Attributes:
        module: the module, inside this package.
        name: the function or the `typer.Typer` in that module.
        summary: the first paragraph of the command's help, for the list of commands.
    """

    module: str
    name: str
    summary: str


SOURCES = {
    "sites": CommandSource("sites_command", "sites", "Show a model as a tree, with every hook point."),
    "view": CommandSource(
        "view_command",
        "view",
        "Write an HTML page of a model, its ranks and its data.",
    ),
    "estimate": CommandSource(
        "estimate_command",
        "estimate",
        "Estimate what hooks send and dumps write, before a run.",
    ),
    "compare": CommandSource(
        "compare_command", "compare", "Compare two dumps and name the first site that diverges."
    ),
    "align": CommandSource(
        "align_command",
        "align",
        "Compare a Megatron run with a Hugging Face model.",
    ),
    "dump": CommandSource("dump_command", "dump_app", "List, show, verify, export and prune dumps."),
    "stats": CommandSource("stats_command", "stats_app", "List and show statistics that a run wrote."),
}


class LazyCommands(MutableMapping[str, Any]):
    """Maps the names of commands to commands, and imports the module of a command when it is looked up.

    Args:
        made: commands that exist already.
    """

    def __init__(self, made: MutableMapping[str, Any]) -> None:
        self._made = dict(made)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made and name in SOURCES:
            source = SOURCES[name]
            with spinner("loading"):  # torch, for most commands
                found = getattr(import_module(f"megatron_flex.cli.{source.module}"), source.name)
            if isinstance(found, typer.Typer):
                command: Any = typer.main.get_group(found)
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(name)(found)
                command = typer.main.get_command(alone)
            command.name = name
            self._made[name] = command
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in SOURCES or name in self._made

    def __iter__(self) -> Iterator[str]:
        yield from SOURCES
        yield from (name for name in self._made if name not in SOURCES)

    def __len__(self) -> int:
        return len(SOURCES.keys() | self._made.keys())


class CommandGroup(typer.core.TyperGroup):
    """All commands of `megatron-flex`; listing the commands imports none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and summaries of all commands."""
        limit = formatter.width - 6 - max(len(name) for name in self.commands)
        rows = []
        for name in self.commands:
            listed = (
                typer.core.TyperCommand(name, help=SOURCES[name].summary)
                if name in SOURCES
                else self.commands[name]
            )
            rows.append((name, listed.get_short_help_str(limit)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
