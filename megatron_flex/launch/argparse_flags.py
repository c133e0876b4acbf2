"""The `--flex-` flags in an argparse parser, for scripts that pass a parser to Megatron."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from megatron_flex.launch.flag_prefix import with_prefix
from megatron_flex.launch.flags import (
    FLAGS,
    FLAGS_VARIABLE,
    Flag,
    format_help,
    is_own_flag,
)

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_flex_args(parser: Parser) -> Parser:
    """Add the `--flex-` flags, by groups, to a parser, for example in Megatron's `extra_args_provider`.

    Each flag has two names, `--flex-NAME` and `--megatron-flex-NAME`; of a parser that has a flag of the
    first name already, only the second is added.

    If flags are on the command line or in MEGATRON_FLEX_FLAGS, Megatron's training applies them after
    parsing; no other call is necessary.

    The parsed namespace holds plain values: strings, lists of strings, True. `launch.settings_of` reads them.

    Returns:
        The parser.

    Examples:
        >>> import argparse
        >>> from megatron_flex.launch import settings_of
        >>> parser = add_flex_args(argparse.ArgumentParser())
        >>> settings_of(parser.parse_args(["--flex-sites", "decoder.layers.*"])).sites
        ('decoder.layers.*',)
    """
    groups: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(f"megatron_flex: {flag.group}")
        there = parser._option_string_actions  # a flag of the script's own keeps its name
        names = [n for n in (flag.option, flag.long_option) if n not in there]
        groups[flag.group].add_argument(*names, **_argparse_arguments(flag))
    if os.environ.get(FLAGS_VARIABLE) or any(map(is_own_flag, sys.argv[1:])):
        from megatron_flex.launch.installation import install_when_parsed

        install_when_parsed()
    return parser


def _argparse_arguments(flag: Flag) -> dict[str, Any]:
    """The arguments of `add_argument` for a flag."""
    out: dict[str, Any] = {"dest": flag.dest, "help": with_prefix(flag.words).replace("%", "%%")}
    if flag.name == "help":
        return {**out, "action": _HelpAction}
    if flag.takes == "none":
        return {**out, "action": "store_true"}
    out["metavar"] = flag.metavar
    more: dict[str, dict[str, Any]] = {
        "optional": {"nargs": "?", "const": flag.value},
        "many": {"nargs": "+", "action": "extend"},
        "once": {"action": "append"},
        "edit": {"nargs": "+", "action": "append", "metavar": "EDIT"},
    }
    return {**out, **more.get(flag.takes, {})}


class _HelpAction(argparse.Action):
    """Prints the help of the `--flex-` flags only, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        sys.stdout.write(format_help())
        parser.exit()
