"""Exporting a dump, or some of its sites and iterations, to one of three formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_flex.dump.exporting import arrow, plain, zarred
from megatron_flex.dump.exporting.blocks import ExportColumn, beside
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.progress import BYTES, progress
from megatron_flex.version import __version__

ExportFormat = Literal["safetensors", "zarr", "datasets"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("safetensors", "zarr", "datasets")
EXPORT_ROWS: tuple[arrow.ExportRows, ...] = ("token", "sample")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written.

    Attributes:
        path: the file or folder.
        nbytes: of it.
        names: what is in it.
        notes: what is not as it is in the dump.
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
    rows: arrow.ExportRows = "token",
    per_iteration: bool = False,
    force: bool = False,
) -> ExportResult:
    """Write arrays of a dump to a file or folder that is there once it is whole, and not before.

    Args:
        columns: what to write.
        out: where; a file for safetensors, else a folder.
        to: the format.
        rows: of `datasets`: one for each token, or for each sample.
        per_iteration: an array for each iteration, `NAME/100`, whose shapes may differ.
        force: replace what is there.

    Raises:
        DumpError: something is there already, a package is missing, a shape or dtype has no place in the
            format, the dump is damaged, or the disk is full.
    """
    check_export_target(out, to, force)
    if not columns:
        raise DumpError("nothing to export: the dump has no whole iteration, or no site was chosen")
    if per_iteration and to == "datasets":
        raise DumpError("datasets have a column for the iteration; leave out --per-iteration")
    if rows not in EXPORT_ROWS:
        raise FlexError(f"rows {rows!r} is none of {', '.join(EXPORT_ROWS)}")
    chosen = [one for c in columns for one in (c.by_iteration() if per_iteration else [c])]
    if not per_iteration:
        for column in chosen:
            column.check_same_shapes()
    metadata = {"format": "pt", "megatron_flex": __version__, "arrays": json.dumps(_describe_columns(chosen))}
    temporary = beside(out)
    try:
        _remove_path(temporary)
        out.parent.mkdir(parents=True, exist_ok=True)
        with progress("exporting", sum(c.array.nbytes for c in chosen), BYTES) as bar:
            if to == "safetensors":
                plain.write_safetensors(temporary, chosen, metadata, bar)
            elif to == "zarr":
                zarred.write_zarr(temporary, chosen, metadata, bar)
            else:
                arrow.write_datasets(temporary, chosen, rows, metadata, bar)
        if force:
            _remove_path(out)
        temporary.rename(out)
    except OSError as error:
        raise DumpError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        _remove_path(temporary)
    return ExportResult(out, _count_file_bytes(out), [c.name for c in chosen], _list_export_notes(chosen, to))


def check_export_target(out: Path, to: str, force: bool) -> None:
    """Whether something can be exported there, before anything is read.

    Raises:
        FlexError: no such format.
        DumpError: something is there already, or a package is missing.
    """
    if to not in EXPORT_FORMATS:
        raise FlexError(f"format {to!r} is none of {', '.join(EXPORT_FORMATS)}")
    if to != "safetensors" and find_spec(to) is None:
        raise DumpError(f"the package {to} is not installed: pip install megatron-flex[{to}]")
    if (out.exists() or out.is_symlink()) and not force:
        raise DumpError(f"{out} is there already; name another, or say --force to replace it")


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


def _remove_path(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _count_file_bytes(path: Path) -> int:
    return (
        sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        if path.is_dir()
        else path.stat().st_size
    )
