"""Models in fairscale's ShardedDataParallel, with the sharded optimizer that it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.rank import changes


def wrapped(model: nn.Module, group: Any = None, lr: float = 0.05, **options: Any) -> tuple[Any, Any]:
    """The model in the wrapper, and its optimizer: AdamW, sharded over the ranks of a group."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    changes.setattr(OSS, "step", OSS.step)  # into which torch puts a profiler's record when one is made
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=lr, group=group)
    options.setdefault("warn_on_trainable_params_changed", False)
    return ShardedDataParallel(model, optimizer, process_group=group, **options), optimizer
