"""What figures are made from: a dump, statistics or a cache, each asked in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megatron_flex.dump.layouts import layout_from_json
from megatron_flex.dump.reader import OpenDump, open_dump
from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.figures.figure_data import FigureError
from megatron_flex.figures.values import CacheSource, DumpSource, TensorSource
from megatron_flex.layout import Layout
from megatron_flex.lens import ActivationCache
from megatron_flex.sites import Site, SiteTable
from megatron_flex.statistics.files import FILE_NAME, list_files
from megatron_flex.statistics.measured import TensorStatistics
from megatron_flex.statistics.reading import OpenStatistics, open_statistics
from megatron_flex.view.words import describe_layout, describe_numbers

Source = OpenDump | OpenStatistics | ActivationCache | str | PathLike[str]


@dataclass(frozen=True)
class StatisticsSource:
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

    def rows(self, names: Sequence[str]) -> Iterator[TensorStatistics]:
        """What is known of some tensors, by iteration."""
        wanted = set(names)
        return (row for row in self.found.rows() if row.site in wanted)

    def layout(self, name: str) -> str:
        """How ranks held a tensor, in words."""
        for header in reversed(self.found.headers):
            for place in header.sites:
                if place.name == name.removesuffix(".grad"):
                    return describe_layout(layout_from_json(dict(place.layout)), header.axes)
        return ""


@contextmanager
def open_source(source: Source) -> Iterator[TensorSource | StatisticsSource]:
    """A source to ask; what a path names is opened, and closed again.

    Raises:
        FlexError: there is neither a dump nor statistics at the path, or they are damaged.
    """
    if isinstance(source, ActivationCache):
        yield CacheSource(source)
    elif isinstance(source, OpenStatistics):
        yield StatisticsSource(source)
    elif isinstance(source, OpenDump):
        yield DumpSource(source)
    elif _is_statistics(Path(source)):
        yield StatisticsSource(open_statistics(source))
    else:
        with open_dump(source) as dump:
            yield DumpSource(dump)


@contextmanager
def open_tensor_source(source: Source, what: str) -> Iterator[TensorSource]:
    """The same of a source that has the tensors themselves.

    Args:
        source: the source.
        what: is made of them, in words.

    Raises:
        FigureError: it is statistics.
    """
    with open_source(source) as found:
        if isinstance(found, StatisticsSource):
            raise FigureError(
                f"{found.where} has numbers of tensors, not the tensors that {what} is made of: dump them "
                "(mf.Dump), or keep them in a cache (flex.run_with_cache)"
            )
        yield found


def _is_statistics(path: Path) -> bool:
    if FILE_NAME.fullmatch(path.name):
        return True
    return path.is_dir() and not any(path.glob("run-*")) and bool(list_files(path))


def match_names(found: TensorSource | StatisticsSource, pattern: str) -> list[str]:
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
        f"{found.where} has nothing that {pattern!r} means{suggest_nearest(pattern, found.names)}; dump or record it"
    )


def make_caption(what: str, iterations: Sequence[int], *more: str, layout: str = "") -> str:
    """Site, iterations and layout in one line; without iterations of a cache.

    Args:
        what: the site, or the pattern, and what is shown of it.
        iterations: their numbers.
        more: what else is to be told: the sample.
        layout: in words.
    """
    many = "s" if len(iterations) > 1 else ""
    numbers = [f"iteration{many} {describe_numbers(iterations)}"] if len(iterations) else []
    return " · ".join(part for part in (what, *numbers, *more, layout) if part)


def caption_iterations(found: TensorSource | StatisticsSource, iterations: Sequence[int]) -> Sequence[int]:
    """The iterations that a caption tells: of a cache, which is of one run, none."""
    return [] if isinstance(found, CacheSource) else iterations


def describe_layouts(found: TensorSource | StatisticsSource, names: Sequence[str]) -> str:
    """The layout of several tensors, in words, or that they differ."""
    several = list(dict.fromkeys(found.layout(name) for name in names))
    return several[0] if len(several) == 1 else f"{len(several)} different layouts"
