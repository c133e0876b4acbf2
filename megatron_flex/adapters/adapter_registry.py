"""The finders of frameworks, in the order in which they are asked: this package's, registered, installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from torch import nn

from megatron_flex.adapters import pytorch
from megatron_flex.adapters.base import Adapter, Undo
from megatron_flex.errors import FlexError
from megatron_flex.config import flex_config

ENTRY_POINT_GROUP = "megatron_flex.adapters"  # of the entry points by which others add finders

AxisSizes = Mapping[str, int | None]  # axis name to the size that a person gave


@dataclass(frozen=True)
class Found:
    """What a finder says of a model that is its framework's.

    Attributes:
        name: the framework's.
        why: what in the model shows it, in words.
        make: makes the adapter; called on all ranks together.
        alone: whether `make` communicates nothing, so that one rank may call it by itself.
        around: whether it is only what is around a model, in which any framework's parallel modules may be:
            a claim of theirs comes before this one.
    """

    name: str
    why: str
    make: Callable[[], Adapter]
    alone: bool = False
    around: bool = False


class Finder(Protocol):
    """Knows one framework's models.

    It may have an attribute `before`: names of frameworks that do not get a model which it claims too.
    """

    def __call__(self, chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
        """Look at a model; None if it is not the framework's. Nothing is communicated.

        Args:
            chunks: the model, or its virtual pipeline chunks; bare or wrapped.
            said: the sizes that a person gave, by axis.
            process_group: the ranks that a person gave; the default group if None.
        """


@dataclass(frozen=True)
class FinderEntry:
    """A finder in the registry.

    Attributes:
        name: the framework's, or the entry point's.
        get: gives the finder; imports it, where it is an entry point's.
        origin: who brought it; empty for those of this package.
        package: what must be imported for the framework to be in use; empty if it is always asked.
        before: names of frameworks that do not get a model which this one claims too.
    """

    name: str
    get: Callable[[], Finder]
    origin: str = ""
    package: str = ""
    before: tuple[str, ...] = ()


def _megatron_core(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    from megatron_flex.adapters import megatron_core

    adapter = megatron_core.make_megatron_adapter(chunks)
    if adapter is None:
        return None

    def make() -> Adapter:
        adapter.mesh.check_sizes(axis_sizes)
        return adapter

    return Found(
        "megatron-core", f"it is a {type(adapter.roots[0]).__name__} of Megatron's", make, alone=True
    )


def _dtensor(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    from megatron_flex.adapters import dtensor

    return dtensor.find_dtensor(chunks, axis_sizes, process_group)


def _fairscale(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    from megatron_flex.adapters import fairscale

    return fairscale.find_fairscale(chunks, axis_sizes, process_group)


def _apex(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    from megatron_flex.adapters import apex

    return apex.find_apex(chunks, axis_sizes, process_group)


def _deepspeed(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    from megatron_flex.adapters import deepspeed

    why = deepspeed.why_deepspeed(chunks)
    return Found("deepspeed", why, lambda: deepspeed.make_engine_adapter(chunks, axis_sizes), around=True) if why else None


def _pytorch(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    found = pytorch.inspect_wrappers(chunks, axis_sizes, process_group)
    return None if found is None else Found("pytorch", *found, around=True)


# By the package without which there is nothing to find, in the order in which they are asked.
BUILT_IN: tuple[tuple[str, Callable[..., Found | None]], ...] = (
    ("megatron", _megatron_core),
    ("fairscale", _fairscale),
    ("apex", _apex),
    ("deepspeed", _deepspeed),
    ("torch.distributed.tensor", _dtensor),
    ("torch", _pytorch),
)

_registered: list[FinderEntry] = []


def register_adapter(finder: Finder, name: str = "", before: tuple[str, ...] = ()) -> Undo:
    """Ask one more finder about every model, in this process.

    A package that is installed says the same by an entry point of the group `megatron_flex.adapters`.

    Args:
        finder: called with `(chunks, said, process_group)`; returns a `Found`, or None.
        name: the framework's; the finder's own if it is not given.
        before: names of frameworks that do not get a model which this one claims too.

    Returns:
        A function that takes it out again.

    Raises:
        FlexError: the name is taken.
    """
    name = name or _framework_name(finder)
    existing = next((k for k in finder_entries() if k.name == name), None)
    if existing is not None:
        raise FlexError(
            f"an adapter {name!r} is there already ({existing.origin or 'built in'}); give another name"
        )
    module = getattr(finder, "__module__", type(finder).__module__)
    known = FinderEntry(name, lambda: finder, f"registered by {module}", before=before)
    _registered.append(known)
    return lambda: _registered.remove(known) if known in _registered else None


def _framework_name(finder: Any) -> str:
    own = getattr(finder, "name", None) or getattr(finder, "__name__", type(finder).__name__)
    return str(own).strip("_").replace("_", "-")


@cache
def _installed_entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of what is installed on this `sys.path`."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def finder_entries() -> list[FinderEntry]:
    """All finders in the order in which they are asked."""
    built_in = [FinderEntry(_framework_name(f), lambda f=f: f, "", package) for package, f in BUILT_IN]  # type: ignore[misc]
    theirs = [*_registered]
    for entry in _installed_entry_points(tuple(sys.path)):
        by = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"
        theirs.append(FinderEntry(entry.name, entry.load, f"entry point of {by}"))
    off = {name.strip() for name in flex_config.adapters_off.split(",")}
    return [*built_in, *(k for k in theirs if k.name not in off)]
