"""The command line `megatron-flex`. What it is made of is imported when it runs, not when the package is."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that `sys.argv` names; exits with its status."""
    try:
        import typer  # noqa: F401  # only whether it is installed; what the command runs imports it again
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("megatron-flex: typer is not installed: pip install megatron-flex[cli]")
    from megatron_flex.cli.app import run

    run()
