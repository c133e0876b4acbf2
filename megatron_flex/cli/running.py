"""`megatron-flex run`: torchrun in front of the runner, in this process."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import typer

from megatron_flex.errors import FlexError

RUNNER_MODULE = "megatron_flex.launch"


def launch(context: typer.Context) -> None:
    """Start a training script with hooks, by torchrun.

    Options in front of SCRIPT are torchrun's, those behind it the script's, --flex- flags among them. --dry,
    first of all, only prints the command.

    For example: megatron-flex run --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ... --flex-dump out
    """
    words = list(context.args)
    dry = words[:1] == ["--dry"]
    command = torchrun_command(words[dry:])
    if dry:
        typer.echo(shlex.join(command))
        return
    sys.stdout.flush()
    os.execv(command[0], command)


def torchrun_command(words: Sequence[str]) -> list[str]:
    """The whole command: Python, torchrun's options, the runner, the script and what is behind it.

    Raises:
        FlexError: no script is named, or an option is given that leaves no place for the runner.
        SystemExit: torchrun does not know an option; its own words are printed.
    """
    from torch.distributed.run import get_args_parser

    if not words or words[0].startswith("--flex-"):
        what = f"{words[0]} stands in front of it" if words else "none is named"
        raise FlexError(f"no script, {what}: megatron-flex run [torchrun's options] SCRIPT [flags]")
    found = get_args_parser().parse_args(list(words))
    for name in ("no_python", "run_path"):
        if getattr(found, name, False):
            option = f"--{name.replace('_', '-')}"
            raise FlexError(f"{option}: torchrun would start the script without hooks; leave it out")
    at = len(words) - len(found.training_script_args) - 1
    at -= words[at] != found.training_script  # argparse takes out a `--` behind it
    options = [o for o in words[:at] if o not in ("-m", "--module", "--")]
    module = ["-m"] if found.module else []
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", RUNNER_MODULE, *module, *words[at:]]
