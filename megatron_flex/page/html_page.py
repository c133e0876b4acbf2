"""A page: a model's sites, its ranks, hooks, estimates and data; as JSON, and as one HTML file with nothing
from anywhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_flex.config import PAGE_BYTES
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout
from megatron_flex.layout.layout_drawing import make_picture
from megatron_flex.page.block_order import LAYER_NUMBER, execution_order, has_experts
from megatron_flex.page.rank_grid import RankGrid
from megatron_flex.sites import Site
from megatron_flex.view import TreeHook, describe_layout, describe_shape

PAGE_VERSION = 1
AVAILABLE, HOOKED, RECORDED, HIDDEN, READ_ONLY = range(5)
UNKNOWN_LAYOUT = "known when the model runs"
MAX_PICTURE_BLOCKS = 2048  # one with more is described as text
Json = dict[str, Any]
PageNote = dict[str, str]  # its "kind", `damage` or `info`, and its "text"


def damage_note(text: str) -> PageNote:
    return {"kind": "damage", "text": text}


def info_note(text: str) -> PageNote:
    """A note with other information, such as omissions."""
    return {"kind": "info", "text": text}


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page.

    Attributes:
        title: the title.
        mesh: the ranks.
        sites: of all stages; the page has them in the order of execution.
        hooks: the hooks of each site.
        recorded: sites with a captured, dumped or measured tensor.
        estimates: for each site the traffic of a read and of an edit of the full tensor, as
            `estimate_sites` returns it.
        data: of dumps or statistics: one source, or two to show side by side.
        divergence: the comparison of those two.
        notes: each `{"kind": "damage" | "info", "text"}`.
        chosen: the name of the site that is chosen when the page is opened; empty for one that the data
            have, or for none where there are no data.

    Examples:
        `flex.report.to_html()` fills and writes a page; of a page that you made:

        >>> from megatron_flex.page import Page, grid_of_mesh
        >>> page = Page("A model", grid_of_mesh(flex.session.mesh), flex.sites())
        >>> len(page.sites)
        159
    """

    title: str
    mesh: RankGrid
    sites: Sequence[Site]
    hooks: Mapping[str, Sequence[TreeHook]] = field(default_factory=dict)
    recorded: frozenset[str] = frozenset()
    estimates: Mapping[str, Json] = field(default_factory=dict)
    data: Sequence[Json] = ()
    divergence: Json | None = None
    notes: Sequence[PageNote] = ()
    chosen: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", execution_order(self.sites))

    def to_json(self) -> Json:
        """Return the page as plain values; repeated values are stored once.

        Examples:
            >>> from megatron_flex.page import Page, grid_of_mesh
            >>> data = Page("A model", grid_of_mesh(flex.session.mesh), flex.sites()).to_json()
        """
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
                info_note("ranks are numbered by their coordinates here, as their numbers follow no rule")
            )
        return {
            "version": PAGE_VERSION,
            "title": self.title,
            "notes": notes,
            "mesh": self.mesh.to_json() | ({} if has_experts(self.sites) else {"experts": []}),
            "layouts": [_layout_json(layout, sizes) for layout in layouts.values],
            "shapes": shapes.values,
            "reasons": reasons.values,
            "sites": columns,
            "hooks": {numbers[n]: [h.describe() for h in hs] for n, hs in self.hooks.items() if n in numbers},
            "groups": self._groups(numbers),
            "estimates": estimates.values,
            "data": list(self.data),
            "divergence": self.divergence,
            "chosen": numbers.get(self.chosen or self._recorded_site(), -1),
        }

    def _recorded_site(self) -> str:
        """The site to open with: the first divergence, or the first sharded tensor that most layers have."""
        if self.divergence is not None and self.divergence["first"] is not None:
            return self.sites[self.divergence["first"]].name
        numbers = {number for source in self.data for number in source["sites"]}
        recorded = [s for n, s in enumerate(self.sites) if n in numbers]
        layers = Counter(_without_layer(s.name) for s in recorded)
        sizes = self.mesh.sizes

        def rank(site: Site) -> tuple[int, bool]:
            cuts = [c for d in site.layout.dims for c in d.cuts]
            return layers[_without_layer(site.name)], any(sizes.get(c.axis, 1) > 1 for c in cuts)

        return max(recorded, key=rank).name if recorded else ""  # the first of equals

    def _state(self, site: Site) -> int:
        if site.hidden:
            return HIDDEN
        if site.name in self.recorded:
            return RECORDED
        if any(h.active for h in self.hooks.get(site.name, ())):
            return HOOKED
        return READ_ONLY if site.read_only_reason else AVAILABLE

    def _groups(self, numbers: Mapping[str, int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for name, hooks in self.hooks.items():
            for group in sorted({g for h in hooks for g in h.groups}):
                if name in numbers:
                    out.setdefault(group, []).append(numbers[name])
        return out


def _without_layer(name: str) -> str:
    """The name with `*` for the number of the layer."""
    return LAYER_NUMBER.sub("*", name, count=1)


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


FIRST_SCRIPTS, LAST_SCRIPTS = (
    ("theme.js", "core.js", "top.js"),
    ("go.js",),
)  # required by others, and run last
BASE_STYLE = "style.css"  # the other styles extend it
PLACEHOLDER = re.compile(r"@(title|style|attributes|content|scripts)@")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html(page: Page) -> str:
    """Return the page, as text in ASCII except for its scripts and title.

    Values from files are in it once, as JSON in which nothing ends a script or begins a tag.

    Examples:
        >>> from megatron_flex.page import Page, grid_of_mesh, html
        >>> html(Page("A model", grid_of_mesh(flex.session.mesh), flex.sites()))[:15]
        '<!doctype html>'
    """
    script_names = sorted(f.name for f in _assets().iterdir() if f.name.endswith(".js"))
    middle = [n for n in script_names if n not in (*FIRST_SCRIPTS, *LAST_SCRIPTS)]
    content = read_asset("model.html").replace("@page@", page_json(page))
    return fill_template(page.title, content, (*FIRST_SCRIPTS, *middle, *LAST_SCRIPTS))


def fill_template(
    title: str, content: str, scripts: Iterable[str], *, style: str = "", attributes: str = ""
) -> str:
    """The text of a page.

    Args:
        title: of the page, as text.
        content: of its body, as HTML.
        scripts: names of assets, in the order in which they run.
        style: what it adds to the styles of all pages.
        attributes: of its body, as HTML.
    """
    parts = {
        "title": escape(title),
        "style": f"{read_styles()}\n{style}",
        "attributes": attributes,
        "content": content,
        "scripts": "\n".join(f"<script>\n{read_asset(name)}</script>" for name in scripts),
    }
    return PLACEHOLDER.sub(lambda matched: parts[matched[1]], read_asset("page.html"))


def _assets() -> Traversable:
    return files("megatron_flex.page") / "assets"


def read_asset(name: str) -> str:
    """The text of a template, a style or a script of pages, by its path in their folder."""
    return (_assets() / name).read_text(encoding="utf-8")


def read_styles() -> str:
    """The styles of all pages, the one that the others extend first."""
    names = (f.name for f in _assets().iterdir() if f.name.endswith(".css"))
    return "\n".join(read_asset(name) for name in sorted(names, key=lambda n: (n != BASE_STYLE, n)))


def page_json(page: Page) -> str:
    """The content of the page, as JSON that is safe in a script element."""
    encoded = json.dumps(page.to_json(), separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda matched: ESCAPES[matched[0]], encoded)


def write(page: Page, path: str | PathLike[str], *, most_bytes: int | None = PAGE_BYTES) -> Path:
    """Write a page atomically.

    Args:
        page: the content.
        path: the file; an existing one is replaced.
        most_bytes: maximum size; None for any size.

    Returns:
        The path of the file.

    Raises:
        FlexError: it would be larger, or cannot be written.

    Examples:
        >>> from megatron_flex.page import Page, grid_of_mesh, write
        >>> write(Page("A model", grid_of_mesh(flex.session.mesh), flex.sites()), "model.html")
        PosixPath('model.html')
    """
    return write_page_text(html(page), path, most_bytes=most_bytes)


def write_page_text(content: str, path: str | PathLike[str], *, most_bytes: int | None = PAGE_BYTES) -> Path:
    """Write the text of a page atomically.

    Args:
        content: the HTML.
        path: the file; an existing one is replaced.
        most_bytes: maximum size; None for any size.

    Returns:
        The path of the file.

    Raises:
        FlexError: it would be larger, or cannot be written.
    """
    target = Path(path)
    text = content.encode("utf-8", errors="replace")
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
