"""Rows of tokens, for what is trained on activations: by number, or shuffled within bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count as count_up
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from megatron_flex.dump.hashed_order import order_entries
from megatron_flex.dump.reader.dump_array import DumpArray, IndexOutOfRange
from megatron_flex.errors import DumpError, format_value

RowArrays = Sequence[DumpArray]


class TokenRows(Dataset[Any]):
    """The rows of one site, or of several aligned, by number: a map-style dataset.

    Row number `(i * samples + j) * tokens + k` is token k of sample j in iteration i. An item is a tensor
    `[*features]`, or a tuple of one for each site. It pickles, and opens the files anew where it arrives.

    Args:
        arrays: over (iteration, sample, token, *features), or without tokens.
        single: whether items are tensors, not tuples.
        dtype: of the items; None for the one that is stored. Integers, such as token ids, keep theirs.
        mask: as for `check_mask`; rows that it leaves out have no number.
        places: whether an item is a tuple that ends with the row's place, as for `RowPlaces`.
    """

    def __init__(
        self,
        arrays: RowArrays,
        single: bool,
        dtype: torch.dtype | None = None,
        mask: Any = None,
        places: bool = False,
    ) -> None:
        self.arrays, self.single, self.dtype = list(arrays), single and not places, dtype
        self.places = RowPlaces(self.arrays[0]) if places else None
        self.axes = check_row_alignment(self.arrays)
        chosen = select_rows(self.arrays[0], mask, self.axes)
        self._chosen = None if chosen is None else chosen.flatten().nonzero().flatten()

    def __len__(self) -> int:
        return prod(self.axes) if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several items, read together; a DataLoader asks so for a batch."""
        count = len(self)
        for index in indices:
            if not -count <= index < count:
                raise IndexOutOfRange(f"row {index} of {count}")
        items = self.read_rows([n % count if self._chosen is None else int(self._chosen[n]) for n in indices])
        return [item[0] for item in items] if self.single else items

    def read_rows(self, numbers: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Rows by their numbers among all rows, also those that a mask leaves out; one tuple for each."""
        per_sample = prod(self.axes[2:])
        groups: dict[int, list[tuple[int, int]]] = {}
        for at, row in enumerate(numbers):
            sample, token = divmod(row, per_sample)
            groups.setdefault(sample, []).append((at, token))
        out: list[Any] = [None] * len(numbers)
        for sample, selected in groups.items():
            where = divmod(sample, self.axes[1])
            tokens = sorted({token for _, token in selected})
            read = [a[(*where, tokens) if a.dims[2:3] == ("token",) else where] for a in self.arrays]
            blocks = [r.torch(row_dtype(r, self.dtype)) for r in read]
            if self.places is not None:
                blocks.append(self.places.locate(where[0], [where[1]], tokens)[0])
            if len(self.axes) == 2:
                blocks = [f[None] for f in blocks]
            place = {token: n for n, token in enumerate(tokens)}
            for at, token in selected:
                out[at] = tuple(f[place[token]] for f in blocks)
        return out


class ShuffledRows(IterableDataset[Any]):
    """The rows of one site, or of several aligned, in batches: each row once, in an order drawn at random.

    The dump is cut into blocks of at most `block` neighbouring rows of a sample. Their order is drawn over
    the whole dump; they are read into a buffer of `buffer` rows, half of which, drawn at random, leaves as
    batches whenever it is full. So a batch is drawn from at least `buffer` rows of about `buffer / block`
    places of the dump: two rows of one block meet in a batch more often than chance has it, by a factor of
    about rows / buffer. With `buffer` of all rows the order is uniform. The same seed and epoch give the same
    order in every release of torch: blocks are in the order of `hashed_order` for seed and epoch, rows of the
    buffer in that for seed, epoch, part and the number of times that rows have left. The workers of a
    DataLoader (`batch_size=None`) deal blocks out among them, and each has a buffer.

    `state_dict()` and `load_state_dict()` continue an interrupted epoch after its last batch, as torchdata's
    `StatefulDataLoader` does in its workers. The batches before are not read again.

    Args:
        arrays: over (iteration, sample, token, *features), or without tokens.
        single: whether batches are tensors, not tuples.
        batch_size: rows in a batch; the last one may have fewer.
        shuffle: in the dump's order if False.
        seed: of the order.
        dtype: of the batches; None for the one that is stored. Integers, such as token ids, keep theirs.
        buffer: rows that are held in memory.
        block: rows that are read at a time.
        part: `(r, n)` leaves the r-th of n parts only, one for each of n processes; blocks are dealt out.
        mask: as for `check_mask`; blocks without a row are not read.
        places: whether a batch is a tuple that ends with the places of its rows, as for `RowPlaces`.

    Attributes:
        epoch: another number gives another order.
        rows: how many rows there are, in all parts.
    """

    def __init__(
        self,
        arrays: RowArrays,
        single: bool,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        buffer: int = 1 << 16,
        block: int = 256,
        part: tuple[int, int] = (0, 1),
        mask: Any = None,
        places: bool = False,
    ) -> None:
        self.arrays, self.single = list(arrays), single and not places
        self.places = RowPlaces(self.arrays[0]) if places else None
        self.axes = check_row_alignment(self.arrays)
        if min(batch_size, buffer, block) < 1 or not 0 <= part[0] < part[1]:
            raise DumpError(
                f"batch_size={batch_size}, buffer={buffer}, block={block}, part={part}: sizes are at "
                "least 1, and part (r, n) has r from 0 to n - 1"
            )
        self.batch_size, self.shuffle, self.seed, self.dtype = batch_size, shuffle, seed, dtype
        self.buffer, self.block, self.part = max(buffer, batch_size), block, part
        self.epoch = 0
        self.mask = select_rows(self.arrays[0], mask, self.axes)
        self.rows = prod(self.axes) if self.mask is None else int(self.mask.sum())
        self._left = 0  # batches of the epoch that have left
        self._skipped = 0  # of these, batches of a loaded state that the next iteration has yet to pass over

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is: the batches that this process, or worker, has taken of its share.

        Examples:
            >>> rows = open_dump("dumps/run").rows("decoder.layers.3", batch_size=32)
            >>> first = next(iter(rows))
            >>> rows.state_dict()["batches"]
            1
        """
        return self._describe() | {"epoch": self.epoch, "batches": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch: the next iteration begins after the batches that `state` counts.

        Raises:
            DumpError: the state is of other rows, of another order, or of another share of them.
        """
        for name, value in self._describe().items():
            if state.get(name) != value:
                raise DumpError(
                    f"load_state_dict(): {name}={state.get(name)!r} in the state, and {value!r} here; "
                    "call rows() with the arguments that the state was taken with"
                )
        self.epoch, self._left = state["epoch"], state["batches"]
        self._skipped = self._left

    def _describe(self) -> dict[str, Any]:
        """What the batches depend on, besides the epoch."""
        digest = None if self.mask is None else hashlib.sha256(self.mask.numpy().tobytes()).hexdigest()[:16]
        return {
            "sites": [array.name for array in self.arrays],
            "iterations": [str(iteration) for iteration in self.arrays[0].iterations],
            "rows": self.rows,
            "mask": digest,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "buffer": self.buffer,
            "block": self.block,
            "share": list(self._get_share()),
        }

    def _get_share(self) -> tuple[int, int]:
        """Which of how many shares of the blocks this process, or worker of a DataLoader, reads."""
        worker = get_worker_info()
        count, worker_number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        return self.part[0] * count + worker_number, self.part[1] * count

    def __iter__(self) -> Iterator[Any]:
        self._left = self._skipped
        share, shares = self._get_share()
        blocks = _RowBlocks(self.axes, self.block)
        order = torch.arange(len(blocks))
        turns = count_up()
        if self.shuffle:
            order = order_entries(len(blocks), self.seed, self.epoch)
        buffer = _RowBuffer(self._features(), counts=bool(self._skipped))
        for number in order[share::shares].tolist():
            where, rows = blocks[number]
            chosen = None if self.mask is None else self.mask[where].flatten()
            if chosen is not None and not chosen.any():
                continue
            tensors = [blocks.number_rows(number)] if buffer.counts else self._read_block(where)
            if chosen is not None:
                tensors = [f.flatten(0, 1)[chosen] for f in tensors]
                rows = len(tensors[0])
            buffer.add(tensors, rows)
            if buffer.rows >= self.buffer:
                # half of it, in whole batches
                most = buffer.rows // 2 if self.shuffle else buffer.rows
                leaving = max(most // self.batch_size, 1) * self.batch_size
                yield from self._batches(buffer, leaving, share, next(turns))
        yield from self._batches(buffer, buffer.rows, share, next(turns))
        self._left = 0

    def _features(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of a row of each tensor in a batch."""
        front = len(self.axes)
        features = [(a.shape[front:], row_dtype(a, self.dtype)) for a in self.arrays]
        return features + ([((front,), torch.int64)] if self.places is not None else [])

    def _read_block(self, where: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of a block, and the places of its rows if they are asked for."""
        tensors = [read_region(a[where], row_dtype(a, self.dtype)) for a in self.arrays]
        if self.places is not None:
            chosen_rows = [range(n)[w] for n, w in zip(self.axes[1:], where[1:], strict=True)]
            tensors.append(self.places.locate(where[0], chosen_rows[0], chosen_rows[-1]))
        return tensors

    def _batches(self, buffer: _RowBuffer, count: int, share: int, turn: int) -> Iterator[Any]:
        """Take so many rows out of the buffer, in batches."""
        chosen = torch.arange(count)
        if self.shuffle:
            chosen = order_entries(buffer.rows, self.seed, self.epoch, share, turn)[:count]
        batches = chosen.split(self.batch_size) if count else ()
        skipped = min(self._skipped, len(batches))
        self._skipped -= skipped
        if buffer.counts and not self._skipped:
            # From here on rows leave. The buffer has the numbers of those that wait: only these are read.
            rows = TokenRows(self.arrays, False, self.dtype, places=self.places is not None)
            buffer.fill(rows.read_rows(buffer.tensors[0].tolist()), self._features())
        for batch in batches[skipped:]:
            batch_tensors = tuple(t[batch] for t in buffer.tensors)
            self._left += 1
            yield batch_tensors[0] if self.single else batch_tensors
        buffer.drop(chosen)


class RowPlaces:
    """Where rows are: the iteration, the sample in the global batch, and the position of the token.

    Args:
        array: over (iteration, sample, token, *features), or without tokens; then places have no position.
    """

    def __init__(self, array: DumpArray) -> None:
        self._iterations, self._samples, self._positions = array.iterations, array.samples, array.tokens
        self._tokenless = array.dims[2:3] != ("token",)

    def locate(self, iteration: int, samples: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """`[sample, token, 3]`, without tokens `[sample, 2]`: the places of rows, by number in the array."""
        assert self._samples is not None
        numbers = self._samples[list(samples)]
        if self._tokenless:
            return torch.stack([torch.full_like(numbers, self._iterations[iteration]), numbers], 1)
        assert self._positions is not None
        positions = self._positions
        if positions.ndim == 3:  # other positions in each sample
            chosen = positions[iteration][list(samples)][:, list(tokens)]
        else:
            chosen = positions[list(tokens)].expand(len(samples), -1)
        by_sample = numbers[:, None].expand_as(chosen)
        return torch.stack([torch.full_like(chosen, self._iterations[iteration]), by_sample, chosen], 2)


class _RowBlocks:
    """The whole in blocks of neighbouring rows: tokens of a sample, or several whole samples."""

    def __init__(self, axes: Sequence[int], most: int) -> None:
        self.iterations, self.samples = axes[:2]
        self.tokens = prod(axes[2:])
        self.tokenless = len(axes) == 2
        self.by_samples = max(1, most // max(self.tokens, 1))
        self.by_tokens = min(most, max(self.tokens, 1))
        self.across, self.along = ceil(self.samples / self.by_samples), ceil(self.tokens / self.by_tokens)

    def __len__(self) -> int:
        return self.iterations * self.across * self.along

    def __getitem__(self, number: int) -> tuple[tuple[Any, ...], int]:
        """Where a block is, and how many rows it has."""
        rest, along = divmod(number, self.along)
        iteration, across = divmod(rest, self.across)
        samples = range(self.samples)[across * self.by_samples :][: self.by_samples]
        tokens = range(self.tokens)[along * self.by_tokens :][: self.by_tokens]
        where = iteration, slice(samples.start, samples.stop), slice(tokens.start, tokens.stop)
        return where[:2] if self.tokenless else where, len(samples) * len(tokens)

    def number_rows(self, number: int) -> Tensor:
        """`[sample, token]`: the numbers of a block's rows among all rows."""
        (iteration, *slices), _ = self[number]
        samples: Tensor = torch.arange(self.samples)[slices[0]] + iteration * self.samples
        tokens = torch.arange(1) if self.tokenless else torch.arange(self.tokens)[slices[1]]
        return samples[:, None] * self.tokens + tokens


Features = Sequence[tuple[tuple[int, ...], torch.dtype]]


class _RowBuffer:
    """Rows that wait.

    Args:
        features: of the rows.
        counts: whether it begins with the rows' numbers in their place, until `fill`.
    """

    def __init__(self, features: Features, counts: bool = False) -> None:
        self.rows, self.counts = 0, counts
        self._room = _make_room(0, [((), torch.int64)] if counts else features)

    @property
    def tensors(self) -> list[Tensor]:
        return [room[: self.rows] for room in self._room]

    def add(self, tensors: Sequence[Tensor], rows: int) -> None:
        if self.rows + rows > len(self._room[0]):
            most = max(self.rows + rows, 2 * len(self._room[0]))
            self._room = [torch.cat([t, t.new_empty(most - self.rows, *t.shape[1:])]) for t in self.tensors]
        for room, added in zip(self._room, tensors, strict=True):
            room[self.rows : self.rows + rows] = added.reshape(rows, *room.shape[1:])
        self.rows += rows

    def fill(self, rows: Sequence[tuple[Tensor, ...]], features: Features) -> None:
        """Put the rows themselves in the place of their numbers."""
        self.counts = False
        self._room = _make_room(self.rows, features)
        for number, row in enumerate(rows):
            for room, tensor in zip(self._room, row, strict=True):
                room[number] = tensor

    def drop(self, dropped: Tensor) -> None:
        """Take rows out; the last ones take their places."""
        remaining = self.rows - len(dropped)
        stays = torch.ones(self.rows, dtype=torch.bool)
        stays[dropped] = False
        last_rows = stays[remaining:].nonzero().flatten() + remaining
        holes = (~stays[:remaining]).nonzero().flatten()
        for room in self._room:
            room[holes] = room[last_rows]
        self.rows = remaining


def _make_room(rows: int, features: Features) -> list[Tensor]:
    return [torch.empty(rows, *shape, dtype=dtype) for shape, dtype in features]


def is_row_mask(tokens: Any) -> bool:
    """Whether a choice of tokens is a mask over more than the axis of tokens."""
    if isinstance(tokens, (list, tuple)) and tokens and isinstance(tokens[0], (list, tuple)):
        return True
    return getattr(tokens, "ndim", 0) > 1


def check_mask(mask: Any, axes: Sequence[int]) -> Tensor:
    """Return a mask `[sample, token]` or `[iteration, sample, token]` as booleans over all three.

    Raises:
        DumpError: it is not a mask, or has other lengths.
    """
    try:
        flags = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise DumpError(f"tokens={format_value(mask)} is not a mask; give booleans [sample, token]") from None
    if flags.dtype != torch.bool or len(axes) != 3 or list(flags.shape) not in (list(axes), list(axes[1:])):
        raise DumpError(
            f"tokens: a mask of {flags.dtype} {list(flags.shape)} for {list(axes)} iterations, samples and "
            "tokens; give booleans [sample, token] or [iteration, sample, token]"
        )
    return flags.cpu().expand(*axes)


def select_rows(array: DumpArray, mask: Any, axes: Sequence[int]) -> Tensor | None:
    """The rows that exist and that a mask leaves, as booleans over all axes; None for all."""
    existing = array.existing() if len(axes) == 3 else None
    chosen = None if mask is None else check_mask(mask, axes)
    if existing is None or chosen is None:
        return existing if chosen is None else chosen
    return existing & chosen


def row_dtype(array: DumpArray, asked: torch.dtype | None) -> torch.dtype:
    """The dtype of an array's rows: the one asked for; integers keep theirs, as bf16 has no 257."""
    return asked if asked is not None and array.dtype.is_floating_point else array.dtype


def read_region(array: DumpArray, dtype: torch.dtype) -> Tensor:
    """The values of an array; those of tokens that do not exist are not set."""
    if array.existing() is None:
        return array.torch(dtype)
    out = torch.empty(array.shape, dtype=dtype)
    for region in array.regions():
        samples, tokens = (torch.tensor(list(index)) for index in region if not isinstance(index, int))
        out[samples[:, None], tokens] = array[region].torch(dtype)
    return out


def check_row_alignment(arrays: RowArrays) -> tuple[int, ...]:
    """The lengths of iterations, samples and tokens that arrays have in common.

    Raises:
        DumpError: an array has no samples, or they differ.
    """
    if not arrays:
        raise DumpError("rows of no site: name one at least")
    out = []
    for array in arrays:
        if array.dims[:2] != ("iteration", "sample"):
            dim_names = ", ".join(array.dims)
            raise DumpError(f"{array.name} is over {dim_names}: rows are of iterations, samples and tokens")
        out.append(array.shape[: 3 if array.dims[2:3] == ("token",) else 2])
    existing = [array.existing() for array in arrays if array.ragged]
    alike = not existing or (
        len(existing) == len(arrays)
        and all(e is not None and existing[0] is not None and torch.equal(e, existing[0]) for e in existing)
    )
    if len(set(out)) > 1 or not alike:
        dim_names = ", ".join(f"{a.name} {list(axes)}" for a, axes in zip(arrays, out, strict=True))
        raise DumpError(f"rows of several sites need the same iterations, samples and tokens: {dim_names}")
    return out[0]
