"""The finders of frameworks in the order of calls: this package's, registered ones, installed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from torch import nn

from megatron_flex.adapters import pytorch
from megatron_flex.adapters.adapter_base import Adapter, AxisSizes, FrameworkMatch
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError
from megatron_flex.handles import Handle

ENTRY_POINT_GROUP = "megatron_flex.adapters"  # the entry point group for finders of other packages


class Finder(Protocol):
    """Detects one framework's models.

    It may have an attribute `before`: names of frameworks over which it has priority.
    """

    def __call__(
        self, chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any
    ) -> FrameworkMatch | None:
        """Inspect a model; None if it is not the framework's. Nothing is communicated.

        Args:
            chunks: the model, or its virtual pipeline chunks; bare or wrapped.
            axis_sizes: the sizes given by the user, by axis.
            process_group: the ranks given by the user; the default group if None.
        """


@dataclass(frozen=True)
class FinderEntry:
    """A finder in the registry.

    Attributes:
        name: the framework's, or the entry point's.
        get: returns the finder; imports it, if it is an entry point's.
        origin: the source of the finder; empty for those of this package.
        package: must be imported for the framework to be in use; empty if the finder always runs.
        before: names of frameworks over which it has priority.
    """

    name: str
    get: Callable[[], Finder]
    origin: str = ""
    package: str = ""
    before: tuple[str, ...] = ()


def _megatron_core(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any
) -> FrameworkMatch | None:
    from megatron_flex.adapters import megatron_core

    adapter = megatron_core.make_megatron_adapter(chunks)
    if adapter is None:
        return None

    def make() -> Adapter:
        adapter.mesh.check_sizes(axis_sizes)
        return adapter

    return FrameworkMatch("megatron-core", adapter.why, make, alone=True)


def _deepspeed(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> FrameworkMatch | None:
    from megatron_flex.adapters.deepspeed_adapter import make_engine_adapter, why_deepspeed

    why = why_deepspeed(chunks)
    return (
        FrameworkMatch("deepspeed", why, partial(make_engine_adapter, chunks, axis_sizes), around=True)
        if why
        else None
    )


def _pytorch(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> FrameworkMatch | None:
    evidence = pytorch.inspect_wrappers(chunks, axis_sizes, process_group)
    return None if evidence is None else FrameworkMatch("pytorch", *evidence, around=True)


def _import_finder(module: str, function: str) -> Finder:
    finder: Finder = getattr(import_module(f"megatron_flex.adapters.{module}"), function)
    return finder


# In the order of calls.
BUILT_IN = (
    FinderEntry("megatron-core", lambda: _megatron_core, package="megatron"),
    FinderEntry("fairscale", partial(_import_finder, "fairscale", "find_fairscale"), package="fairscale"),
    FinderEntry("apex", partial(_import_finder, "apex", "find_apex"), package="apex"),
    FinderEntry("deepspeed", lambda: _deepspeed, package="deepspeed"),
    FinderEntry(
        "dtensor", partial(_import_finder, "dtensor", "find_dtensor"), package="torch.distributed.tensor"
    ),
    FinderEntry("pytorch", lambda: _pytorch, package="torch"),
)

_registered: list[FinderEntry] = []


def register_adapter(finder: Finder, name: str = "", before: tuple[str, ...] = ()) -> Handle:
    """Register a finder, which then inspects every model in this process.

    An installed package registers one by an entry point of the group `megatron_flex.adapters`.

    Args:
        finder: called with `(chunks, axis_sizes, process_group)`; returns a `FrameworkMatch`, or None.
        name: the framework's; the finder's own if None.
        before: names of frameworks over which it has priority.

    Returns:
        A handle whose `remove()` unregisters it.

    Raises:
        FlexError: the name is taken.

    Examples:
        >>> def find(chunks, axis_sizes, process_group):
        ...     return None  # the model is not of this framework
        >>> with register_adapter(find, "mine"):
        ...     flex = FlexModel(chunks)
    """
    name = name or _name_finder(finder)
    existing = next((k for k in finder_entries() if k.name == name), None)
    if existing is not None:
        raise FlexError(
            f"an adapter {name!r} is registered already ({existing.origin or 'built in'}); give another name"
        )
    module = getattr(finder, "__module__", type(finder).__module__)
    known = FinderEntry(name, lambda: finder, f"registered by {module}", before=before)
    _registered.append(known)
    return Handle(partial(_registered.remove, known), f"adapter {name!r}", lambda: known in _registered)


def _name_finder(finder: Any) -> str:
    name = getattr(finder, "name", None) or getattr(finder, "__name__", type(finder).__name__)
    return str(name).strip("_").replace("_", "-")


@cache
def _installed_entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of packages on this `sys.path`."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def finder_entries() -> list[FinderEntry]:
    """All finders in the order of calls."""
    external = [*_registered]
    for entry in _installed_entry_points(tuple(sys.path)):
        by = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"
        external.append(FinderEntry(entry.name, entry.load, f"entry point of {by}"))
    off = {name.strip() for name in flex_config.adapters_off.split(",")}
    return [*BUILT_IN, *(k for k in external if k.name not in off)]
