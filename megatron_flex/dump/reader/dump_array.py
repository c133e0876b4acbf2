"""DumpArray: a tensor of a dump over all iterations, of which nothing is read until it is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from megatron_flex.dump.host_memory import allocate_on_host
from megatron_flex.dump.reader.read_ahead import read_pieces
from megatron_flex.dump.run_folders import IterationKey
from megatron_flex.errors import DumpError, error_attributes, format_value
from megatron_flex.layout import DimIndex, Layout, RegionIndex, Sizes, compact_index


class IndexOutOfRange(DumpError, IndexError):
    """An index that the axis does not have."""


def parse_index_key(key: Any, shape: Sequence[int], dims: Sequence[str]) -> list[DimIndex | int]:
    """What `array[key]` means, axis by axis.

    Integers drop their axis; slices may have steps, also negative ones; lists, 1-dim tensors and 1-dim masks
    choose along their own axis, each by itself.

    Args:
        key: as Python hands it over.
        shape: of the array.
        dims: the axes' names, for errors.

    Raises:
        DumpError: too many indices, or one that is none of these.
        IndexOutOfRange: an entry that the axis does not have.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1:
        raise DumpError("more than one ... in an index")
    given = len(keys) - len(dots)
    if given > len(shape):
        raise DumpError(f"{given} indices for an array of {len(shape)} axes ({', '.join(dims)})")
    fill: list[Any] = [slice(None)] * (len(shape) - given)
    at = dots[0] if dots else len(keys)
    keys = keys[:at] + fill + keys[at + len(dots) :]
    return [_parse_axis_key(k, n, d) for k, n, d in zip(keys, shape, dims, strict=True)]


def _parse_axis_key(key: Any, length: int, dim: str) -> DimIndex | int:
    if isinstance(key, slice):
        try:
            return compact_index(range(length)[key])
        except (TypeError, ValueError) as error:
            raise DumpError(f"{format_value(key)} is not a slice of {dim!r}: {error}") from None
    if key is None or isinstance(key, (str, float)):
        raise _make_index_error(key, dim)
    if getattr(key, "ndim", 0) > 1:
        raise DumpError(
            f"an index or a mask of shape {list(key.shape)} for {dim!r}: an axis takes one of 1 dim; "
            "rows(SITE, BATCH_SIZE, tokens=MASK) and dataset(SITE, tokens=MASK) take one of several"
        )
    if hasattr(key, "tolist"):
        key = key.tolist()
    if isinstance(key, bool):
        raise DumpError(f"{key!r} cannot index {dim!r}; a mask needs one entry for each of {length}")
    if isinstance(key, range):
        key = list(key)
    if isinstance(key, (list, tuple)):
        return _parse_axis_list(list(key), length, dim)
    if hasattr(key, "__index__"):
        return _parse_axis_integer(key.__index__(), length, dim)
    raise _make_index_error(key, dim)


def _make_index_error(key: Any, dim: str) -> DumpError:
    return DumpError(
        f"{format_value(key)} cannot index {dim!r}: give an integer, a slice, a list of integers or a mask"
    )


def _parse_axis_list(key: list[Any], length: int, dim: str) -> DimIndex:
    if key and all(isinstance(k, bool) for k in key):
        if len(key) != length:
            raise IndexOutOfRange(f"a mask of {len(key)} entries for {dim!r} of {length}")
        return compact_index([i for i, k in enumerate(key) if k])
    wrong = next((k for k in key if isinstance(k, bool) or not hasattr(k, "__index__")), None)
    if wrong is not None:
        raise DumpError(
            f"{format_value(wrong)} in a list of indices of {dim!r}; a list has integers only, or a mask of "
            "one axis"
        )
    return compact_index([_parse_axis_integer(k.__index__(), length, dim) for k in key])


def _parse_axis_integer(at: int, length: int, dim: str) -> int:
    if not -length <= at < length:
        raise IndexOutOfRange(f"index {at} is out of range for {dim!r} of {length}")
    return at % length


def compose_indices(index: DimIndex, of: DimIndex) -> DimIndex:
    """Entries of entries."""
    if isinstance(index, range) and isinstance(of, range):
        return compact_index(of[index.start : index.stop : index.step]) if len(index) else range(0)
    return compact_index([of[i] for i in index])


class ArraySource(Protocol):
    """Where an array's values come from."""

    name: str
    iteration_keys: list[IterationKey]

    @property
    def folder(self) -> Path:
        """The folder of the dump."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor of one iteration."""
        ...

    @property
    def dims(self) -> tuple[str, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def stored_layout(self) -> tuple[Layout, Sizes]:
        """How ranks held it, in the first iteration, and the mesh."""
        ...

    def list_reads(
        self, which: IterationKey, where: RegionIndex, out: Tensor
    ) -> Iterator[Callable[[], object]]:
        """Functions that read the requested entries of one iteration into `out`, in its dtype, in pieces."""
        ...

    def find(self, which: IterationKey, where: RegionIndex) -> Tensor | None:
        """The requested entries of one iteration without a copy; None unless one shard has all of them."""
        ...

    def labels(self, which: IterationKey) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of the samples, and the positions of the tokens: `[token]` or `[sample, token]`."""
        ...

    def is_ragged(self, which: IterationKey) -> bool:
        """Whether microbatches have tensors of different lengths."""
        ...

    def token_counts(self, which: IterationKey) -> list[int] | None:
        """How many of the tokens each sample has; None if all have all."""
        ...

    def among(self, passes: list[IterationKey]) -> ArraySource:
        """The source of other iterations."""
        ...

    def request(self, which: IterationKey, microbatch: int, replica: int) -> str | None:
        """The request that a microbatch of a replica answered, if it did."""
        ...

    def microbatch_arrays(self) -> Iterator[tuple[IterationKey, int, int, ArraySource]]:
        """What was written at a time: iteration, microbatch, replica, and a source of that alone."""
        ...

    @property
    def packed(self) -> bool:
        """Whether the first iteration has packed sequences."""
        ...

    def sequences(self) -> Iterator[Any]:
        """The sequences, in order of samples, each a `StoredSequence`."""
        ...


class SequenceArray(NamedTuple):
    """A sequence: one of a packed microbatch, or a sample of one that is not packed.

    Attributes:
        iteration: its number.
        run_of: which run of the schedule in it.
        sequence: its number in the iteration, in the order of microbatches and samples.
        microbatch: the microbatch that has it, by its number on the replica.
        replica: the data parallel coordinate.
        positions: of its tokens in the sequence: `[token]`.
        array: over (sample, token, *features), of one sample, without the padding of the pack.
    """

    iteration: int
    run_of: int
    sequence: int
    microbatch: int
    replica: int
    positions: Tensor
    array: DumpArray


class MicrobatchArray(NamedTuple):
    """What was written at a time.

    Attributes:
        iteration: its number.
        run_of: which run of the schedule in it.
        microbatch: its number on the replica.
        replica: the data parallel coordinate.
        array: over (sample, token, *features); `samples` and `tokens` tell which.
        request: the request that a server answered with it; None in training.
    """

    iteration: int
    run_of: int
    microbatch: int
    replica: int
    array: DumpArray
    request: str | None = None


class DumpArray:
    """A tensor of a dump: an array over (iteration, sample, token, *features), read when it is converted.

    The sample's number is the one in the global batch, the token's the position in the sequence, whatever the
    layout of the run was. A tensor without samples has `microbatch` there, one entry for each
    microbatch of each data parallel replica; one without tokens leaves them out.

    Slicing gives another DumpArray and reads nothing: integers, slices with any step, lists, masks and `...`.
    Several lists choose each along their own axis (as in `numpy.ix_`).

    Args:
        source: reads the entries of the tensor.
        view: the selected entries of each dim; None for all.

    Attributes:
        name: the name of the site or parameter.

    Examples:
        >>> array = open_dump("dumps/run")["decoder.layers.3"]
        >>> dict(zip(array.dims, array.shape))
        {'iteration': 2, 'sample': 4, 'token': 16, 'h': 32}
        >>> array[-1, :, ::8]  # of the last iteration, every eighth token; reads nothing yet
        DumpArray(decoder.layers.3: sample 4, token 2, h 32; float32, 1,024 bytes; [s, b, h])
        >>> array[-1, :, ::8].torch().shape
        torch.Size([4, 2, 32])
    """

    def __init__(self, source: ArraySource, view: list[DimIndex | int] | None = None) -> None:
        self._source = source
        self._view, self._sliced = view, view is not None
        self._all: list[DimIndex | int] | None = None
        self.name = source.name

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def view(self) -> list[DimIndex | int]:
        """The selected entries of each dim of the dumped tensor; an integer where the dim is removed."""
        if self._view is not None:
            return self._view
        if self._all is None:
            self._all = [range(n) for n in (len(self._source.iteration_keys), *self._source.shape)]
        return self._all

    @property
    def shape(self) -> tuple[int, ...]:
        """Entries of each axis; those of the first iteration hold for all.

        Where microbatches have sequences of different lengths, the tokens are those of the longest.
        """
        return tuple(len(v) for v in self.view if not isinstance(v, int))

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the axes."""
        names = ("iteration", *self._source.dims)
        return tuple(n for n, v in zip(names, self.view, strict=True) if not isinstance(v, int))

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.dims)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, as they are stored."""
        return self._source.dtype

    @property
    def size(self) -> int:
        """How many values."""
        out = 1
        for n in self.shape:
            out *= n
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * self.dtype.itemsize

    @property
    def layout(self) -> str:
        """How ranks held it, in words, in the first iteration."""
        layout, sizes = self.stored_layout
        return layout.describe(sizes)

    @property
    def stored_layout(self) -> tuple[Layout, Sizes]:
        """How ranks held it in the first iteration, and how many there are along each axis."""
        return self._source.stored_layout

    @property
    def iteration_keys(self) -> list[IterationKey]:
        """The iterations: number, and which run of the schedule in it (0 for the first)."""
        first = self.view[0]
        return [self._source.iteration_keys[i] for i in ([first] if isinstance(first, int) else first)]

    @property
    def iterations(self) -> list[int]:
        """The numbers of the iterations."""
        return [number for number, _ in self.iteration_keys]

    @property
    def samples(self) -> Tensor | None:
        """The numbers of the samples in the global batch, in the first iteration; None without."""
        return self._labels(0)

    @property
    def tokens(self) -> Tensor | None:
        """The positions of the tokens: `[token]`, sampled ones `[iteration, sample, token]`; None without."""
        return self._labels(1)

    def _labels(self, which: int) -> Tensor | None:
        if which >= len(self._source.dims) or not self.iteration_keys:
            return None
        labels = self._source.labels(self.iteration_keys[0])[which]
        if labels is None:
            return None
        selection = self.view[1:3]
        if labels.ndim == 1:
            return _index_labels(labels, [selection[which]])
        every = [self._source.labels(p)[which] for p in self.iteration_keys]
        table = torch.stack([_index_labels(cast(Tensor, t), selection) for t in every])
        return table[0] if isinstance(self.view[0], int) else table

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: a single value has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        axes = ", ".join(f"{d} {n}" for d, n in zip(self.dims, self.shape, strict=True))
        kind = str(self.dtype).removeprefix("torch.")
        return f"DumpArray({self.name}: {axes or 'one value'}; {kind}, {self.nbytes:,} bytes; {self.layout})"

    def _repr_html_(self) -> str:
        from megatron_flex.dump.reader.dump_documents import describe_array  # only in notebooks

        return describe_array(self)._repr_html_()

    # -- slicing ---------------------------------------------------------------------------------------

    def _name_in_errors(self) -> AbstractContextManager[None]:
        """Name this hook point and the dump in errors that are raised within."""
        return error_attributes(site=self.name, path=self._source.folder)

    def __getitem__(self, key: Any) -> DumpArray:
        live = [i for i, v in enumerate(self.view) if not isinstance(v, int)]
        with self._name_in_errors():
            selected = parse_index_key(key, self.shape, self.dims)
        view = list(self.view)
        for axis, want in zip(live, selected, strict=True):
            had = cast(DimIndex, view[axis])
            view[axis] = had[want] if isinstance(want, int) else compose_indices(want, had)
        return DumpArray(self._source, view)

    def __iter__(self) -> Iterator[DumpArray]:
        return (self[i] for i in range(len(self)))

    def at(self, *iterations: int | IterationKey) -> DumpArray:
        """Return these iterations, by number; `(number, 1)` is the second run of the schedule in one.

        Raises:
            DumpError: one that the dump does not have whole.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"].at(1)
            DumpArray(decoder.layers.3: iteration 1, sample 4, token 16, h 32; float32, 8,192 bytes; [s, b,
            h])
        """
        keys = [(i, 0) if isinstance(i, int) else (int(i[0]), int(i[1])) for i in iterations]
        with self._name_in_errors():
            source = self._source.among(keys)
            if not self._sliced:
                return DumpArray(source)
            for index, length, dim in zip(self.view[1:], source.shape, source.dims, strict=True):
                if max(compact_index([index]) if isinstance(index, int) else index, default=-1) >= length:
                    raise DumpError(
                        f"{self.name}: {dim!r} has {length} entries there, fewer than were sliced"
                    )
        return DumpArray(source, [range(len(keys)), *self.view[1:]])

    def microbatch_arrays(self) -> Iterator[MicrobatchArray]:
        """Iterate over the microbatches as ranks wrote them, an array for each: their shapes may differ.

        Returns:
            An iterator over microbatches of the data parallel replicas.

        Examples:
            >>> for each in open_dump("dumps/run")["decoder.layers.3"].microbatch_arrays():
            ...     print(each.iteration, each.microbatch, each.array.shape)
            0 0 (2, 16, 32)
            0 1 (2, 16, 32)
            1 0 (2, 16, 32)
            1 1 (2, 16, 32)
        """
        self._check_entire()
        for which, microbatch, replica, source in self._source.among(self.iteration_keys).microbatch_arrays():
            request = source.request(which, microbatch, replica)
            yield MicrobatchArray(which[0], which[1], microbatch, replica, DumpArray(source)[0], request)

    @property
    def packed(self) -> bool:
        """Whether its microbatches are packed sequences: then one sample is a row of several sequences.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"].packed
            False
        """
        return self._source.packed

    @property
    def ragged(self) -> bool:
        """Whether microbatches of an iteration have tensors of different lengths, as dynamic batches have.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"].ragged
            False
        """
        return any(self._source.is_ragged(key) for key in self.iteration_keys)

    def existing(self) -> Tensor | None:
        """Which tokens exist, where microbatches have sequences of different lengths.

        Returns:
            Booleans `[iteration, sample, token]`, without the axes that the array does not have; None if
            all exist. To read an entry that does not exist raises.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"].existing() is None
            True
        """
        names = self._source.dims[:2]
        if names != ("sample", "token"):
            return None
        counts = [self._source.token_counts(key) for key in self.iteration_keys]
        if all(c is None for c in counts):
            return None
        length = self._source.shape[1]
        full = [length] * self._source.shape[0]
        table = torch.tensor([full if c is None else c for c in counts])
        every = torch.arange(length) < table[..., None]
        if isinstance(self.view[0], int):
            every = every[0]
        for axis, index in enumerate(self.view[1:3], every.ndim - 2):
            where = torch.tensor(index if isinstance(index, int) else list(index), dtype=torch.int64)
            every = every.index_select(axis, where.reshape(-1))
        dropped = [a for a, index in enumerate(self.view[1:3], every.ndim - 2) if isinstance(index, int)]
        for axis in reversed(dropped):
            every = every.squeeze(axis)
        return None if bool(every.all()) else every

    def regular_parts(self) -> Iterator[DumpArray]:
        """Iterate over arrays that together have every entry, each of which can be read at once.

        Returns:
            An iterator over the array alone, unless microbatches have tensors of different lengths: then over
            the microbatches, or over parts of a slice.

        Examples:
            >>> [each.shape for each in open_dump("dumps/run")["decoder.layers.3"].regular_parts()]
            [(2, 4, 16, 32)]
        """
        if not self.ragged:
            yield self
        elif not self._sliced or self.view[1:] == [range(n) for n in self._source.shape]:
            for piece in self.microbatch_arrays():
                yield piece.array
        else:
            yield from (self[region] for region in self.regions())

    def regions(self) -> Iterator[tuple[DimIndex | int, ...]]:
        """Indices of the first axes that together select each existing entry once; usually one, of all."""
        existing = self.existing()
        if existing is None:
            yield ()
            return
        tokens = "token" in self.dims
        rows = existing if tokens else existing[..., None]
        rows = rows.reshape(-1, rows.shape[-1])
        grid = [range(n) for n, d in zip(self.shape, self.dims, strict=True) if d in ("iteration", "sample")]
        begin = 0
        for row in range(1, len(rows) + 1):
            # A region has neighbouring samples of one iteration with the same tokens.
            inside = len(grid) > 0 and row % max(len(grid[-1]), 1) != 0
            if row < len(rows) and inside and torch.equal(rows[row], rows[begin]):
                continue
            tokens_of_row = rows[begin].nonzero().flatten().tolist()
            front: list[DimIndex | int] = []
            if len(grid) == 2:
                front = [begin // len(grid[1]), range(begin % len(grid[1]), (row - 1) % len(grid[1]) + 1)]
            elif grid:
                front = [range(begin, row)]
            if tokens_of_row:
                yield (*front, compact_index(tokens_of_row)) if tokens else tuple(front)
            begin = row

    def sequence_arrays(self) -> Iterator[SequenceArray]:
        """Iterate over the sequences, packed or not, each as an array: packed runs read as unpacked ones.

        Sequences are numbered in the order of microbatches and samples. Of a run that is not packed each
        sample is a sequence, by its number in the global batch.

        Returns:
            An iterator over the sequences of all iterations of the array.

        Raises:
            DumpError: the array has no tokens, or is a slice.

        Examples:
            >>> for each in open_dump("dumps/run")["decoder.layers.3"].at(1).sequence_arrays():
            ...     print(each.sequence, each.microbatch, each.array.shape)
            0 0 (1, 16, 32)
            1 0 (1, 16, 32)
            2 1 (1, 16, 32)
            3 1 (1, 16, 32)
        """
        self._check_entire()
        for sequence in self._source.among(self.iteration_keys).sequences():
            number, run_of = sequence.iteration
            array = DumpArray(sequence.source)[0][sequence.sample : sequence.sample + 1]
            place = sequence.number, sequence.microbatch, sequence.replica
            yield SequenceArray(
                number,
                run_of,
                *place,
                sequence.positions,
                array[:, sequence.tokens.start : sequence.tokens.stop],
            )

    def _check_entire(self) -> None:
        """Refuse a slice, whose pieces would be other ones."""
        if self._sliced and self.view[1:] != [range(n) for n in self._source.shape]:
            raise DumpError(
                f"{self.name}: pieces are of the whole array or of some iterations: slice each piece",
                site=self.name,
                path=self._source.folder,
            )

    # -- reading ---------------------------------------------------------------------------------------

    def _read(self, dtype: torch.dtype | None, device: Any, out: Tensor | None) -> Tensor:
        where = tuple(compact_index([v]) if isinstance(v, int) else v for v in self.view)
        source, passes = self._source, [self._source.iteration_keys[i] for i in where[0]]
        lengths = [len(i) for i in where[1:]]
        if out is None:
            read = allocate_on_host([len(passes), *lengths], dtype or source.dtype)
        else:
            _check_receiver(self, out, dtype, device)
            read = out.view(len(passes), *lengths)
        pieces = (p for row, key in enumerate(passes) for p in source.list_reads(key, where[1:], read[row]))
        read_pieces(pieces, read.nbytes)
        if out is None:
            live = [n for n, v in zip(read.shape, self.view, strict=True) if not isinstance(v, int)]
            out = read.reshape(live)
        return out if device is None else out.to(device)

    def torch(
        self, dtype: torch.dtype | None = None, device: Any = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Read the selected entries as a tensor.

        Args:
            dtype: to convert to; None for the one it is stored in.
            device: to copy to; None for the CPU.
            out: a contiguous tensor of the selected shape on the CPU. Entries are converted to its dtype.
                To reuse one tensor for many reads avoids the page faults of new memory.

        Returns:
            The tensor, on the CPU if no device is given.

        Raises:
            DumpError: a file is gone or damaged, or iterations or microbatches have different shapes; `out`
                is given with a dtype or a device, or does not have this shape.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"][0].torch(torch.float64).shape
            torch.Size([4, 16, 32])
        """
        with self._name_in_errors():
            return self._read(dtype, device, out)

    def mapped(self) -> Tensor | None:
        """Return the selected entries as a view of the mapped file, without a copy, where that is possible.

        Checksums are compared as in `torch`. Copy the tensor before you write to it: a write does not reach
        the file, but other reads of the same entries may return what was written.

        Returns:
            A tensor on the CPU, in general not contiguous; None if the selection has several iterations, or
            if no shard has all of its entries. Entries that are not evenly spaced are copied.

        Raises:
            DumpError: a file is gone or damaged, or iterations or microbatches have different shapes.

        Examples:
            >>> array = open_dump("dumps/run")["decoder.layers.3"]
            >>> array[0].mapped() is None  # microbatches are in files of their own
            True
            >>> array[0, :2].mapped().shape
            torch.Size([2, 16, 32])
        """
        where = tuple(compact_index([v]) if isinstance(v, int) else v for v in self.view)
        if len(where[0]) != 1:
            return None
        with self._name_in_errors():
            view = self._source.find(self._source.iteration_keys[where[0][0]], where[1:])
        if view is None:
            return None
        return view[None][tuple(0 if isinstance(v, int) else slice(None) for v in self.view)]

    def numpy(self) -> Any:
        """Read the selected entries as a numpy array.

        Returns:
            The array; bfloat16 and 8-bit floats, which numpy does not have, become float32.

        Raises:
            DumpError: numpy is not installed.

        Examples:
            >>> open_dump("dumps/run")["decoder.layers.3"][0, 0].numpy().shape
            (16, 32)
        """
        try:
            import numpy  # noqa: F401
        except ImportError:
            raise DumpError(
                f"{self.name}: numpy is not installed; .torch() needs none", site=self.name
            ) from None
        tensor = self.torch()
        lacks = tensor.dtype == torch.bfloat16 or (tensor.is_floating_point() and tensor.dtype.itemsize == 1)
        return (tensor.float() if lacks else tensor).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("an array of a dump is read from files: it is not available without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def item(self) -> Any:
        """Return the value of an array that has one entry.

        Examples:
            >>> round(open_dump("dumps/run")["decoder.layers.3"][0, 0, 0, 0].item(), 4)
            0.9017
        """
        return self.torch().item()

    def __reduce__(self) -> Any:
        return DumpArray, (self._source, self._view if self._sliced else None)


def _check_receiver(array: DumpArray, out: Tensor, dtype: torch.dtype | None, device: Any) -> None:
    """Refuse a tensor that cannot receive the selected entries."""
    if dtype is not None or device is not None:
        raise DumpError(f"{array.name}: out= excludes dtype= and device=; the entries get the dtype of out")
    if tuple(out.shape) != array.shape or not out.is_contiguous() or out.device.type != "cpu":
        kind = "" if out.is_contiguous() else ", not contiguous"
        raise DumpError(
            f"{array.name}: out has shape {list(out.shape)} on {out.device}{kind}; the selected entries need "
            f"a contiguous tensor of shape {list(array.shape)} on the CPU"
        )


def _index_labels(labels: Tensor, selection: list[DimIndex | int]) -> Tensor:
    for dim, index in reversed(list(enumerate(selection[: labels.ndim]))):
        if isinstance(index, int):
            labels = labels.select(dim, index)
        elif index != range(labels.shape[dim]):
            labels = labels.index_select(dim, torch.tensor(list(index), dtype=torch.int64))
    return labels
