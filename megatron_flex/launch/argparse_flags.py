"""The flags in a script's own parser, which Megatron's training then applies."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TypeVar

from megatron_flex.launch.flags import FLAGS_VARIABLE, add_flags, is_own_flag

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
    add_flags(parser)
    if os.environ.get(FLAGS_VARIABLE) or any(map(is_own_flag, sys.argv[1:])):
        from megatron_flex.launch.installation import install_when_parsed

        install_when_parsed()
    return parser
