"""Errors of some ranks only: raised on all ranks, and printed in one line by one of them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.mesh import Axis, Mesh


def job_mesh() -> Mesh:
    """All ranks of the job, as one axis."""
    if not (dist.is_available() and dist.is_initialized()):
        return Mesh()
    size = dist.get_world_size()
    return Mesh((Axis("job", size, dist.get_rank(), None, tuple(range(size))),))


ERROR_STATUS = 2  # exit status of the process after a FlexError
FIRST_RANK_TIMEOUT = 5.0  # seconds that other ranks wait for the first rank's message
ACKNOWLEDGE_TIMEOUT = 2.0  # seconds that the first rank waits for other ranks to read its message
MAX_ANSWERS = 64  # ranks whose acknowledgement the first rank waits for
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def current_rank() -> int:
    """This process's global rank; before process groups exist, from the launcher's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return next((int(os.environ[v]) for v in RANK_VARIABLES if os.environ.get(v, "").isdigit()), 0)


def print_error(error: BaseException) -> None:
    """Print one line on stderr: on the first rank, and on ranks with another error than the first rank's.

    Ranks wait for each other only for a few seconds, even if one has exited.
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if _should_print(message):
        sys.stdout.flush()
        sys.stderr.write(f"megatron-flex: {message}\n")
        sys.stderr.flush()
        _announce(message)


def print_notice(line: str) -> None:
    """Print one line on stderr, on the first rank; nothing if it is empty."""
    if line and current_rank() == 0:
        sys.stderr.write(f"megatron-flex: {line}\n")
        sys.stderr.flush()


def _should_print(message: str) -> bool:
    store, rank = _common_store(), current_rank()
    if store is None:
        return True
    key = f"megatron_flex/error/{message}"
    return rank == 0 or not _first_rank_prints(store, key, rank)


def _first_rank_prints(store: Any, key: str, rank: int) -> bool:
    """Whether the first rank prints the same message."""
    try:
        store.wait([key], timedelta(seconds=FIRST_RANK_TIMEOUT))
        store.set(f"{key}/{rank}", "heard")
    except Exception:  # a timeout and an exited first rank raise exceptions of several classes
        return False
    return True


def _announce(message: str) -> None:
    """Send the message to the other ranks, and wait briefly: this process may serve the store they read."""
    store, world = _common_store(), _world_size()
    if store is None or current_rank() != 0:
        return
    key = f"megatron_flex/error/{message}"
    with suppress(Exception):  # without the message the other ranks print their own
        store.set(key, "printed")
        store.wait(
            [f"{key}/{n}" for n in range(1, min(world, MAX_ANSWERS))], timedelta(seconds=ACKNOWLEDGE_TIMEOUT)
        )


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _common_store() -> Any:
    """The store that all ranks share: that of the process groups, or torchrun's own before they exist."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not host or not port.isdigit():
        return None
    try:
        return torch._C._distributed_c10d.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=FIRST_RANK_TIMEOUT)
        )
    except Exception:  # without a store the ranks cannot compare: each prints its own error
        return None
