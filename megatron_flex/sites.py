"""Sites: the named hook points of a model, and how names and patterns find them.

A name is `module.path:point`. It is global: layer 17 is layer 17 on every stage, chunk or wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, cast

from torch import Tensor

from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.layout import Layout
from megatron_flex.notebook_html import count_words, html_fragment, html_table

GRADIENT_SUFFIX = ".grad"  # suffix of a gradient's name, after the name of its site
EDITED_SUFFIX = ".edited"  # suffix of the tensor after all edits at a site
HEAD_DIMS = ("n", "g", "heads")  # dims that count heads; `g` counts heads of keys and values
PACKED_HEAD_DIMS = ("nd", "n*d")  # dims in which the heads are concatenated


class TapCallback(Protocol):
    """What a tap calls with the local tensor; it returns the tensor to continue with, usually the same."""

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Run the hooks of the site on `local`.

        Args:
            local: the local tensor of this call.
            layout: the layout of this call, where it differs from the site's.
            route: for rows of experts, the `Route` to the tokens of the site's layout.
        """
        ...


class Tap(Protocol):
    """Access to one tensor in a framework's forward path."""

    def install(self, fire: TapCallback) -> Callable[[], None]:
        """Install `fire`; the returned function removes it and restores every attribute."""
        ...


class LeafTap(Tap, Protocol):
    """A tap that can be moved to another tensor of the same call."""

    def leaf(self, index: int) -> Tap:
        """The tap for the tensor that `unpack_idx` selects."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """A hook point: a named tensor of the forward pass.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1:output`.
        layout: the relation of the local tensor to the full tensor.
        shape: the shape of the full tensor; a name (`s`, `b`) where it depends on the data.
        stage: the pipeline stage that owns it.
        chunk: the virtual chunk of that stage.
        hidden: why no hook can be registered here, and which setting would change that; empty if one can.
        read_only_reason: why a hook here can only read, and where to edit instead; empty if it can edit.
        tap: access to the tensor; None on ranks that do not own it.
        inferred: whether the layout is not declared: the tensor is taken as replicated, unless a hook's
            `expected_shape` says which dim is sharded. `layout` and `shape` are empty then.
        propagated: whether the layout is propagated to each tensor at run time, and may turn out unknown.
        further_layouts: the known layouts of further tensors of the same output.
        index: which tensor of a nested output this is, counted depth first.
        unbatched: whether the tensor has no batch dim `b` when sequences are packed.
    """

    name: str
    layout: Layout
    shape: tuple[int | str, ...]
    stage: int = 0
    hidden: str = ""
    read_only_reason: str = ""
    tap: Tap | None = field(default=None, compare=False, repr=False)
    inferred: bool = False
    propagated: bool = False
    further_layouts: tuple[Layout, ...] = ()
    index: int = 0
    chunk: int = 0
    unbatched: bool = False

    @property
    def module(self) -> str:
        """The module path of the name."""
        return self.name.partition(":")[0]

    @property
    def point(self) -> str:
        """The point within the module: `output`, `input`, `partial`, `mid`, ..."""
        return self.name.partition(":")[2]

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the full tensor's dims: `s`, `b`, `h`, ..."""
        names = [d.name for d in self.layout.dims]
        return tuple(names if self.layout.permute is None else (names[i] for i in self.layout.permute))

    @property
    def place(self) -> str:
        """The name without the index of a tensor."""
        return self.name.removesuffix(f"[{self.index}]")

    def leaf(self, index: int) -> Site:
        """Another tensor of the same output; its name ends in `[index]`.

        Raises:
            SiteError: its layout is not known.
        """
        if index == 0:
            return self
        if not self.inferred and not 0 < index <= len(self.further_layouts):
            raise SiteError(
                f"unpack_idx={index}: the layout of that tensor of {self.name} is not known; known are "
                f"{', '.join(map(str, range(len(self.further_layouts) + 1)))}"
            )
        layout = self.layout if self.inferred else self.further_layouts[index - 1]
        tap = None if self.tap is None else cast(LeafTap, self.tap).leaf(index)
        name = f"{self.name}[{index}]"
        return replace(self, name=name, layout=layout, shape=(), tap=tap, index=index)

    def remote(self) -> Site:
        """The site as known on ranks that do not own it."""
        return replace(self, tap=None)


class NamedSite(Protocol):
    """A site or a parameter."""

    @property
    def name(self) -> str:
        """Its global name."""
        ...

    @property
    def inferred(self) -> bool:
        """Whether it belongs to a plain module."""
        ...

    @property
    def chunk(self) -> int:
        """The virtual chunk of its stage."""
        ...


def model_order(site: NamedSite) -> tuple[int, int]:
    """A sort key for sites of all stages and chunks: embeddings, layers by number, then the rest.

    Sites of plain modules are already in order within a chunk.
    """
    if site.inferred:
        return 0, site.chunk
    if site.name.startswith("mtp"):  # layers too, sorted after those of the decoder
        return 2, 0
    layer = re.search(r"\.layers\.(\d+)[.:]", site.name)
    if layer:
        return 1, int(layer.group(1))
    return (0, 0) if site.name.startswith("embedding") else (2, 0)


Pattern = str | re.Pattern[str] | Callable[[Site], bool]  # selects sites


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as a user writes it."""
    if isinstance(pattern, str):
        return pattern
    return (
        pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__qualname__", str(pattern))
    )


GLOB = re.compile(r"[*?\[]")  # what makes a name a pattern
GLOBS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    tokens = re.findall(r"\*\*|\[!?[^\]]+\]|.", pattern)
    return re.compile("".join(_glob_token(t) for t in tokens))


def _glob_token(token: str) -> str:
    if token in GLOBS:
        return GLOBS[token]
    return token.replace("[!", "[^") if len(token) > 1 else re.escape(token)


class SiteList(list[Site]):
    """A list of sites; in a notebook a table."""

    def _repr_html_(self) -> str:
        return _sites_html(count_words(len(self), "site"), self)


class SiteTable:
    """All sites of a model, over all stages, by name and in model order."""

    def __init__(self, sites: Iterable[Site] = ()) -> None:
        self._sites: dict[str, Site] = {}
        for site in sites:
            if site.name in self._sites:
                raise SiteError(f"site {site.name!r} was found twice; a name must identify one hook point")
            self._sites[site.name] = site
        self._of_module: dict[str, list[Site]] = {}
        for site in self:
            self._of_module.setdefault(site.module, []).append(site)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, name: str) -> bool:
        return name in self._sites

    def __getitem__(self, name: str) -> Site:
        if name not in self._sites:
            raise SiteError(f"no site {name!r}{suggest_nearest(name, self._sites)}")
        return self._sites[name]

    def _repr_html_(self) -> str:
        return _sites_html(f"SiteTable · {count_words(len(self), 'site')}", list(self))

    def match(self, pattern: Pattern, point: str | None = None) -> SiteList:
        """Find sites.

        Args:
            pattern: a site's name, a module's name, or a glob over either. `*` and `?` match within one
                component of the path (`decoder.layers.*` are the layers, `decoder.layers.*.mlp.*` the modules
                in their MLPs), `**` matches across components, `[0-3]` matches one character. A compiled
                regular expression must match the full name of a module, or of a site if it has a colon; a
                function is called with every site and returns whether it matches, whatever `point` is.
            point: the point to use where the pattern names none; None for every point.

        Returns:
            The sites in model order.

        Raises:
            SiteError: nothing matches; the message lists the nearest names.
        """
        if not isinstance(pattern, str):
            return self._chosen(pattern, point)
        path, colon, named = pattern.partition(":")
        wanted = named if colon else point
        here = self if GLOB.search(path) else self._of_module.get(path, ())
        found = [
            s
            for s in here
            if _glob(path).fullmatch(s.module) and (wanted is None or _glob(wanted).fullmatch(s.point))
        ]
        if not found:
            raise SiteError(self._nothing(pattern, path, wanted))
        return SiteList(found)

    def _chosen(self, pattern: re.Pattern[str] | Callable[[Site], bool], point: str | None) -> SiteList:
        if not isinstance(pattern, re.Pattern):
            found = [s for s in self if pattern(s)]
        elif ":" in pattern.pattern.replace("(?:", ""):
            found = [s for s in self if pattern.fullmatch(s.name)]
        else:
            found = [s for s in self if pattern.fullmatch(s.module) and point in (None, s.point)]
        if not found:
            raise SiteError(
                f"{describe_pattern(pattern)!r} matches none of {len(self)} sites; flex.sites() lists them"
            )
        return SiteList(found)

    def _nothing(self, pattern: str, path: str, point: str | None) -> str:
        points = sorted({s.point for s in self if _glob(path).fullmatch(s.module)})
        if points:
            return f"{pattern!r} has no point {point!r}; it has {', '.join(points)}"
        names = [s.name for s in self] if ":" in pattern else list(dict.fromkeys(s.module for s in self))
        return f"pattern {pattern!r} matches no site{suggest_nearest(pattern, names)}"


def _sites_html(head: str, sites: Sequence[Site]) -> str:
    """A table of sites, for notebooks."""
    hidden = sum(bool(s.hidden) for s in sites)
    rows = (
        (
            s.name,
            "known when the model runs" if s.inferred else s.layout.describe(),
            " x ".join(map(str, s.shape)),
            s.stage,
            f"no hook: {s.hidden}"
            if s.hidden
            else f"can be read only: {s.read_only_reason}"
            if s.read_only_reason
            else "",
        )
        for s in sites
    )
    rest = "name fewer (flex.sites('decoder.layers.0.**')), or fold layers by flex.report.show()"
    content = html_table(("site", "layout", "whole", ">stage", ""), rows, len(sites), rest)
    return html_fragment(f"{head}, {hidden} of them hidden", content)


def strip_numbers(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=[.:]|$)", ".*", name)
