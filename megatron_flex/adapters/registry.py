"""Which framework built a model: finders are asked in order, and what they find is told in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import nn

from megatron_flex.adapters import plain, pytorch
from megatron_flex.adapters.base import Adapter
from megatron_flex.errors import FlexError

GROUP = "megatron_flex.adapters"  # of the entry points by which others add finders

Said = Mapping[str, int | None]  # axis name to the size that a person gave


@dataclass(frozen=True)
class Found:
    """What a finder says of a model that is its framework's.

    Attributes:
        name: the framework's.
        why: what in the model shows it, in words.
        make: makes the adapter; collective over all ranks.
    """

    name: str
    why: str
    make: Callable[[], Adapter]


class Finder(Protocol):
    """Knows one framework's models."""

    name: str

    def __call__(self, chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
        """Look at a model; None if it is not the framework's. Nothing is communicated."""


def _megatron_core(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import megatron_core

    adapter = megatron_core.detect(chunks)
    if adapter is None:
        return None

    def make() -> Adapter:
        adapter.mesh.check_sizes(said)
        return adapter

    return Found("megatron-core", f"it is a {type(adapter.roots[0]).__name__} of Megatron's", make)


def _dtensor(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import dtensor

    return dtensor.find(chunks, said, process_group)


# By the package without which there is nothing to find, in the order in which they are asked.
BUILT_IN: tuple[tuple[str, Callable[..., Found | None]], ...] = (
    ("megatron", _megatron_core),
    ("torch.distributed.tensor", _dtensor),
)


def finders() -> Iterable[Callable[..., Found | None]]:
    """Those of the frameworks that are imported, and those of installed entry points."""
    yield from (finder for package, finder in BUILT_IN if package in sys.modules)
    for entry in entry_points(group=GROUP):
        yield entry.load()


def find(chunks: list[nn.Module], said: Said, process_group: Any = None) -> Found:
    """Say which framework built a model; a model of none is taken as a plain one.

    Raises:
        FlexError: two frameworks claim it.
    """
    found = [f for finder in finders() if (f := finder(chunks, said, process_group)) is not None]
    if len(found) > 1:
        claims = "; ".join(f"{f.name}, because {f.why}" for f in found)
        raise FlexError(f"several frameworks claim this model: {claims}; give the part of one of them")
    if found:
        return found[0]
    wrapped = pytorch.look(chunks, said, process_group)
    if wrapped is not None:
        return Found("pytorch", *wrapped)
    return Found(
        "plain", "no framework's parallel modules are in it", lambda: plain.take(chunks, said, process_group)
    )
