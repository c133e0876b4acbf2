"""`python -m megatron_flex.launch SCRIPT [its flags] [--flex-...]`: a training script with hooks."""

from __future__ import annotations

import sys

from megatron_flex.launch.script_runner import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
