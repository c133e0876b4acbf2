"""Export of a dump's full tensors to safetensors, Zarr or Hugging Face datasets, block by block."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_flex.dump.export_target import EXPORT_MARK, ExportFormat, check_export_target, replace_target
from megatron_flex.dump.part_format import DTYPE_NAMES
from megatron_flex.dump.reader import DumpArray
from megatron_flex.dump.run_folders import IterationKey
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.progress import BYTES, ProgressBar, progress
from megatron_flex.version import __version__

EXPORT_BLOCK = 16 << 20  # bytes that are read at a time
WIDENED_DTYPES = {  # what neither numpy nor Arrow has
    torch.bfloat16,
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
}

BlockSlices = tuple[slice, ...]


def read_blocks(array: DumpArray, most: int = EXPORT_BLOCK) -> Iterator[Tensor]:
    """Iterate over the values in row-major order, in slabs of at most so many bytes."""
    for part in array.regular_parts():
        for where in split_into_slabs(part.shape, part.dtype.itemsize, most):
            yield part[where].torch()


def split_into_slabs(shape: Sequence[int], itemsize: int, most: int = EXPORT_BLOCK) -> Iterator[BlockSlices]:
    """Slices that make up an array in row-major order, each of at most so many bytes, or one value."""
    if 0 in shape:
        return
    yield from _split_into_slabs(tuple(shape), itemsize, most, ())


def _split_into_slabs(
    shape: tuple[int, ...], itemsize: int, most: int, front: BlockSlices
) -> Iterator[BlockSlices]:
    axis = len(front)
    if axis == len(shape):
        yield front
        return
    each = itemsize
    for length in shape[axis + 1 :]:
        each *= length
    step = max(1, most // each)
    for first in range(0, shape[axis], step):
        region = (*front, slice(first, min(first + step, shape[axis])))
        if each > most:
            yield from _split_into_slabs(shape, itemsize, most, region)
        else:
            yield (*region, *(slice(0, n) for n in shape[axis + 1 :]))


@dataclass(slots=True)
class ExportColumn:
    """An array that is exported.

    Attributes:
        name: in the export.
        array: over (iteration, sample, token, *features), or for a parameter over (iteration, *dims).
    """

    name: str
    array: DumpArray

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in formats that lack narrow floats: 8-bit floats and bfloat16 become fp32."""
        return torch.float32 if self.array.dtype in WIDENED_DTYPES else self.array.dtype

    def check_same_shapes(self, ragged: bool = False) -> None:
        """Raise DumpError if iterations have different shapes, or microbatches, if that is not allowed."""
        if not ragged and self.array.ragged:
            raise DumpError(
                f"{self.name}: microbatches have sequences of different lengths; write a tensor for each "
                "(--per-iteration), or a dataset with a row for each token (--rows token)"
            )
        shapes = {self.array.at(p).shape[1:] for p in self.array.iteration_keys}
        if len(shapes) > 1:
            examples = " and ".join(str(list(s)) for s in sorted(shapes)[:2])
            raise DumpError(
                f"{self.name}: iterations have different shapes, such as {examples}; choose iterations of "
                "one shape, or a tensor for each (--per-iteration)"
            )

    def by_iteration(self) -> list[ExportColumn]:
        """One column for each iteration, without that axis; if microbatches differ in length, for each."""
        out = []
        for key in self.array.iteration_keys:
            one = self.array.at(key)
            name = f"{self.name}/{key[0]}" + (f".{key[1]}" if key[1] else "")
            if one.ragged:
                pieces = list(one.microbatch_arrays())
                several = len({piece.replica for piece in pieces}) > 1
                for piece in pieces:
                    replica = f".{piece.replica}" if several else ""
                    out.append(ExportColumn(f"{name}/{piece.microbatch}{replica}", piece.array))
            else:
                out.append(ExportColumn(name, one[0]))
        return out


HEADER_ALIGNMENT = 8


def write_safetensors(
    path: Path, columns: list[ExportColumn], metadata: dict[str, str], bar: ProgressBar
) -> None:
    """Write a safetensors file; every dtype is kept.

    Tensors are ordered by dtype, the widest first, so that each is aligned, and then in their original order.
    """
    ordered = sorted(columns, key=lambda c: -c.array.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for column in ordered:
        array = column.array
        if array.dtype not in DTYPE_NAMES:
            raise DumpError(f"{column.name}: safetensors has no {array.dtype}")
        header[column.name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    body = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    body += b" " * (-len(body) % HEADER_ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        for column in ordered:
            for block in read_blocks(column.array):
                flat = block.contiguous().reshape(-1).view(torch.uint8)
                file.write(memoryview(flat.numpy()))
                bar.advance(flat.numel())


ZARR_CHUNK = 8 << 20  # bytes; about as large as a chunk is


def write_zarr(path: Path, columns: list[ExportColumn], metadata: dict[str, str], bar: ProgressBar) -> None:
    """Write a group with the names of dims, and attributes that describe the entries of each dim."""
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=3, attributes=dict(metadata))
    for column in columns:
        array = column.array
        dtype = str(column.dtype).removeprefix("torch.")
        chunks = _choose_chunks(array.shape, array.dims, column.dtype.itemsize)
        out: Any = group.create_array(
            column.name,
            shape=array.shape,
            chunks=chunks,
            dtype=dtype,
            dimension_names=array.dims,
            attributes=_make_zarr_attributes(column),
        )
        for where in split_into_slabs(count_chunks(array.shape, chunks), 1, 1):
            inside = tuple(
                slice(w.start * c, min(w.stop * c, n))
                for w, c, n in zip(where, chunks, array.shape, strict=True)
            )
            block = array[inside].torch(column.dtype)
            out[inside] = block.numpy()
            bar.advance(block.numel() * array.dtype.itemsize)


def count_chunks(shape: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    """How many chunks there are along each axis."""
    return tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))


def _choose_chunks(shape: tuple[int, ...], dims: tuple[str, ...], itemsize: int) -> tuple[int, ...]:
    """One iteration, and of that as much as `ZARR_CHUNK` holds, halving from the front."""
    out = [1 if d == "iteration" else max(1, n) for n, d in zip(shape, dims, strict=True)]

    def nbytes() -> int:
        count = itemsize
        for n in out:
            count *= n
        return count

    for axis in range(len(out)):
        while nbytes() > ZARR_CHUNK and out[axis] > 1:
            out[axis] = -(-out[axis] // 2)
    return tuple(out)


def _make_zarr_attributes(column: ExportColumn) -> dict[str, Any]:
    array = column.array
    out: dict[str, Any] = {"layout": array.layout}
    if "iteration" in array.dims:
        out["iterations"] = array.iterations
    if "sample" in array.dims and array.samples is not None:
        out["samples"] = array.samples.tolist()
    if "token" in array.dims and array.tokens is not None:
        out["tokens"] = array.tokens.tolist()
    if column.dtype != array.dtype:
        out["stored"] = str(array.dtype).removeprefix("torch.")
    return out


ExportRows = Literal["token", "sample"]
ARROW_FILE_BYTES = 1 << 30  # bytes; a file is closed and another begun at about this size
LABEL_COLUMNS = ("iteration", "sample", "token")


def write_datasets(
    path: Path, columns: list[ExportColumn], rows: ExportRows, metadata: dict[str, str], bar: ProgressBar
) -> None:
    """Write a column for each hook point, after `iteration`, `sample` and, for rows of tokens, `token`.

    Raises:
        DumpError: a hook point has no samples or no tokens, or they differ from those of the first.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    front = LABEL_COLUMNS if rows == "token" else LABEL_COLUMNS[:2]
    several = any(run_of for _, run_of in columns[0].array.iteration_keys)
    front = ("iteration", "run", *front[1:]) if several else front
    for column in columns:
        _check_column(column, columns[0], rows)
    features = datasets.Features(
        {name: datasets.Value("int64") for name in front}
        | {c.name: _make_feature(datasets, c, len(LABEL_COLUMNS) if rows == "token" else 2) for c in columns}
    )
    # `save_to_disk` takes a dataset, not an iterator: rows go to a file first, which it maps and divides.
    stream = path.with_name(path.name + ".rows")
    with ArrowWriter(features=features, path=str(stream)) as writer:
        for batch in _read_row_batches(columns, rows, several, bar):
            writer.write_batch(batch)
        writer.finalize()
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_file(str(stream))
    dataset.info.description = json.dumps(metadata, allow_nan=False)
    files = min(-(-stream.stat().st_size // ARROW_FILE_BYTES), len(dataset))
    dataset.save_to_disk(str(path), num_shards=max(files, 1))  # a dataset without files cannot be loaded


def _check_column(column: ExportColumn, first: ExportColumn, rows: ExportRows) -> None:
    dims = column.array.dims
    if column.dtype.is_complex:
        raise DumpError(
            f"{column.name} is {column.dtype}, which Arrow has no type for; export it as zarr or safetensors "
            "or leave it out (--sites)"
        )
    if dims[:2] != ("iteration", "sample") or (rows == "token" and dims[2:3] != ("token",)):
        fix = "--rows sample, or leave it out" if dims[1:2] == ("sample",) else "leave it out (--sites)"
        raise DumpError(f"{column.name} is over {', '.join(dims)}: it has no {rows}s for rows; {fix}")
    depth = 3 if rows == "token" else 2
    same = (
        column.array.iteration_keys == first.array.iteration_keys
        and column.array.shape[:depth] == first.array.shape[:depth]
    )
    for label in ("samples", "tokens")[: depth - 1]:
        own_labels, other = getattr(column.array, label), getattr(first.array, label)
        same = (
            same
            and (own_labels is None) == (other is None)
            and (own_labels is None or torch.equal(own_labels, other))
        )
    existing = [one.array.existing() for one in (column, first)] if rows == "token" else [None]
    same = same and (existing[0] is existing[-1] or _are_equal(*existing))
    if not same:
        raise DumpError(
            f"{column.name} has other iterations, samples or tokens than {first.name}: they cannot share "
            "rows; export them one by one (--sites)"
        )


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _make_feature(datasets: Any, column: ExportColumn, depth: int) -> Any:
    out = datasets.Value(str(column.dtype).removeprefix("torch."))
    for length in reversed(column.array.shape[depth:]):
        out = datasets.List(out, length=length)
    return out


def _read_row_batches(
    columns: list[ExportColumn], rows: ExportRows, several: bool, bar: ProgressBar
) -> Iterator[dict[str, Any]]:
    """Rows by column, of about as many bytes as are read at a time."""
    depth = 2 if rows == "token" else 1
    for (number, run_of), current in _list_record_parts(columns):
        grid = current[0].array.shape[:depth]
        wide = max((_count_row_bytes(c, depth) for c in current), default=1)
        samples, tokens = current[0].array.samples, current[0].array.tokens if rows == "token" else None
        for where in split_into_slabs(grid, wide, EXPORT_BLOCK):
            lengths = tuple(w.stop - w.start for w in where)
            count = int(torch.tensor(lengths).prod())
            labels = {"iteration": torch.full((count,), number)}
            if several:
                labels["run"] = torch.full((count,), run_of)
            sample_numbers = torch.arange(grid[0]) if samples is None else samples
            labels["sample"] = sample_numbers[where[0]].repeat_interleave(lengths[1] if depth == 2 else 1)
            if depth == 2:
                labels["token"] = _list_row_tokens(tokens, grid, where)
            batch = {name: numbers.numpy() for name, numbers in labels.items()}
            for column in current:
                block = column.array[where].torch(column.dtype)
                batch[column.name] = block.reshape(count, *block.shape[depth:]).numpy()
                bar.advance(block.numel() * column.array.dtype.itemsize)
            yield batch


def _list_record_parts(columns: list[ExportColumn]) -> Iterator[tuple[IterationKey, list[ExportColumn]]]:
    """Each iteration, in parts of samples that have the same tokens."""
    for key in columns[0].array.iteration_keys:
        arrays = [column.array.at(key)[0] for column in columns]
        for region in arrays[0].regions():
            yield key, [ExportColumn(c.name, a[region]) for c, a in zip(columns, arrays, strict=True)]


def _list_row_tokens(tokens: Tensor | None, grid: tuple[int, ...], where: tuple[slice, ...]) -> Tensor:
    """The position of the token in each row."""
    if tokens is None:
        tokens = torch.arange(grid[1])
    table = tokens if tokens.ndim == 2 else tokens.expand(grid)
    return table[where[:2]].reshape(-1)


def _count_row_bytes(column: ExportColumn, depth: int) -> int:
    count = column.dtype.itemsize
    for length in column.array.shape[depth:]:
        count *= length
    return max(count, 1)


EXPORT_ROWS: tuple[ExportRows, ...] = ("token", "sample")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: the file or folder.
        nbytes: the size of the export.
        names: the names of the exported arrays.
        notes: differences from the dump.
    """

    path: Path
    nbytes: int
    names: Sequence[str]
    notes: Sequence[str] = field(default=())


def export_arrays(
    columns: Sequence[ExportColumn],
    out: Path,
    to: ExportFormat,
    *,
    rows: ExportRows = "token",
    per_iteration: bool = False,
    force: bool = False,
) -> ExportResult:
    """Write arrays of a dump to a file or folder, which appears only when complete.

    Args:
        columns: the arrays to write.
        out: the target: a file for safetensors, else a folder.
        to: the format.
        rows: of `datasets`: one for each token, or for each sample.
        per_iteration: write an array for each iteration, `NAME/100`; their shapes may differ.
        force: replace an existing target that an earlier export wrote; anything else is refused.

    Raises:
        DumpError: the target exists, a package is missing, the format lacks a shape or dtype, the dump is
            damaged, or the disk is full.
    """
    check_export_target(out, to, force)
    if not columns:
        raise DumpError("nothing to export: the dump has no complete iteration, or no site was chosen")
    if per_iteration and to == "datasets":
        raise DumpError("datasets have a column for the iteration; leave out --per-iteration")
    if rows not in EXPORT_ROWS:
        raise FlexError(f"rows {rows!r} is not one of {', '.join(EXPORT_ROWS)}")
    chosen = [one for c in columns for one in (c.by_iteration() if per_iteration else [c])]
    if not per_iteration:
        for column in chosen:
            column.check_same_shapes(ragged=to == "datasets" and rows == "token")
    metadata = {
        "format": "pt",
        EXPORT_MARK: __version__,
        "arrays": json.dumps(_describe_columns(chosen), allow_nan=False),
    }
    folder: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))  # where no other user leaves a link
        temporary = folder / out.name
        with progress("exporting", sum(c.array.nbytes for c in chosen), BYTES) as bar:
            if to == "safetensors":
                write_safetensors(temporary, chosen, metadata, bar)
            elif to == "zarr":
                write_zarr(temporary, chosen, metadata, bar)
            else:
                write_datasets(temporary, chosen, rows, metadata, bar)
        replace_target(temporary, out, to, force)
    except OSError as error:
        raise DumpError(f"{out}: cannot be written: {error.strerror or error}", path=out) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder)
    return ExportResult(out, _count_file_bytes(out), [c.name for c in chosen], _list_export_notes(chosen, to))


def _describe_columns(columns: Sequence[ExportColumn]) -> dict[str, dict[str, object]]:
    """What the axes of each array are; the entries of the first are iterations."""
    return {
        c.name: {"dims": list(c.array.dims), "iterations": c.array.iterations, "layout": c.array.layout}
        for c in columns
    }


def _list_export_notes(columns: Sequence[ExportColumn], to: ExportFormat) -> list[str]:
    if to == "safetensors":
        return []
    wider = sorted({str(c.array.dtype).removeprefix("torch.") for c in columns if c.dtype != c.array.dtype})
    return [f"{name} is float32 there, which holds the same values: {to} has no {name}" for name in wider]


def _count_file_bytes(path: Path) -> int:
    return (
        sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        if path.is_dir()
        else path.stat().st_size
    )
