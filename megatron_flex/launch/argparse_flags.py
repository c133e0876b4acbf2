"""The flags in a parser of argparse, for scripts that hand theirs to Megatron."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_flex.errors import FlexError
from megatron_flex.launch.flags import ParsedFlags, settings_from_values, collect_flag_values
from megatron_flex.launch.table import FLAGS, FLAG_PREFIX, FLAGS_VARIABLE, Flag, format_help

if TYPE_CHECKING:
    from megatron_flex.launch.launch_settings import Settings

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_flex_args(parser: Parser) -> Parser:
    """Add our flags, by groups, to a parser, such as an `extra_args_provider` of Megatron is given.

    Where some are on the command line, or in MEGATRON_FLEX_FLAGS, Megatron's training does what they say once
    it has parsed them; nothing else is to be called.

    What a namespace has of them are plain values: words, lists of words, True. `launch.settings_of` reads it.

    Returns:
        The parser.
    """
    groups: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(f"megatron_flex: {flag.group}")
        groups[flag.group].add_argument(flag.option, **_argparse_arguments(flag))
    if os.environ.get(FLAGS_VARIABLE) or any(word.startswith(FLAG_PREFIX) for word in sys.argv[1:]):
        from megatron_flex.launch.installation import install_when_parsed

        install_when_parsed()
    return parser


def settings_of(namespace: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings that a namespace holds, on top of files and the environment, as for `flags.settings`.

    Raises:
        FlexError: its parser did not have our flags, or as for `flags.settings`.
    """
    if not has_flags(namespace):
        raise FlexError("the namespace has no flags of megatron_flex; call mf.add_flex_args(parser) first")
    parsed: ParsedFlags = []
    for flag in FLAGS:
        value = getattr(namespace, flag.dest, None)
        if value is None or value is False:
            continue
        if flag.takes in ("edit", "once"):
            parsed += [(flag, [v] if isinstance(v, str) else list(v)) for v in value]
        elif flag.takes == "none":
            parsed.append((flag, []))
        else:
            parsed.append((flag, [value] if isinstance(value, str) else list(value)))
    return settings_from_values(collect_flag_values(parsed), environment)


def has_flags(namespace: argparse.Namespace) -> bool:
    """Whether the parser that made the namespace has our flags."""
    return hasattr(namespace, FLAGS[0].dest)


def _argparse_arguments(flag: Flag) -> dict[str, Any]:
    """What argparse is told of a flag."""
    out: dict[str, Any] = {"dest": flag.dest, "help": flag.words.replace("%", "%%")}
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
    """Prints the help of our flags alone, and ends."""

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
