"""Export to a folder that `datasets.load_from_disk` reads: a row for each token, or for each sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_flex.dump.exporting.blocks import EXPORT_BLOCK, ExportColumn, split_into_slabs
from megatron_flex.errors import DumpError
from megatron_flex.progress import ProgressBar

ExportRows = Literal["token", "sample"]
ARROW_FILE_BYTES = 1 << 30  # bytes; a file is closed and another begun at about this size
LABEL_COLUMNS = ("iteration", "sample", "token")


def write_datasets(path: Path, columns: list[ExportColumn], rows: ExportRows, metadata: dict[str, str], bar: ProgressBar) -> None:
    """Write a column for each site, behind `iteration`, `sample` and, for rows of tokens, `token`.

    Raises:
        DumpError: a site has no samples or no tokens, or sites have others than the first.
    """
    import datasets
    import pyarrow as pa

    front = LABEL_COLUMNS if rows == "token" else LABEL_COLUMNS[:2]
    several = any(run_of for _, run_of in columns[0].array.passes)
    front = ("iteration", "run", *front[1:]) if several else front
    for column in columns:
        _check_column(column, columns[0], rows)
    features = datasets.Features(
        {name: datasets.Value("int64") for name in front}
        | {c.name: _make_feature(datasets, c, len(LABEL_COLUMNS) if rows == "token" else 2) for c in columns}
    )
    datasets.disable_progress_bars()
    empty = datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    empty.info.description = json.dumps(metadata)
    empty.save_to_disk(str(path))  # for the files beside the data, which say how to read it
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for one in state["_data_files"]:
        (path / one["filename"]).unlink()
    names: list[str] = []
    batches = _make_record_batches(columns, rows, several, features.arrow_schema, bar)
    held = next(batches, None)
    while held is not None or not names:
        names.append(f"data-{len(names):05d}.arrow")
        size = 0
        with (path / names[-1]).open("wb") as file, pa.ipc.new_stream(file, features.arrow_schema) as stream:
            while held is not None and size < ARROW_FILE_BYTES:
                stream.write_batch(held)
                size += held.nbytes
                held = next(batches, None)
    state["_data_files"] = [{"filename": name} for name in names]
    (path / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def _check_column(column: ExportColumn, first: ExportColumn, rows: ExportRows) -> None:
    dims = column.array.dims
    if dims[:2] != ("iteration", "sample") or (rows == "token" and dims[2:3] != ("token",)):
        fix = "--rows sample, or leave it out" if dims[1:2] == ("sample",) else "leave it out (--sites)"
        raise DumpError(f"{column.name} is over {', '.join(dims)}: it has no {rows}s for rows; {fix}")
    depth = 3 if rows == "token" else 2
    same = (
        column.array.passes == first.array.passes and column.array.shape[:depth] == first.array.shape[:depth]
    )
    for label in ("samples", "tokens")[: depth - 1]:
        own_labels, other = getattr(column.array, label), getattr(first.array, label)
        same = same and (own_labels is None) == (other is None) and (own_labels is None or torch.equal(own_labels, other))
    if not same:
        raise DumpError(
            f"{column.name} has other iterations, samples or tokens than {first.name}: they cannot share "
            "rows; export them one by one (--sites)"
        )


def _make_feature(datasets: Any, column: ExportColumn, depth: int) -> Any:
    out = datasets.Value(str(column.dtype).removeprefix("torch."))
    for length in reversed(column.array.shape[depth:]):
        out = datasets.List(out, length=length)
    return out


def _make_record_batches(columns: list[ExportColumn], rows: ExportRows, several: bool, schema: Any, bar: ProgressBar) -> Iterator[Any]:
    """Record batches, each of about as many bytes as are read at a time."""
    import pyarrow as pa

    depth = 2 if rows == "token" else 1
    for number, run_of in columns[0].array.passes:
        current = [ExportColumn(c.name, c.array.at((number, run_of))[0]) for c in columns]
        grid = current[0].array.shape[:depth]
        wide = max((_count_row_bytes(c, depth) for c in current), default=1)
        samples, tokens = current[0].array.samples, current[0].array.tokens if rows == "token" else None
        for where in split_into_slabs(grid, wide, EXPORT_BLOCK):
            lengths = tuple(w.stop - w.start for w in where)
            count = int(torch.tensor(lengths).prod())
            labels = {"iteration": torch.full((count,), number), "run": torch.full((count,), run_of)}
            own = torch.arange(grid[0]) if samples is None else samples
            labels["sample"] = own[where[0]].repeat_interleave(lengths[1] if depth == 2 else 1)
            if depth == 2:
                labels["token"] = _list_row_tokens(tokens, grid, where)
            found = [labels[n] for n in schema.names if n in labels and (several or n != "run")]
            arrays = [pa.array(t.numpy()) for t in found]
            for column in current:
                block = column.array[where].torch(column.dtype)
                arrays.append(_nest_rows(pa, block.reshape(count, *block.shape[depth:])))
                bar.advance(block.numel() * column.array.dtype.itemsize)
            yield pa.record_batch(arrays, schema=schema)


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


def _nest_rows(pa: Any, block: Tensor) -> Any:
    """Rows of lists of fixed lengths."""
    out = pa.array(block.contiguous().reshape(-1).numpy())
    for length in reversed(block.shape[1:]):
        out = pa.FixedSizeListArray.from_arrays(out, length)
    return out
