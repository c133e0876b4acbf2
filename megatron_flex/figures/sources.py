"""What figures are made from: a dump, statistics or a cache, each asked in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megatron_flex.dump.layouts import from_json
from megatron_flex.dump.reading import OpenDump, open_dump
from megatron_flex.errors import SiteError, nearest
from megatron_flex.figures.types import FigureError
from megatron_flex.figures.values import OfCache, OfDump, Values
from megatron_flex.layout import Layout
from megatron_flex.lens import ActivationCache
from megatron_flex.sites import Site, SiteTable
from megatron_flex.statistics.files import NAME, starts
from megatron_flex.statistics.measured import Measured
from megatron_flex.statistics.reading import OpenStatistics, open_statistics
from megatron_flex.view.words import layout_in_words, numbers_in_words

Source = OpenDump | OpenStatistics | ActivationCache | str | PathLike[str]


@dataclass(frozen=True)
class OfStatistics:
    """Statistics as a source: numbers of tensors, not the tensors.

    Attributes:
        found: what was read.
    """

    found: OpenStatistics

    @property
    def where(self) -> str:
        """In words."""
        return str(self.found.path)

    @property
    def names(self) -> list[str]:
        """The tensors that were measured."""
        return self.found.sites

    @property
    def iterations(self) -> list[int]:
        """Those of which anything is known."""
        return self.found.iterations

    def rows(self, names: Sequence[str]) -> Iterator[Measured]:
        """What is known of some tensors, by iteration."""
        wanted = set(names)
        return (row for row in self.found.rows() if row.site in wanted)

    def layout(self, name: str) -> str:
        """How ranks held a tensor, in words."""
        for header in reversed(self.found.headers):
            for place in header.sites:
                if place.name == name.removesuffix(".grad"):
                    return layout_in_words(from_json(dict(place.layout)), header.axes)
        return ""


@contextmanager
def reading(source: Source) -> Iterator[Values | OfStatistics]:
    """A source to ask; what a path names is opened, and closed again.

    Raises:
        FlexError: there is neither a dump nor statistics at the path, or they are damaged.
    """
    if isinstance(source, ActivationCache):
        yield OfCache(source)
    elif isinstance(source, OpenStatistics):
        yield OfStatistics(source)
    elif isinstance(source, OpenDump):
        yield OfDump(source)
    elif _is_statistics(Path(source)):
        yield OfStatistics(open_statistics(source))
    else:
        with open_dump(source) as dump:
            yield OfDump(dump)


@contextmanager
def reading_values(source: Source, what: str) -> Iterator[Values]:
    """The same of a source that has the tensors themselves.

    Args:
        source: the source.
        what: is made of them, in words.

    Raises:
        FigureError: it is statistics.
    """
    with reading(source) as found:
        if isinstance(found, OfStatistics):
            raise FigureError(
                f"{found.where} has numbers of tensors, not the tensors that {what} is made of: dump them "
                "(mf.Dump), or keep them in a cache (flex.run_with_cache)"
            )
        yield found


def _is_statistics(path: Path) -> bool:
    if NAME.fullmatch(path.name):
        return True
    return path.is_dir() and not any(path.glob("run-*")) and bool(starts(path))


def matching(found: Values | OfStatistics, pattern: str) -> list[str]:
    """The names that a pattern means, as hooks read it: a module stands for its output.

    Raises:
        FigureError: it means none.
    """
    if pattern in found.names:
        return [pattern]
    table = SiteTable(Site(name, Layout(()), ()) for name in found.names)
    for point in ("output", ""):
        try:
            return [site.name for site in table.match(pattern, point)]
        except SiteError:
            continue
    raise FigureError(
        f"{found.where} has nothing that {pattern!r} means{nearest(pattern, found.names)}; dump or record it"
    )


def caption(what: str, iterations: Sequence[int], *more: str, layout: str = "") -> str:
    """Site, iterations and layout in one line; without iterations of a cache.

    Args:
        what: the site, or the pattern, and what is shown of it.
        iterations: their numbers.
        more: what else is to be told: the sample.
        layout: in words.
    """
    many = "s" if len(iterations) > 1 else ""
    told = [f"iteration{many} {numbers_in_words(iterations)}"] if len(iterations) else []
    return " · ".join(part for part in (what, *told, *more, layout) if part)


def told_of(found: Values | OfStatistics, iterations: Sequence[int]) -> Sequence[int]:
    """The iterations that a caption tells: of a cache, which is of one run, none."""
    return [] if isinstance(found, OfCache) else iterations


def layouts(found: Values | OfStatistics, names: Sequence[str]) -> str:
    """The layout of several tensors, in words, or that they differ."""
    several = list(dict.fromkeys(found.layout(name) for name in names))
    return several[0] if len(several) == 1 else f"{len(several)} different layouts"
