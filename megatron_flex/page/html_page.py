"""A page: a model's sites, its ranks, hooks, estimates and data; as JSON, and as one HTML file with nothing
from anywhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout
from megatron_flex.layout.layout_drawing import make_picture
from megatron_flex.notebook_html import PAGE_BYTES
from megatron_flex.page.rank_grid import RankGrid
from megatron_flex.sites import Site
from megatron_flex.view import TreeHook, describe_layout, describe_shape

PAGE_VERSION = 1
POSSIBLE, ACTIVE, FIRED, HIDDEN, FIXED = range(5)
UNKNOWN_LAYOUT = "known when the model runs"
MAX_PICTURE_BLOCKS = 2048  # one with more is described as text
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page.

    Attributes:
        title: the title.
        mesh: the ranks.
        sites: of all stages, in model order.
        hooks: the hooks of each site.
        fired: sites with a captured tensor.
        costs: for each site the traffic of a read and of an edit of the full tensor, as `pricing` returns it.
        data: of dumps or statistics: one source, or two to show side by side.
        divergence: the comparison of those two.
        notes: each `damage` or `info`, and a text.
    """

    title: str
    mesh: RankGrid
    sites: Sequence[Site]
    hooks: Mapping[str, Sequence[TreeHook]] = field(default_factory=dict)
    fired: frozenset[str] = frozenset()
    estimates: Mapping[str, Json] = field(default_factory=dict)
    data: Sequence[Json] = ()
    divergence: Json | None = None
    notes: Sequence[tuple[str, str]] = ()

    def to_json(self) -> Json:
        """As plain values; repeated values are stored once."""
        layouts, shapes, reasons, estimates = (
            _UniqueValues(),
            _UniqueValues(),
            _UniqueValues(),
            _UniqueValues(),
        )
        columns: dict[str, list[Any]] = {
            n: [] for n in ("name", "layout", "shape", "stage", "chunk", "state", "reason", "estimate")
        }
        sizes = self.mesh.sizes
        for site in self.sites:
            why, estimate = site.hidden or site.read_only_reason, self.estimates.get(site.name)
            row = {
                "name": site.name,
                "layout": layouts.add(UNKNOWN_LAYOUT if site.inferred else site.layout),
                "shape": shapes.add(UNKNOWN_LAYOUT if site.inferred else describe_shape(site.shape)),
                "stage": site.stage,
                "chunk": site.chunk,
                "state": self._state(site),
                "reason": reasons.add(why) if why else -1,
                "estimate": -1 if estimate is None else estimates.add(id(estimate), estimate),
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
            "groups": self._groups(numbers),
            "estimates": estimates.values,
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
        return FIXED if site.read_only_reason else POSSIBLE

    def _groups(self, numbers: Mapping[str, int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for name, hooks in self.hooks.items():
            for group in sorted({g for h in hooks for g in h.groups}):
                if name in numbers:
                    out.setdefault(group, []).append(numbers[name])
        return out


class _UniqueValues:
    """Values, each stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, key: Hashable, value: Any = None) -> int:
        """The index of a value."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self._numbers[key]


def _layout_json(layout: Layout | str, sizes: Mapping[str, int]) -> Json:
    """A layout as text, and its picture."""
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


FIRST_SCRIPTS, LAST_SCRIPTS = ("core.js", "top.js"), ("go.js",)  # required by others, and run last
BASE_STYLE = "style.css"  # the other styles extend it
PLACEHOLDER = re.compile(r"@(title|style|page|scripts)@")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html(page: Page) -> str:
    """The page, as text in ASCII except for its scripts and title.

    Values from files are in it once, as JSON in which nothing ends a script or begins a tag.
    """
    assets = files("megatron_flex.page") / "assets"
    there = sorted(f.name for f in assets.iterdir() if f.name.endswith(".js"))
    styles = sorted(
        (f.name for f in assets.iterdir() if f.name.endswith(".css")), key=lambda n: (n != BASE_STYLE, n)
    )
    middle = [n for n in there if n not in (*FIRST_SCRIPTS, *LAST_SCRIPTS)]
    scripts = [
        f"<script>\n{(assets / name).read_text(encoding='utf-8')}</script>"
        for name in (*FIRST_SCRIPTS, *middle, *LAST_SCRIPTS)
    ]
    parts = {
        "title": escape(page.title),
        "style": "\n".join((assets / name).read_text(encoding="utf-8") for name in styles),
        "page": page_json(page),
        "scripts": "\n".join(scripts),
    }
    frame = (assets / "page.html").read_text(encoding="utf-8")
    return PLACEHOLDER.sub(lambda found: parts[found[1]], frame)


def page_json(page: Page) -> str:
    """The content of the page, as JSON that is safe in a script element."""
    encoded = json.dumps(page.to_json(), separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda found: ESCAPES[found[0]], encoded)


def write(page: Page, path: str | PathLike[str], *, most_bytes: int | None = PAGE_BYTES) -> Path:
    """Write a page atomically.

    Args:
        page: the content.
        path: the file; an existing one is replaced.
        most_bytes: maximum size; None for any size.

    Raises:
        FlexError: it would be larger, or cannot be written.
    """
    target = Path(path)
    text = html(page).encode("utf-8", errors="replace")
    if most_bytes is not None and len(text) > most_bytes:
        raise FlexError(
            f"{target}: the page would have {len(text) / 1e6:.2f} MB, more than {most_bytes / 1e6:.2f} MB: "
            "show fewer sites by a pattern, or allow it by most_bytes (--most-megabytes)"
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # x mode: in a shared folder, another user may have created a link
            file.write(text)
        draft.replace(target)
    except OSError as error:
        raise FlexError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target
