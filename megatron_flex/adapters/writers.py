"""The writers that a framework's training loop logs to, where it has them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class TrainingWriters(NamedTuple):
    """What Megatron's training code logs to on this rank; it makes them on the last one only.

    Attributes:
        tensorboard: a SummaryWriter; None without.
        wandb: the module, or a run, that has `log`; None without.
        every: iterations of which it logs one.
    """

    tensorboard: Any = None
    wandb: Any = None
    every: int = 1


def training_writers() -> TrainingWriters:
    """The writers that `megatron.training` has made by now on this rank; none where it does not run."""
    state = sys.modules.get("megatron.training.global_vars")
    args = getattr(state, "_GLOBAL_ARGS", None)
    return TrainingWriters(
        getattr(state, "_GLOBAL_TENSORBOARD_WRITER", None),
        getattr(state, "_GLOBAL_WANDB_WRITER", None),
        max(1, int(getattr(args, "tensorboard_log_interval", None) or 1)),
    )
