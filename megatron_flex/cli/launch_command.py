"""The command that starts a training script with hooks by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_flex.errors import FlexError
from megatron_flex.launch import FLAG_PREFIX, LONG_PREFIX

RUNNER_MODULE = "megatron_flex.launch"


def torchrun_command(words: Sequence[str]) -> list[str]:
    """The whole command: Python, torchrun's options, the runner, the script and its arguments.

    Raises:
        FlexError: no script is named, or an option is given that leaves no place for the runner.
        SystemExit: torchrun does not know an option; its own words are printed.
    """
    from torch.distributed.run import get_args_parser

    if not words or words[0].startswith((FLAG_PREFIX, LONG_PREFIX)):
        what = f"{words[0]} comes before it" if words else "none is named"
        raise FlexError(f"no script, {what}: megatron-flex run [torchrun's options] SCRIPT [flags]")
    parsed = get_args_parser().parse_args(list(words))
    for name in ("no_python", "run_path"):
        if getattr(parsed, name, False):
            option = f"--{name.replace('_', '-')}"
            raise FlexError(f"{option}: torchrun would start the script without hooks; leave it out")
    at = len(words) - len(parsed.training_script_args) - 1
    at -= words[at] != parsed.training_script  # argparse removes a `--` after it
    options = [o for o in words[:at] if o not in ("-m", "--module", "--")]
    module = ["-m"] if parsed.module else []
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        RUNNER_MODULE,
        *module,
        *words[at:],
    ]
