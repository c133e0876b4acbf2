"""Export to a Zarr group (format 3): an array for each site, one iteration at most in a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_flex.dump.exporting.blocks import ExportColumn, split_into_slabs
from megatron_flex.progress import ProgressBar

ZARR_CHUNK = 8 << 20  # bytes; about as large as a chunk is


def write_zarr(path: Path, columns: list[ExportColumn], metadata: dict[str, str], bar: ProgressBar) -> None:
    """Write a group with the names of dims, and attributes that say what the entries of each are."""
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
