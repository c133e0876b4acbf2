"""The doors for launchers: what a person asks before, or instead of, starting a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_flex.launch.installation import Installed, install
    from megatron_flex.launch.argparse_flags import add_flex_args, settings_of
    from megatron_flex.launch.script_runner import run
    from megatron_flex.launch.training_run import Running
    from megatron_flex.launch.launch_settings import Settings

__all__ = ["Installed", "Running", "Settings", "add_flex_args", "install", "run", "settings_of"]

WHERE = {
    "Installed": "installing",
    "Running": "running",
    "Settings": "settings",
    "add_flex_args": "parsing",
    "install": "installing",
    "run": "runner",
    "settings_of": "parsing",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: who wants a plan needs no pydantic."""
    if name in WHERE:
        return getattr(import_module(f"megatron_flex.launch.{WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
