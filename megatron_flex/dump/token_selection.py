"""The tokens and samples that a dump keeps of a tensor; writing and reading use the same selection.

Positions and samples are those of the full tensor: a rank keeps the selected ones in its shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.hashed_order import METHOD, draw_positions
from megatron_flex.dump.json_form import check_form, has_fields, pick_known, to_json
from megatron_flex.dump.schema import RandomRecord, SliceRecord
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.layout import Coords, Dim, Layout, Sizes, count_parts, spans
from megatron_flex.ranges import MAX_NUMBER, check_count, is_selected, normalize_numbers


def number_microbatch(
    order: str, microbatch: int, replica: int, replicas: int, microbatches: int = 0
) -> int | None:
    """Return the number of a microbatch among those of all data parallel replicas.

    The arguments are those of `number_first_sample`. None if the number cannot be known.
    """
    if order == "interleaved":
        return microbatch * replicas + replica
    return replica * microbatches + microbatch if microbatches or replicas == 1 else None


def number_first_sample(
    order: str, microbatch: int, replica: int, replicas: int, microbatches: int, count: int
) -> int | None:
    """Return the number, in the global batch, of the first sample of a microbatch.

    Args:
        order: `interleaved`: microbatch by microbatch over all replicas; `blocks`: replica by replica.
        microbatch: the number of the microbatch on its data parallel replica.
        replica: the coordinate of that replica.
        replicas: the number of replicas.
        microbatches: the number of microbatches of each replica; 0 if unknown.
        count: samples in a microbatch.

    Returns:
        The number; None if it cannot be known.
    """
    number = number_microbatch(order, microbatch, replica, replicas, microbatches)
    return None if number is None else number * count


TOKEN_DIM, SAMPLE_DIM = "s", "b"  # the names of the dims that tokens and samples are counted along


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """A number of random positions of each sample; the positions do not depend on the layout.

    Attributes:
        count: the number of positions; all positions of a sample that has fewer.
        seed: another seed selects other positions.

    Raises:
        FlexError: `count` is below 1.

    Examples:
        >>> dump = Dump("dumps/new", "decoder.layers.*", tokens=sampled(4))
        >>> with attach(chunks, dumps=dump):
        ...     train_step(chunks)
        >>> open_dump("dumps/new")["decoder.layers.3"].shape
        (1, 4, 4, 32)
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("sampled(count)", self.count)
        check_count("seed", self.seed, least=-MAX_NUMBER)

    def positions(self, length: int, iteration: int, sample: int) -> list[int]:
        """Return the positions of one sample, in ascending order.

        Args:
            length: the number of tokens of the sample.
            iteration: the iteration, which seeds the choice like the next argument.
            sample: the number of the sample in the global batch.

        Examples:
            >>> sampled(4).positions(length=16, iteration=0, sample=0)
            [0, 1, 8, 9]
        """
        drawn: list[int] = draw_positions(self.count, length, self.seed, iteration, [sample])[0].tolist()
        return drawn


TokenSelection = slice | tuple[int, ...] | RandomTokens | None
NumberSelection = slice | frozenset[int] | None  # numbers of iterations, microbatches, samples


def normalize_tokens(given: Any) -> TokenSelection:
    """Convert a user's selection of tokens to plain data.

    Raises:
        FlexError: the value is not a selection of tokens.
    """
    if given is None or isinstance(given, RandomTokens):
        return given
    return normalize_numbers("tokens", given, from_end=True)


def tokens_to_json(tokens: TokenSelection) -> Any:
    """Convert a selection of tokens to plain values."""
    if isinstance(tokens, slice):
        return to_json(SliceRecord([tokens.start, tokens.stop, tokens.step]))
    if isinstance(tokens, RandomTokens):
        return to_json(RandomRecord(tokens.count, tokens.seed, METHOD))
    return None if tokens is None else list(tokens)


def tokens_from_json(data: Any) -> TokenSelection:
    """Convert the result of `tokens_to_json` back to a selection.

    Raises:
        DumpError: the positions were drawn in another way.
    """
    if isinstance(data, dict):
        if has_fields(SliceRecord, data):
            return slice(*pick_known(SliceRecord, data).slice)
        drawn = pick_known(RandomRecord, data)
        if drawn.method != METHOD:
            raise DumpError(
                f"the positions of this dump were drawn by {drawn.method[:40]!r}, not by {METHOD!r}, so that "
                "they are not known; read it with the megatron_flex that wrote it, or dump again"
            )
        return RandomTokens(int(drawn.sampled), int(drawn.seed))
    return None if data is None else tuple(int(p) for p in data)


def select_positions(tokens: TokenSelection, length: int, iteration: int, sample: int) -> list[int]:
    """Return the kept positions of a sample of `length` tokens, in ascending order."""
    if isinstance(tokens, RandomTokens):
        return _draw_positions(tokens, length, iteration, (sample,))[0].tolist()
    return _list_common_positions(_make_position_key(tokens), length).tolist()


PositionKey = tuple[Any, ...]


def _make_position_key(tokens: TokenSelection) -> PositionKey:
    """Positions that are the same for all samples, as something that can be looked up."""
    if isinstance(tokens, slice):
        return "slice", tokens.start, tokens.stop, tokens.step
    return () if tokens is None else ("list", *tokens)  # type: ignore[misc]


@lru_cache(256)
def _list_common_positions(key: PositionKey, length: int) -> Tensor:
    if not key:
        return torch.arange(length)
    if key[0] == "slice":
        return torch.tensor(sorted(range(length)[slice(*key[1:])]), dtype=torch.int64)
    positions = {p + length if p < 0 else p for p in key[1:] if -length <= p < length}
    return torch.tensor(sorted(positions), dtype=torch.int64)


@lru_cache(256)
def _draw_positions(tokens: RandomTokens, length: int, iteration: int, samples: tuple[int, ...]) -> Tensor:
    return draw_positions(tokens.count, length, tokens.seed, iteration, samples)


class EntrySelection(NamedTuple):
    """The entries of a local tensor that are kept, in the order in which they are stored.

    Attributes:
        sample: index along the local tensor's dim of samples; None if the tensor has no such dim.
        token: index along the dim of tokens; None if the tensor has no such dim.
        position: the position of each entry in the full tensor; None if the tensor has no dim of tokens.
    """

    sample: Tensor | None
    token: Tensor | None
    position: Tensor | None

    def select(self, local: Tensor, layout: Layout) -> Tensor:
        """Return the kept entries, `[kept, ...]`; other dims keep their order."""
        at = [(find_dim(layout, SAMPLE_DIM), self.sample), (find_dim(layout, TOKEN_DIM), self.token)]
        selected_dims = [(d, i) for d, i in at if d is not None and i is not None]
        front = local.movedim([d for d, _ in selected_dims], list(range(len(selected_dims))))
        return front[tuple(i.to(local.device) for _, i in selected_dims)]


def find_dim(layout: Layout, name: str) -> int | None:
    """Return the first dim of that name, in the order of the full tensor."""
    order = range(len(layout.dims)) if layout.permute is None else layout.permute
    return next((i for i in order if layout.dims[i].name == name), None)


def select_entries(
    tokens: TokenSelection,
    samples: NumberSelection,
    layout: Layout,
    shape: Sequence[int],
    sizes: Sizes,
    coords: Coords,
    iteration: int,
    numbers: Sequence[int] | None,
    device: torch.device | None = None,
) -> EntrySelection | None:
    """Which entries of a rank's tensor are kept; asked again, the answer is at hand.

    Args:
        tokens: the positions wanted.
        samples: the samples wanted, by number in the global batch; None for all.
        layout: of the tensor.
        shape: of the local tensor.
        sizes: the mesh.
        coords: the rank's.
        iteration: of the run.
        numbers: the numbers of the local samples; None where they are not known.
        device: where the answer is wanted; the CPU if None.

    Returns:
        None where nothing is left out, or it cannot be known here which entries are meant: then all is kept.
    """
    token, sample = find_dim(layout, TOKEN_DIM), find_dim(layout, SAMPLE_DIM)
    by_token, by_sample = tokens is not None and token is not None, samples is not None and sample is not None
    if not (by_token or by_sample) or any(layout.dims[d].uneven for d in (token, sample) if d is not None):
        return None
    drawn = tokens if isinstance(tokens, RandomTokens) and by_token else None
    if (by_sample or drawn) and (numbers is None or sample is None):
        return None
    kept_samples: tuple[int, ...] | None = None  # where of the local samples, and the number of each
    if sample is not None:
        kept_samples = tuple(
            i
            for i in range(shape[sample])
            if not by_sample or is_selected(numbers[i], samples)  # type: ignore[index]
        )
    named = tuple(numbers[i] for i in kept_samples or ()) if drawn and numbers is not None else ()
    dim, at = (
        (None, ())
        if token is None
        else (layout.dims[token], _list_axis_coords(layout.dims[token], sizes, coords))
    )
    local = 0 if token is None else shape[token]
    key = drawn or (_make_position_key(tokens) if by_token else ())
    return _build_selection(key, kept_samples, named, iteration if drawn else 0, dim, at, local, device)


AxisCoords = tuple[tuple[str, int, int], ...]


def _list_axis_coords(dim: Dim, sizes: Sizes, coords: Coords) -> AxisCoords:
    """The size and the rank's coordinate of each axis that cuts a dim."""
    return tuple((c.axis, sizes.get(c.axis, 1), coords.get(c.axis, 0)) for c in dim.cuts)


@lru_cache(1024)
def _locate_positions(dim: Dim, at: AxisCoords, local: int) -> tuple[Tensor, int]:
    """The index at which a rank holds each position, -1 for none; and the number of positions."""
    sizes, coords = {a: n for a, n, _ in at}, {a: c for a, _, c in at}
    length = local * count_parts(dim, sizes)
    where = torch.full((length,), -1)
    first = 0
    for start, stop in spans(dim, length, coords, sizes):
        where[start:stop] = torch.arange(first, first + stop - start)
        first += stop - start
    return where, length


@lru_cache(1024)
def _build_selection(
    tokens: RandomTokens | PositionKey,
    kept_samples: tuple[int, ...] | None,
    numbers: tuple[int, ...],
    iteration: int,
    dim: Dim | None,
    at: AxisCoords,
    local: int,
    device: torch.device | None,
) -> EntrySelection:
    """The kept entries of the local samples `kept_samples`, by sample and then by position."""
    rows = None if kept_samples is None else torch.tensor(kept_samples, dtype=torch.int64)
    if dim is None:
        return EntrySelection(rows if rows is None else rows.to(device), None, None)
    where, length = _locate_positions(dim, at, local)
    if isinstance(tokens, RandomTokens):
        drawn = _draw_positions(tokens, length, iteration, numbers)
        on_rank = where[drawn] >= 0
        position = drawn[on_rank]
        assert rows is not None
        sample = torch.repeat_interleave(rows, on_rank.sum(1))
    else:
        position = _list_common_positions(tokens, length)
        position = position[where[position] >= 0]
        count = 1 if rows is None else len(rows)
        sample = None if rows is None else rows.repeat_interleave(len(position))  # type: ignore[assignment]
        position = position.repeat(count)
    indices = sample, where[position], position
    return EntrySelection(*(t if t is None else t.to(device) for t in indices))


def make_mean_layout(layout: Layout) -> Layout:
    """Return the layout of the mean over the sequence: partial over the axes that shard the sequence."""
    token = find_dim(layout, TOKEN_DIM)
    if token is None:
        raise FlexError(f"layout {layout.describe()} has no dim of tokens to take a mean over")
    cut_axes = tuple(c.axis for c in layout.dims[token].cuts)
    dims: list[Dim] = [d for i, d in enumerate(layout.dims) if i != token]
    order = layout.permute and tuple(i - (i > token) for i in layout.permute if i != token)
    return replace(layout, dims=tuple(dims), partial=(*layout.partial, *cut_axes), permute=order)


def compute_partial_mean(
    local: Tensor,
    layout: Layout,
    sizes: Sizes,
    coords: Coords,
    tokens: TokenSelection,
    iteration: int,
    numbers: Sequence[int] | None,
) -> Tensor | None:
    """Return this rank's partial sum of the mean over the kept positions, in fp32, with `make_mean_layout`.

    Returns:
        The partial sum; None if the positions, or their number, cannot be known on this rank.
    """
    token, sample = find_dim(layout, TOKEN_DIM), find_dim(layout, SAMPLE_DIM)
    if token is None or layout.dims[token].uneven:
        return None
    length = local.shape[token] * count_parts(layout.dims[token], sizes)
    if tokens is None:
        return local.sum(token, dtype=torch.float32) / max(length, 1)
    where = layout, local.shape, sizes, coords, iteration, numbers, local.device
    picked = select_entries(tokens, None, *where)
    if picked is None or picked.token is None:
        return None
    token_count = (
        min(tokens.count, length)
        if isinstance(tokens, RandomTokens)
        else len(_list_common_positions(_make_position_key(tokens), length))
    )
    lengths = [n if i in (token, sample) else 1 for i, n in enumerate(local.shape)]
    weight = torch.zeros(lengths, device=local.device)
    at: list[Any] = [0] * local.ndim
    at[token] = picked.token
    if sample is not None:
        at[sample] = picked.sample
    weight[tuple(at)] = 1.0 / max(token_count, 1)
    return (local.float() * weight).sum(token)


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """The selection of a tensor.

    Attributes:
        tokens: the positions.
        samples: the samples.
        mean: whether the mean over tokens was taken, so that there are none.
        dtype: of means.
    """

    tokens: TokenSelection = None
    samples: frozenset[int] | slice | None = None
    mean: bool = False
    dtype: torch.dtype = torch.float32

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> SelectionSettings:
        """That of the settings of a dump.

        Raises:
            DumpError: the settings are invalid.
        """
        samples, tokens = settings.get("samples"), settings.get("tokens")
        try:
            chosen: frozenset[int] | slice | None = None
            if isinstance(samples, dict):
                chosen = _parse_slice(pick_known(SliceRecord, samples).slice)
            elif samples is not None:
                chosen = frozenset(int(n) for n in samples)
            dtype = getattr(torch, str(settings.get("dtype") or "float32"))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"dtype {dtype!r}")
            if isinstance(tokens, dict) and has_fields(SliceRecord, tokens):
                _parse_slice(pick_known(SliceRecord, tokens).slice)
            return SelectionSettings(
                tokens_from_json(tokens), chosen, settings.get("reduce") == "mean", dtype
            )
        except DumpError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise DumpError(
                f"the settings of tokens or samples in a manifest are not valid: {error!r}"
            ) from error

    def kept(self, begin: int, count: int) -> Sequence[int]:
        """The samples that are kept of `count` from `begin` on, counted from there; ranges cost nothing."""
        if self.samples is None:
            return range(count)
        if isinstance(self.samples, slice):
            first, last, step = self.samples.start or 0, self.samples.stop, self.samples.step or 1
            at = first if first >= begin else begin + (first - begin) % step
            stop = begin + count if last is None else min(begin + count, last)
            return range(at - begin, max(stop - begin, at - begin), step)
        numbers = _sort_samples(self.samples)
        low, high = bisect_left(numbers, begin), bisect_left(numbers, begin + count)
        return [n - begin for n in numbers[low:high]]

    def count_kept_tokens(self, length: int) -> int:
        """How many of so many positions are kept of a sample."""
        if self.tokens is None or self.mean:
            return length
        if isinstance(self.tokens, RandomTokens):
            return min(self.tokens.count, length)
        if isinstance(self.tokens, slice):
            return len(range(length)[self.tokens])
        return len({p + length if p < 0 else p for p in self.tokens if -length <= p < length})

    def keeps(self, sample: int) -> bool:
        return is_selected(sample, self.samples)


@lru_cache(16)
def _sort_samples(samples: frozenset[int]) -> list[int]:
    return sorted(samples)


def _parse_slice(values: Any) -> slice:
    """A slice whose ends are integers, and whose step counts upwards."""
    check_form(values, ["int|null"])
    start, stop, step = values
    range(1)[slice(start, stop, step)]
    return slice(start, stop, step)
