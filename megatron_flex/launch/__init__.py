"""The entry points for launchers: installation in a training script, settings, previews and estimates."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_flex.launch.argparse_flags import add_flex_args
    from megatron_flex.launch.flags import load_settings, settings_of
    from megatron_flex.launch.installation import Installation, install
    from megatron_flex.launch.launch_settings import Settings
    from megatron_flex.launch.script_runner import run
    from megatron_flex.launch.training_run import TrainingRun

FLAG_PREFIX = "--flex-"  # of our flags
LONG_PREFIX = "--megatron-flex-"  # of the same flags, for a script that has a flag of the shorter name

__all__ = [
    "Installation",
    "Settings",
    "TrainingRun",
    "add_flex_args",
    "install",
    "load_settings",
    "run",
    "settings_of",
]

WHERE = {
    "Installation": "megatron_flex.launch.installation",
    "TrainingRun": "megatron_flex.launch.training_run",
    "Settings": "megatron_flex.launch.launch_settings",
    "add_flex_args": "megatron_flex.launch.argparse_flags",
    "install": "megatron_flex.launch.installation",
    "load_settings": "megatron_flex.launch.flags",
    "run": "megatron_flex.launch.script_runner",
    "settings_of": "megatron_flex.launch.flags",
}


def __getattr__(name: str) -> Any:
    """Import attributes on first use: an estimate does not need pydantic."""
    if name in WHERE:
        return getattr(import_module(WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
