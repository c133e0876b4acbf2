"""The group of all commands: each command's module is imported when the command runs, not when it is listed.

`megatron-flex --help` and `--version` therefore import neither torch nor the modules of the commands.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

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
        "Estimate the cost of hooks and the size of dumps.",
    ),
    "compare": CommandSource(
        "compare_command", "compare", "Compare two dumps; name the first hook point that diverges."
    ),
    "align": CommandSource(
        "align_command",
        "align",
        "Compare a Megatron run with a Hugging Face model.",
    ),
    "dump": CommandSource("dump_command", "dump_app", "List, show, verify, export and prune dumps."),
    "stats": CommandSource("stats_command", "stats_app", "List and show the statistics that a run wrote."),
    "weights": CommandSource(
        "weights_command", "weights_app", "Digest full parameters, and compare two sets of weights."
    ),
    "rollout": CommandSource(
        "rollout_command",
        "rollout",
        "Compare a rollout's log-probabilities with a training run's; name the first token that differs.",
    ),
    "two-layouts": CommandSource(
        "two_layouts_command", "two_layouts_app", "Run the same weights in two layouts, and compare the runs."
    ),
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
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command()(found)
                found = alone
            command: Any = typer.main.get_command(found)
            command.name = name
            self._made[name] = keep_names_whole(command)
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


CONTEXT: Any = typer.core.TyperCommand.context_class
FORMATTER: Any = CONTEXT.formatter_class
NO_BREAK_HYPHEN = "\N{NON-BREAKING HYPHEN}"


class WholeNameFormatter(FORMATTER):  # type: ignore[misc]  # typer does not export its base
    """Formats help so that no line ends within a name such as `--num-layers`; textwrap breaks at hyphens."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args.replace("-", NO_BREAK_HYPHEN), prefix)

    def write_text(self, text: str) -> None:
        """Write a paragraph."""
        super().write_text(text.replace("-", NO_BREAK_HYPHEN))

    def write_dl(self, rows: Any, *widths: Any, **more: Any) -> None:
        """Write a list of terms, each with its text."""
        super().write_dl([(term, text.replace("-", NO_BREAK_HYPHEN)) for term, text in rows], *widths, **more)

    def getvalue(self) -> str:
        """The text that was written."""
        text: str = super().getvalue()
        return text.replace(NO_BREAK_HYPHEN, "-")


class WholeNameContext(CONTEXT):  # type: ignore[misc]  # typer does not export its base
    """The context of a command whose help is formatted by `WholeNameFormatter`."""

    formatter_class = WholeNameFormatter


CommandT = TypeVar("CommandT", bound=Any)


def keep_names_whole(command: CommandT) -> CommandT:
    """Format the help of a command, and of the commands in it, without a break in names.

    Args:
        command: a command or group of typer.

    Returns:
        The same command.
    """
    command.context_class = WholeNameContext
    commands = getattr(command, "commands", {})
    for inner in commands.values() if isinstance(commands, dict) else ():
        keep_names_whole(inner)
    return command


class CommandGroup(typer.core.TyperGroup):
    """All commands of `megatron-flex`; listing the commands imports none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands({name: keep_names_whole(c) for name, c in self.commands.items()})
        keep_names_whole(self)

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
