"""Lines for the person at the terminal."""

from __future__ import annotations

import sys

import torch.distributed as dist


def to_stderr(line: str) -> None:
    """Print a line with this rank's number."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    sys.stderr.write(f"[flex rank {rank}] {line}\n")  # at once: other ranks write there too
    sys.stderr.flush()
