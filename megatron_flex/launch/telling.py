"""How errors of ours reach a person: one line, from one rank, whichever ranks have it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ERROR_STATUS = 2  # of the process, where what was asked for cannot be
FIRST_RANK_TIMEOUT = 5.0  # that other ranks wait for the first one to say the same
ACKNOWLEDGE_TIMEOUT = 2.0  # that the first one waits for them to hear it
MAX_ANSWERS = 64  # ranks whose answer it waits for
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def current_rank() -> int:
    """This process's number, which launchers tell before there are process groups."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return next((int(os.environ[v]) for v in RANK_VARIABLES if os.environ.get(v, "").isdigit()), 0)


def print_error(error: BaseException) -> None:
    """Print one line on stderr, on the first rank, or on one that has another error than it.

    No rank waits for another for long, whatever has become of it.
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if _should_print(message):
        sys.stdout.flush()
        sys.stderr.write(f"megatron-flex: {message}\n")
        sys.stderr.flush()
        _announce(message)


def _should_print(message: str) -> bool:
    """Whether this rank says it."""
    store, mine = _common_store(), current_rank()
    if store is None:
        return True
    key = f"megatron_flex/error/{message}"
    return mine == 0 or not _first_rank_prints(store, key, mine)


def _first_rank_prints(store: Any, key: str, mine: int) -> bool:
    """Whether the first rank says the same."""
    try:
        store.wait([key], timedelta(seconds=FIRST_RANK_TIMEOUT))
        store.set(f"{key}/{mine}", "heard")
    except Exception:  # a timeout, and a first rank that is gone, are of several classes
        return False
    return True


def _announce(message: str) -> None:
    """Let other ranks hear it, which may be served by this process: it stays a moment."""
    store, world = _common_store(), _world_size()
    if store is None or current_rank() != 0:
        return
    key = f"megatron_flex/error/{message}"
    with suppress(Exception):  # they say it themselves then
        store.set(key, "said")
        store.wait([f"{key}/{n}" for n in range(1, min(world, MAX_ANSWERS))], timedelta(seconds=ACKNOWLEDGE_TIMEOUT))


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _common_store() -> Any:
    """The store that all ranks see: that of the process groups, or torchrun's own before there are any."""
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
    except Exception:  # no store, nothing to compare: each rank speaks for itself
        return None
