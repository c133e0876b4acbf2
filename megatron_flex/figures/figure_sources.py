"""Sources of figures: a dump, statistics or a cache, with one interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_flex.dump.export import read_blocks
from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
from megatron_flex.dump.run_folders import has_runs
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.figures.figure_data import FigureError
from megatron_flex.layout import Layout
from megatron_flex.layout.gradient_layout import layout_in_pass
from megatron_flex.lens import ActivationCache, Alias
from megatron_flex.lens.tensor_views import BatchFirst, Pattern, View
from megatron_flex.sites import Site, SiteTable
from megatron_flex.statistics.statistics_files import has_statistics
from megatron_flex.statistics.statistics_reader import OpenStatistics, open_statistics
from megatron_flex.statistics.statistics_records import TensorStatistics
from megatron_flex.view.model_tree import describe_layout, describe_numbers

PATTERN_SITES = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\..*core_attention:probs")
QUERY_SUFFIXES = ("hook_pattern", "hook_attn_scores", ":probs", ":scores")  # [batch, head, query, key]


class SampleRows(NamedTuple):
    """One sample of a tensor, token by token.

    Attributes:
        sample: its index in the global batch.
        tokens: the positions.
        features: the shape of one token's values.
        read: reads tokens from a first to before a last one: `[token, *features]`.
    """

    sample: int
    tokens: tuple[int, ...]
    features: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    def all(self) -> Tensor:
        """All tokens."""
        return self.read(0, len(self.tokens))


class TensorSource(Protocol):
    """A source that has tensors.

    Attributes:
        where: the source, as text.
        names: the names of its tensors.
        record: how to record a tensor, as text: with `{}` for its name.
    """

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def record(self) -> str: ...

    def iterations(self, name: str) -> list[int]:
        """The iterations that have a tensor; none for a cache, which has one run."""
        ...

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        """All values of a tensor in one iteration, in parts."""
        ...

    def samples(self, name: str, iteration: int) -> int:
        """The number of samples of a tensor."""
        ...

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        """One sample.

        Raises:
            FigureError: the tensor has no samples or tokens, or not so many.
        """
        ...

    def layout(self, name: str) -> str:
        """The layout of a tensor, as text."""
        ...


@dataclass(frozen=True)
class DumpSource:
    """A dump as a source.

    Attributes:
        dump: the dump.
    """

    dump: OpenDump
    record = "dump {} (mf.Dump(folder, [...]))"

    @property
    def where(self) -> str:
        """The source as text."""
        return str(self.dump.path)

    @property
    def names(self) -> list[str]:
        """Sites, and gradients at them."""
        return self.dump.sites

    def iterations(self, name: str) -> list[int]:
        """The iterations that have the complete tensor."""
        return self.dump[name].iterations

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        """One part for each microbatch; shapes may differ."""
        for piece in self.dump[name].at(iteration).microbatch_arrays():
            yield from read_blocks(piece.array)

    def samples(self, name: str, iteration: int) -> int:
        return self._array(name, iteration).shape[0]

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        array = self._array(name, iteration)
        numbers = array.samples
        if numbers is None or "token" not in array.dims:
            raise FigureError(f"{self.where}: {name} has no samples with tokens, but {', '.join(array.dims)}")
        _check_sample(name, sample, len(numbers))
        sample_array = array[sample]
        places, existing = array.tokens, sample_array.existing()
        assert places is not None
        if existing is not None:
            sample_array, places = sample_array[existing], places[..., existing]
        tokens = tuple(int(t) for t in (places[sample] if places.ndim > 1 else places))
        number = int(numbers[sample])
        return SampleRows(
            number, tokens, sample_array.shape[1:], lambda first, last: sample_array[first:last].torch()
        )

    def _array(self, name: str, iteration: int) -> DumpArray:
        return self.dump[name].at(iteration)[0]

    def layout(self, name: str) -> str:
        """The layout, declared or, if it was inferred, as recorded."""
        record = self.dump.site_records.get(name.removesuffix(".grad"))
        if record is None or record.inferred:
            return self.dump[name].layout
        layout = layout_from_json(dict(record.layout))
        return describe_layout(layout_in_pass(layout, name.endswith(".grad")), self.dump.manifest.sizes)


@dataclass(frozen=True)
class CacheSource:
    """A cache as a source: by its own names, and by site names where it has the same tensor.

    Attributes:
        cache: the cache.
    """

    cache: ActivationCache
    where = "the cache"
    record = "keep {} (flex.interp.run_with_cache(tokens, [...]))"

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Names to the cache's keys, site names first."""
        aliases = self.cache.lens_names.aliases
        of_sites = {a.site: n for n in self.cache if (a := aliases.get(n)) is not None and _is_site_tensor(a)}
        return {**of_sites, **{name: name for name in self.cache}}

    @property
    def names(self) -> list[str]:
        """Sites' names and TransformerLens'."""
        return list(self._keys)

    def iterations(self, name: str) -> list[int]:
        """None: it has one run."""
        return []

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        yield self.cache[self._keys[name]]

    def samples(self, name: str, iteration: int) -> int:
        """The sequences of the run."""
        return len(self.cache[self._keys[name]]) if self.cache.has_batch_dim else 1

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        full = self.cache[self._keys[name]]
        full = full if self.cache.has_batch_dim else full[None]
        _check_sample(name, sample, len(full))
        sample_tensor = full[sample]
        sample_tensor = sample_tensor.transpose(0, 1) if name.endswith(QUERY_SUFFIXES) else sample_tensor
        return SampleRows(
            sample,
            tuple(range(len(sample_tensor))),
            tuple(sample_tensor.shape[1:]),
            lambda first, last: sample_tensor[first:last],
        )

    def layout(self, name: str) -> str:
        """The layout of the tensors that it was computed from."""
        site = self.cache.site(self._keys[name])
        return "" if site is None else describe_layout(site.layout, self.cache.sizes)


def _is_site_tensor(alias: Alias) -> bool:
    """Whether a TransformerLens name has the tensor of the site, with the batch dim first or unchanged."""
    return alias.view in (View(), Pattern(), BatchFirst(), BatchFirst(transposed=False))


def _check_sample(name: str, sample: int, count: int) -> None:
    if not 0 <= sample < count:
        raise FigureError(f"{name} has samples 0 to {count - 1}, no {sample}")


def last_iteration(source: TensorSource, name: str, iteration: int | None) -> int:
    """The requested iteration: by default the last one; 0 for a cache.

    Raises:
        FigureError: the source lacks it.
    """
    iterations = source.iterations(name)
    if isinstance(source, CacheSource):
        if iteration:
            raise FigureError(f"a cache is of one run: it has no iteration {iteration}; leave it out")
        return 0
    if not iterations:
        raise FigureError(f"{source.where} has no complete iteration with {name}")
    if iteration is not None and iteration not in iterations:
        few = f"{iterations[0]} to {iterations[-1]}, {len(iterations)} in all"
        raise FigureError(f"{source.where} has {name} of iterations {few}; not of {iteration}")
    return iterations[-1] if iteration is None else iteration


def as_fp32(values: Tensor) -> Tensor:
    """Values in fp32, from any stored dtype."""
    values = values.abs() if values.is_complex() else values
    return values if values.dtype == torch.float32 else values.float()


Source = OpenDump | OpenStatistics | ActivationCache | str | PathLike[str]


@dataclass(frozen=True)
class StatisticsSource:
    """Statistics as a source: numbers of tensors, not the tensors.

    Attributes:
        statistics: the statistics.
    """

    statistics: OpenStatistics

    @property
    def where(self) -> str:
        return str(self.statistics.path)

    @property
    def names(self) -> list[str]:
        """The tensors that were measured."""
        return self.statistics.sites

    @property
    def iterations(self) -> list[int]:
        return self.statistics.iterations

    def rows(self, names: Sequence[str]) -> Iterator[TensorStatistics]:
        """The measurements of some tensors, by iteration."""
        selected = set(names)
        return (row for row in self.statistics.rows() if row.site in selected)

    def layout(self, name: str) -> str:
        """The layout of a tensor, as text."""
        for header in reversed(self.statistics.headers):
            for record in header.sites:
                if record.name == name.removesuffix(".grad"):
                    return describe_layout(layout_from_json(dict(record.layout)), header.axes)
        return ""


@contextmanager
def open_source(source: Source) -> Iterator[TensorSource | StatisticsSource]:
    """A source; a path is opened, and closed again.

    Raises:
        FlexError: there is neither a dump nor statistics at the path, or they are damaged.
    """
    if isinstance(source, ActivationCache):
        yield CacheSource(source)
    elif isinstance(source, OpenStatistics):
        yield StatisticsSource(source)
    elif isinstance(source, OpenDump):
        yield DumpSource(source)
    elif has_statistics(Path(source)) and not has_runs(Path(source)):
        yield StatisticsSource(open_statistics(source))
    else:
        with open_dump(source) as dump:
            yield DumpSource(dump)


@contextmanager
def open_tensor_source(source: Source, what: str) -> Iterator[TensorSource]:
    """A source that has the tensors themselves.

    Args:
        source: the source.
        what: the figure's name, for messages.

    Raises:
        FigureError: it has statistics only.
    """
    with open_source(source) as opened:
        if isinstance(opened, StatisticsSource):
            raise FigureError(
                f"{opened.where} has numbers of tensors, not the tensors that {what} is made of: dump them "
                "(mf.Dump), or keep them in a cache (flex.interp.run_with_cache)"
            )
        yield opened


def match_names(source: TensorSource | StatisticsSource, pattern: str) -> list[str]:
    """The names that match a pattern, as for hooks: a module's name means its output.

    Raises:
        FigureError: there is no match.
    """
    if pattern in source.names:
        return [pattern]
    table = SiteTable(Site(name, Layout(()), ()) for name in source.names)
    for point in ("output", ""):
        try:
            return [site.name for site in table.match(pattern, point)]
        except SiteError:
            continue
    raise FigureError(
        f"{source.where} has nothing that {pattern!r} means{suggest_nearest(pattern, source.names)}; dump "
        "or record it"
    )


def make_caption(what: str, iterations: Sequence[int], *more: str, layout: str = "") -> str:
    """Site, iterations and layout in one line; without iterations for a cache.

    Args:
        what: the site, or the pattern, and the kind of figure.
        iterations: the iteration numbers.
        more: further information, such as the sample.
        layout: as text.
    """
    many = "s" if len(iterations) > 1 else ""
    numbers = [f"iteration{many} {describe_numbers(iterations)}"] if len(iterations) else []
    return " · ".join(part for part in (what, *numbers, *more, layout) if part)


def caption_iterations(source: TensorSource | StatisticsSource, iterations: Sequence[int]) -> Sequence[int]:
    """The iterations for a caption; none for a cache, which has one run."""
    return [] if isinstance(source, CacheSource) else iterations


def describe_layouts(source: TensorSource | StatisticsSource, names: Sequence[str]) -> str:
    """The layout of several tensors, as text, or that they differ."""
    several = list(dict.fromkeys(source.layout(name) for name in names))
    return several[0] if len(several) == 1 else f"{len(several)} different layouts"
