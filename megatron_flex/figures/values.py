"""The tensors of a dump or a cache, asked in the same words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_flex.dump.exporting.blocks import read_blocks
from megatron_flex.dump.layouts import layout_from_json
from megatron_flex.dump.reader import DumpArray, OpenDump
from megatron_flex.figures.figure_data import FigureError
from megatron_flex.lens import ActivationCache, Alias
from megatron_flex.lens.tensor_views import BatchFirst, View
from megatron_flex.view.words import describe_layout

PATTERN_SITES = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\..*core_attention:probs")
QUERY_SUFFIXES = ("hook_pattern", "hook_attn_scores", ":probs", ":scores")  # [batch, head, query, key]


class SampleRows(NamedTuple):
    """One sample of a tensor, token by token.

    Attributes:
        sample: its number in the global batch.
        tokens: the positions.
        features: the shape of what a token has.
        read: from a first to before a last token: `[token, *features]`.
    """

    sample: int
    tokens: tuple[int, ...]
    features: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    def all(self) -> Tensor:
        """Of all tokens."""
        return self.read(0, len(self.tokens))


class TensorSource(Protocol):
    """A source that has tensors.

    Attributes:
        where: it is, in words.
        names: of tensors.
        record: how the person says what is to be in it, in words: with `{}` for what.
    """

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def record(self) -> str: ...

    def iterations(self, name: str) -> list[int]:
        """Those that have a tensor; none of a cache, which has one run."""
        ...

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        """All values of a tensor in one iteration, part by part."""
        ...

    def samples(self, name: str, iteration: int) -> int:
        """How many there are of a tensor."""
        ...

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        """One sample.

        Raises:
            FigureError: the tensor has no samples or tokens, or not so many.
        """
        ...

    def layout(self, name: str) -> str:
        """How ranks held a tensor, in words."""
        ...


@dataclass(frozen=True)
class DumpSource:
    """A dump as a source.

    Attributes:
        dump: it.
    """

    dump: OpenDump
    record = "dump {} (mf.Dump(folder, [...]))"

    @property
    def where(self) -> str:
        """In words."""
        return str(self.dump.path)

    @property
    def names(self) -> list[str]:
        """Sites, and gradients at them."""
        return self.dump.sites

    def iterations(self, name: str) -> list[int]:
        """Those that have the tensor whole."""
        return self.dump[name].iterations

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        """Microbatch by microbatch, whose shapes may differ."""
        for piece in self.dump[name].at(iteration).pieces():
            for _, block in read_blocks(piece.array):
                yield block

    def samples(self, name: str, iteration: int) -> int:
        """Those that the dump keeps."""
        return self._array(name, iteration).shape[0]

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        """One sample."""
        array = self._array(name, iteration)
        numbers = array.samples
        if numbers is None or "token" not in array.dims:
            raise FigureError(f"{self.where}: {name} has no samples with tokens, but {', '.join(array.dims)}")
        _check_sample(name, sample, len(numbers))
        one = array[sample]
        places = array.tokens
        assert places is not None
        tokens = tuple(int(t) for t in (places[sample] if places.ndim > 1 else places))
        number = int(numbers[sample])
        return SampleRows(number, tokens, one.shape[1:], lambda first, last: one[first:last].torch())

    def _array(self, name: str, iteration: int) -> DumpArray:
        return self.dump[name].at(iteration)[0]

    def layout(self, name: str) -> str:
        """How ranks held it; where nothing told it beforehand, as they found it."""
        place = self.dump.places.get(name.removesuffix(".grad"))
        if place is None or place.inferred:
            return self.dump[name].layout
        layout = layout_from_json(dict(place.layout))
        return describe_layout(
            layout.gradient() if name.endswith(".grad") else layout, self.dump.manifest.sizes
        )


@dataclass(frozen=True)
class CacheSource:
    """A cache as a source: under its own names, and where it has the same tensor under the sites'.

    Attributes:
        cache: it.
    """

    cache: ActivationCache
    where = "the cache"
    record = "keep {} (flex.run_with_cache(tokens, [...]))"

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Names to the cache's keys, the sites' own names first."""
        aliases = self.cache.lens_names.aliases
        own = {a.site: n for n in self.cache if (a := aliases.get(n)) is not None and _is_site_tensor(a)}
        return {**own, **{name: name for name in self.cache}}

    @property
    def names(self) -> list[str]:
        """Sites' names and TransformerLens'."""
        return list(self._keys)

    def iterations(self, name: str) -> list[int]:
        """None: it is of one run."""
        return []

    def blocks(self, name: str, iteration: int) -> Iterator[Tensor]:
        """All at once."""
        yield self.cache[self._keys[name]]

    def samples(self, name: str, iteration: int) -> int:
        """The sequences of the run."""
        return len(self.cache[self._keys[name]]) if self.cache.has_batch_dim else 1

    def rows(self, name: str, iteration: int, sample: int) -> SampleRows:
        """One sequence."""
        whole = self.cache[self._keys[name]]
        whole = whole if self.cache.has_batch_dim else whole[None]
        _check_sample(name, sample, len(whole))
        one = whole[sample]
        one = one.transpose(0, 1) if name.endswith(QUERY_SUFFIXES) else one
        return SampleRows(sample, tuple(range(len(one))), tuple(one.shape[1:]), lambda first, last: one[first:last])

    def layout(self, name: str) -> str:
        """How ranks held what it is made of."""
        site = self.cache.site(self._keys[name])
        return "" if site is None else describe_layout(site.layout, self.cache.sizes)


def _is_site_tensor(alias: Alias) -> bool:
    """Whether a place of TransformerLens has the tensor of the site, batch first or as it is."""
    return type(alias.view) in (View, BatchFirst) and alias.view in (View(), BatchFirst())


def _check_sample(name: str, sample: int, there: int) -> None:
    if not 0 <= sample < there:
        raise FigureError(f"{name} has samples 0 to {there - 1}, no {sample}")


def last_iteration(found: TensorSource, name: str, iteration: int | None) -> int:
    """The iteration that is meant: the last one if none is said; 0 of a cache.

    Raises:
        FigureError: the source does not have it.
    """
    there = found.iterations(name)
    if isinstance(found, CacheSource):
        if iteration:
            raise FigureError(f"a cache is of one run: it has no iteration {iteration}; leave it out")
        return 0
    if not there:
        raise FigureError(f"{found.where} has no whole iteration with {name}")
    if iteration is not None and iteration not in there:
        few = f"{there[0]} to {there[-1]}, {len(there)} in all"
        raise FigureError(f"{found.where} has {name} of iterations {few}; not of {iteration}")
    return there[-1] if iteration is None else iteration


def as_fp32(values: Tensor) -> Tensor:
    """Values in fp32, whatever they are stored in."""
    return values if values.dtype == torch.float32 else values.float()
