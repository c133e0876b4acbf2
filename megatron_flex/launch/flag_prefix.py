"""The prefix of our flags: `--flex-`, or that of MEGATRON_FLEX_PREFIX, where a script has such flags too."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megatron_flex.errors import FlexError

PREFIX_VARIABLE = "MEGATRON_FLEX_PREFIX"
FLAG_PREFIX = "--flex-"
LONG_PREFIX = "--megatron-flex-"  # always understood, whatever the variable says


def flag_prefix(environment: Mapping[str, str] | None = None) -> str:
    """The prefix of this process. Ranks have the same, as they inherit the variable from their launcher.

    Args:
        environment: variables; those of the process if None.

    Raises:
        FlexError: the variable holds no prefix of flags.
    """
    given = (os.environ if environment is None else environment).get(PREFIX_VARIABLE, "")
    if not given:
        return FLAG_PREFIX
    if not re.fullmatch(r"--[a-z][a-z0-9-]*-", given):
        raise FlexError(
            f"{PREFIX_VARIABLE}={given}: a prefix is two dashes, small letters, and a dash, such as --hooks-"
        )
    return given


def option_dest(name: str) -> str:
    """The attribute of a flag in a namespace, as argparse makes it of the flag: `flex_dump_dtype`."""
    return f"{flag_prefix()}{name}".strip("-").replace("-", "_")


def to_standard_option(option: str) -> str:
    """`--flex-dump` for a flag with the prefix of this process; empty for other words."""
    prefix = flag_prefix()
    return FLAG_PREFIX + option.removeprefix(prefix) if option.startswith(prefix) else ""


def with_prefix(text: str) -> str:
    """A help text or an error with the flags as they are typed in this process."""
    try:
        return text.replace(FLAG_PREFIX, flag_prefix())
    except FlexError:  # which is what the text is about
        return text
