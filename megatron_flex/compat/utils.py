"""Log messages of hooks, by a level's name."""

from __future__ import annotations

import logging
import os

from megatron_flex.errors import FlexError

LOG_LEVEL_VARIABLE = "FLEXMODEL_DEBUG"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def setup_logger(level: str) -> None:
    """Show log messages of this package from a level on.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`, in any case.

    Raises:
        FlexError: `level` is not one of these names.
    """
    if level.lower() not in LOG_LEVELS:
        raise FlexError(f"log level {level!r} ({LOG_LEVEL_VARIABLE}) is not one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(format="%(asctime)s | %(name)s | %(funcName)s | %(message)s")
    logging.getLogger("megatron_flex").setLevel(level.upper())


def setup_from_environment() -> None:
    """Call `setup_logger` with the level in FLEXMODEL_DEBUG, if that is set."""
    if level := os.environ.get(LOG_LEVEL_VARIABLE):
        setup_logger(level)
