"""A spinner on stderr while a command waits for what has no progress to show: imports, a training run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from megatron_flex.config import flex_config
from megatron_flex.progress import stop_before_bars


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show that a command waits, on a terminal only; a progress bar that is drawn meanwhile takes its place.

    Nothing is written where stderr is not a terminal, and with FLEX_PROGRESS=0.

    Args:
        text: what it waits for.
    """
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not sys.stderr.isatty() or console.is_dumb_terminal or flex_config.progress == 0:
        yield
        return
    status = console.status(text)
    with stop_before_bars(status.stop), status:
        yield
