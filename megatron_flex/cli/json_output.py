"""JSON of the command line, for programs."""

from __future__ import annotations

import sys
from typing import Any


def print_json(content: Any) -> None:
    """Print plain values for a program, as `format_json` writes them."""
    from megatron_flex.dump.json_form import format_json  # which imports torch, that tables do not need

    sys.stdout.write(format_json(content) + "\n")
