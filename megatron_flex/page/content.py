"""What a page shows: a model's sites, its ranks, what stands where, costs, data; and all of it as JSON."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_flex.layout import Layout
from megatron_flex.layout.layout_drawing import make_picture
from megatron_flex.page.rank_grid import RankGrid
from megatron_flex.sites import Site
from megatron_flex.view import TreeHook, describe_layout, describe_shape

PAGE_VERSION = 1
POSSIBLE, ACTIVE, FIRED, HIDDEN, FIXED = range(5)
UNKNOWN_LAYOUT = "told when a tensor passes"
MAX_PICTURE_BLOCKS = 2048  # of a picture; one with more is told of in words
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows.

    Attributes:
        title: what it is of.
        mesh: its ranks.
        sites: of all stages, in model order.
        hooks: by site what stands there.
        fired: sites of which a tensor was had.
        costs: by site what a read and an edit of the whole there would send, as `pricing` tells it.
        data: what dumps or statistics saw: one source, or two that are shown side by side.
        divergence: of those two.
        notes: each `damage` or `info`, and what is to be known.
    """

    title: str
    mesh: RankGrid
    sites: Sequence[Site]
    hooks: Mapping[str, Sequence[TreeHook]] = field(default_factory=dict)
    fired: frozenset[str] = frozenset()
    costs: Mapping[str, Json] = field(default_factory=dict)
    data: Sequence[Json] = ()
    divergence: Json | None = None
    notes: Sequence[tuple[str, str]] = ()

    def to_json(self) -> Json:
        """In plain values; what repeats is told once."""
        layouts, shapes, reasons, costs = _UniqueValues(), _UniqueValues(), _UniqueValues(), _UniqueValues()
        columns: dict[str, list[Any]] = {
            n: [] for n in ("name", "layout", "shape", "stage", "chunk", "state", "reason", "cost")
        }
        sizes = self.mesh.sizes
        for site in self.sites:
            why, cost = site.hidden or site.fixed, self.costs.get(site.name)
            row = {
                "name": site.name,
                "layout": layouts.add(UNKNOWN_LAYOUT if site.inferred else site.layout),
                "shape": shapes.add(UNKNOWN_LAYOUT if site.inferred else describe_shape(site.shape)),
                "stage": site.stage,
                "chunk": site.chunk,
                "state": self._state(site),
                "reason": reasons.add(why) if why else -1,
                "cost": -1 if cost is None else costs.add(id(cost), cost),
            }
            for name, value in row.items():
                columns[name].append(value)
        numbers = {name: n for n, name in enumerate(columns["name"])}
        notes = list(self.notes)
        if not self.mesh.sure:
            notes.append(
                ("info", "ranks are numbered by their coordinates here, as their numbers follow no rule")
            )
        return {
            "version": PAGE_VERSION,
            "title": self.title,
            "notes": [{"kind": kind, "text": text} for kind, text in notes],
            "mesh": self.mesh.to_json(),
            "layouts": [_layout_json(layout, sizes) for layout in layouts.values],
            "shapes": shapes.values,
            "reasons": reasons.values,
            "sites": columns,
            "hooks": {numbers[n]: [h.describe() for h in hs] for n, hs in self.hooks.items() if n in numbers},
            "tags": self._tags(numbers),
            "costs": costs.values,
            "data": list(self.data),
            "divergence": self.divergence,
        }

    def _state(self, site: Site) -> int:
        if site.hidden:
            return HIDDEN
        if site.name in self.fired:
            return FIRED
        if any(h.active for h in self.hooks.get(site.name, ())):
            return ACTIVE
        return FIXED if site.fixed else POSSIBLE

    def _tags(self, numbers: Mapping[str, int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for name, hooks in self.hooks.items():
            for tag in sorted({t for h in hooks for t in h.tags}):
                if name in numbers:
                    out.setdefault(tag, []).append(numbers[name])
        return out


class _UniqueValues:
    """Values, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, key: Hashable, value: Any = None) -> int:
        """The number of a value."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self._numbers[key]


def _layout_json(layout: Layout | str, sizes: Mapping[str, int]) -> Json:
    """A layout in words, and its picture."""
    if isinstance(layout, str):
        return {"words": layout, "picture": None}
    shown = make_picture(layout, sizes)
    blocks = [
        {"rows": list(b.rows), "columns": list(b.columns), "ranks": [dict(rank) for rank in b.ranks]}
        for b in shown.blocks
    ]
    drawn = {
        "names": list(shown.names),
        "lengths": list(shown.lengths),
        "blocks": blocks,
        "more": list(shown.more),
        "summed": shown.summed,
    }
    words = describe_layout(layout, sizes)
    return {"words": words, "picture": drawn if len(blocks) <= MAX_PICTURE_BLOCKS else None}
