"""What is wrong with a dump, as notes for the page, and whatever can still be read of it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from megatron_flex.dump.inventory import RunFolder, list_run_folders, count_part_bytes
from megatron_flex.dump.reader import OpenDump, DamagedDump, open_damaged_dump
from megatron_flex.dump.verifying import DumpFinding, verify_dump
from megatron_flex.errors import DumpError

MOST_BYTES = 1 << 30  # of a dump every byte of which is checked, which takes some seconds
MAX_NOTES = 24
PageNote = dict[str, str]


class ReadableDump(NamedTuple):
    """What `open_readable` found.

    Attributes:
        dump: whatever can be read of it; None where no manifest can.
        notes: what cannot, `{"kind": "damage" | "info", "text"}`.
    """

    dump: OpenDump | None
    notes: list[PageNote]


def open_readable(dump: OpenDump | str | PathLike[str]) -> ReadableDump:
    """Open whatever is left of a dump, and tell what is not.

    Args:
        dump: a dump's folder, or one that was opened.

    Returns:
        Of a good dump all of it, and no notes.

    Raises:
        DumpError: there is no dump at that path at all.
    """
    path = dump.path if isinstance(dump, OpenDump) else Path(dump)
    opened = dump if isinstance(dump, DamagedDump) else None
    if opened is None or opened.damage is None:
        runs = list_run_folders(path)
        large = count_part_bytes(runs) > MOST_BYTES
        found = _find_by_names(runs) if large else _find_by_bytes(path)
        try:
            opened = opened or open_damaged_dump(path, check="whole" if large else "first")
        except DumpError as error:
            return ReadableDump(None, _first_notes([f"{shorten_paths(str(error), path)}: nothing of it can be shown", *found]))
        opened.damage = found
    return ReadableDump(opened, _first_notes(opened.damage or []))


def damage_note(text: str) -> PageNote:
    """Something is lost or wrong."""
    return {"kind": "damage", "text": text}


def info_note(text: str) -> PageNote:
    """Something to know, such as what was left out."""
    return {"kind": "info", "text": text}


def shorten_paths(text: str, path: Path) -> str:
    """An error's words with paths from the dump's folder on."""
    return text.replace(f"{path}/", "").replace(str(path), path.name or str(path))


def _find_by_bytes(path: Path) -> list[str]:
    """By every byte of it."""
    return [shorten_paths(_describe_finding(f), path) for f in verify_dump(path).findings if f.error]


def _describe_finding(found: DumpFinding) -> str:
    about = "" if found.kind in ("torn", "missing") else f" ({found.where})"
    return f"{found.text}{about}"


def _find_by_names(runs: list[RunFolder]) -> list[str]:
    """By manifests and the names of files, of a dump too large to read all of it here."""
    out = []
    for run in runs:
        if run.manifest is None:
            out.append(f"run {run.number}: {shorten_paths(run.damage, run.path.parent)}")
        for folder in run.iterations:
            missing = folder.missing(run.ranks)
            if missing:
                ranks = ", ".join(map(str, list(missing)[:8])) + (" and more" if len(missing) > 8 else "")
                out.append(f"run {run.number}, iteration {folder.number}: parts of rank {ranks} are missing")
    return out


def _first_notes(texts: list[str]) -> list[PageNote]:
    notes = [damage_note(text) for text in texts[:MAX_NOTES]]
    if len(texts) > MAX_NOTES:
        notes.append(damage_note(f"and {len(texts) - MAX_NOTES} more: `megatron-flex dump verify` tells all"))
    return notes
