"""Small talk between ranks: flags, findings, and whether all of them hold the same hooks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh

ABSENT_RANKS = (
    "rank(s) {ranks} did not compare hooks within {seconds:g} s: hooks are registered on some ranks only, or "
    "those ranks died; register the same hooks on every rank"
)
MAX_NAMED_RANKS = 8  # ranks that an error names before it says how many more there are


def max_over_ranks(flags: Sequence[int], mesh: Mesh) -> list[int]:
    """The greatest value of each flag over all ranks of the mesh.

    Collective over every axis with more than one rank; all ranks pass equally many flags.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(flags)
    device = "cuda" if dist.get_backend(axes[0].group) == "nccl" else "cpu"
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    for axis in axes:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return [int(n) for n in tensor.tolist()]


def gather_objects(item: Any, mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """The items of all ranks along `axes`, the last of them counting fastest.

    Collective over those axes. For setting up and for telling errors, never on the way of a tensor.
    """
    items = [item]
    for axis in (mesh[n] for n in reversed(axes)):
        if axis.size > 1:
            slots: list[Any] = [None] * axis.size
            dist.all_gather_object(slots, items, group=axis.group)
            items = [i for slot in slots for i in slot]
    return items


class Agreement:
    """All ranks hold the same thing, or all of them raise.

    The ranks meet in the rendezvous store and not in a collective: a rank that never comes (because a hook
    was registered on some ranks only) makes the others raise after a while, where a collective would hang.
    """

    def __init__(self, name: str, seconds: float, ranks: Sequence[int] = (), absent: str = ABSENT_RANKS) -> None:
        """Let `ranks` compare, all of the job if empty; `absent` is what is said where some never come."""
        joined = dist.is_available() and dist.is_initialized()
        self._ranks = tuple(ranks) or tuple(range(dist.get_world_size() if joined else 1))
        few = f"ranks{'-'.join(map(str, self._ranks))}/" if joined and ranks else ""
        self.name, self.seconds, self.absent, self.round = few + name, seconds, absent, 0
        joined = joined and len(self._ranks) > 1
        self._store: Any = dist.distributed_c10d._get_default_store() if joined else None

    def wanted(self) -> bool:
        """Whether another rank waits for this one to compare; one look into the store."""
        return self._store is not None and bool(self._store.check([self._key("arrived")]))

    def compare(self, what: str) -> None:
        """Compare `what` on all ranks.

        Raises:
            HookError: on every rank, if any two differ or some rank did not come in time.
        """
        if self._store is None:
            return
        world, rank = len(self._ranks), dist.get_rank()
        digest = hashlib.sha256(what.encode()).hexdigest()[:16]
        self._store.set(self._key(f"rank{rank}"), f"{digest} {what}")
        self._store.add(self._key(f"equal{digest}"), 1)
        if self._store.add(self._key("arrived"), 1) == world:
            self._store.set(self._key("complete"), "1")
        try:
            self._store.wait([self._key("complete")], timedelta(seconds=self.seconds))
        except Exception as error:
            raise HookError(self._absent()) from error
        equal = int(self._store.add(self._key(f"equal{digest}"), 0))
        wrong = self._differing() if equal != world else ""
        self.round += 1
        if wrong:
            raise HookError(wrong)

    def _key(self, what: str) -> str:
        return f"megatron_flex/{self.name}/{self.round}/{what}"

    def _said(self, rank: int) -> str | None:
        key = self._key(f"rank{rank}")
        return self._store.get(key).decode().partition(" ")[2] if self._store.check([key]) else None

    def _absent(self) -> str:
        missing = [r for r in self._ranks if self._said(r) is None]
        return self.absent.format(ranks=_name_ranks(missing), seconds=self.seconds)

    def _differing(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank in self._ranks:
            groups.setdefault(self._said(rank) or "no hook", []).append(rank)
        differences = "; ".join(f"rank(s) {_name_ranks(ranks)}: {what}" for what, ranks in groups.items())
        return (
            f"hooks differ between ranks ({differences}); register the same hooks, in the same order, on every rank"
        )


def store_value(key: str, value: Any) -> None:
    """Let other ranks find a small value in the rendezvous store, as JSON: whoever reads it runs no code."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"megatron_flex/{key}", json.dumps(value))


def await_value(key: str, seconds: float) -> Any:
    """What another rank has left, once it has.

    Raises:
        HookError: it does not.
    """
    store = dist.distributed_c10d._get_default_store()
    try:
        store.wait([f"megatron_flex/{key}"], timedelta(seconds=seconds))
    except Exception as error:
        raise HookError(
            f"another rank did not tell {key} within {seconds:g} s; run all ranks alike"
        ) from error
    return json.loads(store.get(f"megatron_flex/{key}"))


def _name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return ", ".join(str(r) for r in ranks[:MAX_NAMED_RANKS]) + more
