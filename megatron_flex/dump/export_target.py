"""The file or folder that an export writes: an existing one is replaced only if an export wrote all of it."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatron_flex.errors import DumpError, FlexError

ExportFormat = Literal["safetensors", "zarr", "datasets"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("safetensors", "zarr", "datasets")
EXPORT_MARK = "megatron_flex"  # the key of an export's metadata under which its writer's version is
MAX_HEADER_BYTES = 100_000_000  # of safetensors: its own limit
EXPORT_FILES = {  # paths within an exported folder, by the file that has its metadata
    "zarr.json": re.compile(r"(.+/)?(zarr\.json|c(/[0-9]+)*)"),
    "dataset_info.json": re.compile(r"dataset_info\.json|state\.json|data-[0-9]{5,}-of-[0-9]{5,}\.arrow"),
}


def check_export_target(out: Path, to: str, force: bool) -> None:
    """Check that an export to the target is possible, before anything is read.

    Raises:
        FlexError: the format is unknown.
        DumpError: the target exists and may not be replaced, or a package is missing.
    """
    if to not in EXPORT_FORMATS:
        raise FlexError(f"format {to!r} is not supported; give one of {', '.join(EXPORT_FORMATS)}")
    if to != "safetensors" and find_spec(to) is None:
        raise DumpError(f"the package {to} is not installed: pip install megatron-flex[{to}]")
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise DumpError(
            f"{out} exists already; name another, or pass --force to replace an earlier export", path=out
        )
    if reason := _find_foreign_content(out):
        raise DumpError(
            f"{out}: {reason}; --force replaces only an earlier export: name another path", path=out
        )


def replace_target(complete: Path, out: Path, to: str, force: bool) -> None:
    """Give a complete export its name; what is replaced is removed last.

    Args:
        complete: the export, in a temporary folder of its own beside the target.
        out: the target.
        to: the format.
        force: replace an earlier export.

    Raises:
        DumpError: meanwhile something else has got the name.
        OSError: the export cannot be renamed; what had its name has it again.
    """
    check_export_target(out, to, force)
    replaced = complete.with_name("replaced")
    if out.exists():
        out.rename(replaced)
    try:
        complete.rename(out)
    except OSError:
        if replaced.exists():
            replaced.rename(out)
        raise


def _find_foreign_content(out: Path) -> str:
    """Why a file or folder is not an earlier export as a whole; empty if it is one, or holds nothing."""
    try:
        if out.is_symlink():
            return f"it is a symbolic link to {out.readlink()}"
        if not out.is_dir():
            empty = out.is_file() and out.stat().st_size == 0
            return "" if empty or _is_exported_file(out) else "it is a file that no export wrote"
        if not any(out.iterdir()):
            return ""
        for name, pattern in EXPORT_FILES.items():
            if _has_mark(out / name):
                return _find_added_file(out, pattern)
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    return "it is a folder that no export wrote"


def _find_added_file(folder: Path, pattern: re.Pattern[str]) -> str:
    """Name a file of an exported folder that the export did not write."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_symlink() or (not path.is_dir() and not pattern.fullmatch(relative)):
            return f"it has {relative}, which is not from an export"
    return ""


def _is_exported_file(path: Path) -> bool:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = _parse_object(file.read(size)) if size <= MAX_HEADER_BYTES else {}
    metadata = header.get("__metadata__")
    return isinstance(metadata, dict) and {EXPORT_MARK, "arrays"} <= metadata.keys()


def _has_mark(path: Path) -> bool:
    """Whether the metadata of a group of Zarr, or of a dataset, has the mark."""
    if not path.is_file():
        return False
    record = _parse_object(path.read_bytes())
    metadata = record.get("attributes")
    if metadata is None and isinstance(description := record.get("description"), str):
        metadata = _parse_object(description.encode())
    return isinstance(metadata, dict) and {EXPORT_MARK, "arrays"} <= metadata.keys()


def _parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object; an empty one if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
