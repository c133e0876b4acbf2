"""Checksums of replicas: which ranks hold the same tensor, and whether it is the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_flex.dump.part_format import GRADIENT, PARAMETER, PARAMETER_GRADIENT, REPLICA, ROUTING, ShardEntry, StoredPart
from megatron_flex.dump.layouts import layout_from_json
from megatron_flex.dump.manifest import Manifest
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Layout
from megatron_flex.sites import GRADIENT_SUFFIX

UNSHARED_AXES = ("pp", "dp", "edp")  # axes along which ranks have other activations, though no layout names them


class _Replica(NamedTuple):
    rank: int
    entry: ShardEntry


@dataclass(slots=True)
class ReplicaChecksums:
    """The replicas of one iteration.

    Attributes:
        manifest: of the run; without one nothing is compared.
        compared: how many checksums of replicas there are.
    """

    manifest: Manifest | None
    compared: int = 0
    _owners: dict[tuple[Any, ...], _Replica] = field(default_factory=dict)
    _copies: dict[tuple[Any, ...], list[_Replica]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rank: int, part: StoredPart) -> None:
        """Take in a part."""
        if self.manifest is None or not self.manifest.settings.get("replicas"):
            return
        try:
            layouts = [layout_from_json(record) for record in part.index.layouts]
        except (LayoutError, KeyError, TypeError, ValueError, AttributeError):
            return  # what is wrong with them is told elsewhere
        for entry in part.index.entries:
            if entry.kind == ROUTING or entry.route is not None or not 0 <= entry.layout < len(layouts):
                continue  # experts' rows: no layout tells which ranks hold the same ones
            key = self._key(entry, layouts[entry.layout], dict(part.index.coords))
            if entry.kind == REPLICA:
                self.compared += 1
                self._copies[key].append(_Replica(rank, entry))
            else:
                self._owners[key] = _Replica(rank, entry)

    def differing(self) -> Iterator[tuple[int, int, ShardEntry]]:
        """The rank, the one that it is compared with (which wrote it, if one did), and that one's entry."""
        for key, copies in self._copies.items():
            first = self._owners.get(key, copies[0])
            for rank, entry in copies:
                if entry.crc != first.entry.crc:
                    yield rank, first.rank, first.entry

    def _key(self, entry: ShardEntry, layout: Layout, coords: dict[str, int]) -> tuple[Any, ...]:
        """What ranks that hold the same tensor have in common."""
        assert self.manifest is not None
        name = entry.site + (GRADIENT_SUFFIX if entry.kind in (GRADIENT, PARAMETER_GRADIENT) else "")
        whose = entry.kind == REPLICA and name.removesuffix(GRADIENT_SUFFIX) in {
            p.name for p in self.manifest.parameters
        }
        apart = () if whose or entry.kind in (PARAMETER, PARAMETER_GRADIENT) else UNSHARED_AXES
        expert = any(a in layout.axes for a in self.manifest.experts)
        copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
        at = tuple(
            (axis, coords.get(axis, 0) // copies.get(axis, 1))
            for axis, size in (self.manifest.experts if expert else self.manifest.axes).items()
            if size > 1 and (axis in apart or axis in layout.axes)
        )
        return name, entry.microbatch, entry.call, entry.span, at
