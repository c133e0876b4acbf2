"""Sites: the named places where a tensor passes, and how names and patterns find them.

A name is `module.path:point`. It is global: layer 17 is layer 17 on whatever stage, chunk or wrapper.
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

GRADIENT_SUFFIX = ".grad"  # what a gradient's name has behind the name of its site
EDITED_SUFFIX = ".edited"  # likewise what left the edits there
HEAD_DIMS = ("n", "g", "heads")  # dims that count heads; `g` those of keys and values
PACKED_HEAD_DIMS = ("nd", "n*d")  # dims in which heads lie one behind the other


class TapCallback(Protocol):
    """What a tap calls with the local tensor; it returns the tensor that goes on, mostly the same."""

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Pass `local` through the hooks.

        Args:
            local: the local tensor.
            layout: where this call's differs from the site's.
            route: of experts' rows, the `Route` to the tokens that the site's layout speaks of.
        """
        ...


class Tap(Protocol):
    """How to get at a tensor in a framework's forward path."""

    def install(self, fire: TapCallback) -> Callable[[], None]:
        """Inject `fire`; the returned function takes it out again, leaving nothing behind."""
        ...


class LeafTap(Tap, Protocol):
    """A tap that can stand at another tensor of the same call."""

    def leaf(self, index: int) -> Tap:
        """The tap at the tensor that is meant by `unpack_idx`."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1:output`.
        layout: how the local tensor there relates to the whole.
        shape: the whole's shape; a name (`s`, `b`) where only the data tell.
        stage: pipeline stage that owns it.
        chunk: which of that stage's virtual chunks it is in.
        hidden: why a hook cannot be put here and which switch would change that; empty if it can.
        fixed: why a hook here can read and not edit, and where to edit instead; empty if it can.
        tap: how to get at it; None on ranks that do not own it.
        inferred: whether nothing tells the layout: every rank holds the whole, unless a hook's
            `expected_shape` says what is cut. `layout` and `shape` are empty then.
        followed: whether the layout is told of each tensor that passes, and may turn out not to be known.
        beside: the layouts of the tensors that pass here behind the first one, as far as they are known.
        index: which of the tensors that pass here is meant, counted depth first.
    """

    name: str
    layout: Layout
    shape: tuple[int | str, ...]
    stage: int = 0
    hidden: str = ""
    fixed: str = ""
    tap: Tap | None = field(default=None, compare=False, repr=False)
    inferred: bool = False
    followed: bool = False
    beside: tuple[Layout, ...] = ()
    index: int = 0
    chunk: int = 0

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
        """The names of the whole's dims: `s`, `b`, `h`, ..."""
        names = [d.name for d in self.layout.dims]
        return tuple(names if self.layout.permute is None else (names[i] for i in self.layout.permute))

    @property
    def place(self) -> str:
        """The name without the number of a tensor."""
        return self.name.removesuffix(f"[{self.index}]")

    def leaf(self, index: int) -> Site:
        """Another of the tensors that pass here; its name ends in `[index]`.

        Raises:
            SiteError: its layout is not known.
        """
        if index == 0:
            return self
        if not self.inferred and not 0 < index <= len(self.beside):
            raise SiteError(
                f"unpack_idx={index}: the layout of that tensor of {self.name} is not known; known are "
                f"{', '.join(map(str, range(len(self.beside) + 1)))}"
            )
        layout = self.layout if self.inferred else self.beside[index - 1]
        tap = None if self.tap is None else cast(LeafTap, self.tap).leaf(index)
        name = f"{self.name}[{index}]"
        return replace(self, name=name, layout=layout, shape=(), tap=tap, index=index)

    def remote(self) -> Site:
        """The site as ranks know it that do not own it."""
        return replace(self, tap=None)


class NamedSite(Protocol):
    """A site, a parameter."""

    @property
    def name(self) -> str:
        """Its global name."""
        ...

    @property
    def inferred(self) -> bool:
        """Whether it is of a plain module."""
        ...

    @property
    def chunk(self) -> int:
        """Which of its stage's virtual chunks it is in."""
        ...


def model_order(site: NamedSite) -> tuple[int, int]:
    """A key to sort sites of all stages and chunks by: embeddings, layers by number, and what follows.

    What plain modules tell is in order already, but for chunks.
    """
    if site.inferred:
        return 0, site.chunk
    if site.name.startswith("mtp"):  # layers too, behind all of the decoder's
        return 2, 0
    layer = re.search(r"\.layers\.(\d+)[.:]", site.name)
    if layer:
        return 1, int(layer.group(1))
    return (0, 0) if site.name.startswith("embedding") else (2, 0)


Pattern = str | re.Pattern[str] | Callable[[Site], bool]  # what names places


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as people write it."""
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
                raise SiteError(f"site {site.name!r} was found twice; a name must stand for one place")
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
            pattern: a site's name, a module's name, or a glob over either. `*` and `?` stay within one step
                of the path (`decoder.layers.*` are the layers, `decoder.layers.*.mlp.*` what is in their
                MLPs), `**` crosses steps, `[0-3]` is one of some characters. A compiled regular expression
                must fit all of a module's name, or of a site's if it has a colon; a function is asked about
                every site, `point` or not.
            point: the point meant where the pattern names none; None for every point.

        Returns:
            The sites in model order.

        Raises:
            SiteError: nothing matches; the message has the nearest names.
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
            "told when a tensor passes" if s.inferred else s.layout.describe(),
            " x ".join(map(str, s.shape)),
            s.stage,
            f"no hook: {s.hidden}" if s.hidden else f"can be read only: {s.fixed}" if s.fixed else "",
        )
        for s in sites
    )
    rest = "name fewer (flex.sites('decoder.layers.0.**')), or fold layers by flex.show()"
    content = html_table(("site", "layout", "whole", ">stage", ""), rows, len(sites), rest)
    return html_fragment(f"{head}, {hidden} of them hidden", content)
