"""What is wrong with a dump, as notes for the page, and whatever can still be read of it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from megatron_flex.dump.inventory import RunFolder, run_folders, total
from megatron_flex.dump.reading import OpenDump, Remains, open_remains
from megatron_flex.dump.verifying import Finding, verify
from megatron_flex.errors import DumpError

MOST_BYTES = 1 << 30  # of a dump every byte of which is checked, which takes some seconds
MOST_NOTES = 24
Note = dict[str, str]


class Readable(NamedTuple):
    """What `readable` found.

    Attributes:
        dump: whatever can be read of it; None where no manifest can.
        notes: what cannot, `{"kind": "damage" | "info", "text"}`.
    """

    dump: OpenDump | None
    notes: list[Note]


def readable(dump: OpenDump | str | PathLike[str]) -> Readable:
    """Open whatever is left of a dump, and tell what is not.

    Args:
        dump: a dump's folder, or one that was opened.

    Returns:
        Of a good dump all of it, and no notes.

    Raises:
        DumpError: there is no dump at that path at all.
    """
    path = dump.path if isinstance(dump, OpenDump) else Path(dump)
    opened = dump if isinstance(dump, Remains) else None
    if opened is None or opened.damage is None:
        runs = run_folders(path)
        large = total(runs) > MOST_BYTES
        found = _by_names(runs) if large else _findings(path)
        try:
            opened = opened or open_remains(path, check="whole" if large else "first")
        except DumpError as error:
            return Readable(None, _some([f"{local(str(error), path)}: nothing of it can be shown", *found]))
        opened.damage = found
    return Readable(opened, _some(opened.damage or []))


def damage(text: str) -> Note:
    """Something is lost or wrong."""
    return {"kind": "damage", "text": text}


def info(text: str) -> Note:
    """Something to know, such as what was left out."""
    return {"kind": "info", "text": text}


def local(text: str, path: Path) -> str:
    """An error's words with paths from the dump's folder on."""
    return text.replace(f"{path}/", "").replace(str(path), path.name or str(path))


def _findings(path: Path) -> list[str]:
    """By every byte of it."""
    return [local(_words(f), path) for f in verify(path).findings if f.error]


def _words(found: Finding) -> str:
    about = "" if found.kind in ("torn", "missing") else f" ({found.where})"
    return f"{found.text}{about}"


def _by_names(runs: list[RunFolder]) -> list[str]:
    """By manifests and the names of files, of a dump too large to read all of it here."""
    out = []
    for run in runs:
        if run.manifest is None:
            out.append(f"run {run.number}: {local(run.damage, run.path.parent)}")
        for folder in run.iterations:
            missing = folder.missing(run.ranks)
            if missing:
                ranks = ", ".join(map(str, list(missing)[:8])) + (" and more" if len(missing) > 8 else "")
                out.append(f"run {run.number}, iteration {folder.number}: parts of rank {ranks} are missing")
    return out


def _some(texts: list[str]) -> list[Note]:
    notes = [damage(text) for text in texts[:MOST_NOTES]]
    if len(texts) > MOST_NOTES:
        notes.append(damage(f"and {len(texts) - MOST_NOTES} more: `megatron-flex dump verify` tells all"))
    return notes
