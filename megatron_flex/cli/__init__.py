"""The command line `megatron-flex`. What it is made of is imported when it runs, not when the package is."""

from __future__ import annotations

import sys

NEEDS = ("typer", "rich")


def main() -> None:
    """Run the command that `sys.argv` names; exits with its status."""
    try:
        for name in NEEDS:
            __import__(name)
    except ModuleNotFoundError as error:
        if error.name not in NEEDS:
            raise
        sys.exit(f"megatron-flex: {error.name} is not installed: pip install megatron-flex[cli]")
    from megatron_flex.cli.app import run

    run()
