"""Counts what a rank says to torch.distributed: every collective and message, its ranks and its bytes.

What hooks add is what a step has with them and not without them: `added(with_them, without)`.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import SAME as NAMED

# Where each function has what it sends and what it fills, and its group, by place and by name.
TENSORS = {
    "all_reduce": ("tensor", "tensor"),
    "all_reduce_coalesced": ("tensors", "tensors"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_coalesced": ("input_tensor_list", "output_tensor_lists"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_single": ("input_tensor", "output_tensor"),
    "_all_gather_base": ("input_tensor", "output_tensor"),
    "reduce": ("tensor", "tensor"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter_single": ("input", "output"),
    "_reduce_scatter_base": ("input", "output"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("scatter_list", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
    "send": ("tensor", ""),
    "isend": ("tensor", ""),
    "recv": ("", "tensor"),
    "irecv": ("", "tensor"),
    "barrier": ("", ""),
    "monitored_barrier": ("", ""),
}
OBJECTS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
SAME = {
    **NAMED,
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "isend": "send",
    "irecv": "recv",
}


class Call(NamedTuple):
    """One call. Objects are counted without their bytes, which follow from how they are pickled.

    Attributes:
        op: the function, by one name for those with two.
        ranks: of the group, in its order.
        sent: bytes that this rank hands in.
        got: bytes of what the call fills on this rank.
        dtype: of what is handed in or else filled; empty for objects.
    """

    op: str
    ranks: tuple[int, ...]
    sent: int
    got: int
    dtype: str


@contextmanager
def counting() -> Iterator[list[Call]]:
    """Every call on this rank from here to the end, in order, whoever makes it and by whatever name.

    Each function is replaced wherever a loaded module holds it, torch's own included, so that functions
    that compare others by identity, as `batch_isend_irecv` does, find the same ones everywhere. A call that
    another of these functions makes is not counted again. Not seen: methods of process groups.
    """
    calls: list[Call] = []
    depth = [0]
    c10d = dist.distributed_c10d
    known = {name: getattr(c10d, name) for name in (*TENSORS, *OBJECTS) if hasattr(c10d, name)}
    by_id = {id(f): _counted(name, f, calls, depth) for name, f in known.items()}
    changed = [(m, n, vars(m)[n]) for m, n in _places(frozenset(by_id)) if id(vars(m).get(n)) in by_id]
    for module, name, value in changed:
        setattr(module, name, by_id[id(value)])
    try:
        yield calls
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


_known: dict[tuple[frozenset[int], int], list[tuple[ModuleType, str]]] = {}


def _places(wanted: frozenset[int]) -> list[tuple[ModuleType, str]]:
    """Where loaded modules hold these objects; looked for anew when modules were loaded meanwhile."""
    key = wanted, len(sys.modules)
    if key not in _known:
        modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
        _known.clear()
        _known[key] = [(m, n) for m in modules for n, value in vars(m).items() if id(value) in wanted]
    return _known[key]


def added(having: list[Call], without: list[Call]) -> Counter[Call]:
    """What the first has more than the second.

    Raises:
        AssertionError: the second has something that the first has not: hooks must take nothing away.
    """
    mine, base = Counter(having), Counter(without)
    gone = base - mine
    assert not gone, f"with hooks these calls are missing: {dict(gone)}"
    return mine - base


def _counted(name: str, function: Callable[..., Any], calls: list[Call], depth: list[int]) -> Any:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not depth[0]:
            given = signature.bind(*args, **kwargs).arguments
            calls.append(_call(name, given))
        depth[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth[0] -= 1

    return call


def _call(name: str, given: dict[str, Any]) -> Call:
    group = given.get("group") or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    if name in OBJECTS:
        return Call(name, ranks, 0, 0, "")
    sent, got = ([] if not key else _tensors(given.get(key)) for key in TENSORS[name])
    kind = next((str(t.dtype).removeprefix("torch.") for t in (*sent, *got)), "")
    return Call(SAME.get(name, name), ranks, sum(t.nbytes for t in sent), sum(t.nbytes for t in got), kind)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for item in found or () for t in _tensors(item)]
