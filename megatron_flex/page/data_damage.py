"""What is wrong with a dump, as notes for the page, and whatever can still be read of it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from megatron_flex.dump.inventory import RunFolder, run_folders, total
from megatron_flex.dump.reading import OpenDump, Remains, open_remains
from megatron_flex.dump.verifying import Finding, verify
from megatron_flex.errors import DumpError

MOST_BYTES = 1 << 30  # of a dump every byte of which is checked; about two seconds
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
    runs = run_folders(path)
    notes = _findings(path) if total(runs) <= MOST_BYTES else _by_names(runs)
    if isinstance(dump, Remains):
        return Readable(dump, _some(notes))
    try:
        return Readable(open_remains(path), _some(notes))
    except DumpError as error:
        return Readable(None, _some([damage(f"{local(str(error), path)}: nothing of it can be shown"), *notes]))


def damage(text: str) -> Note:
    """Something is lost or wrong."""
    return {"kind": "damage", "text": text}


def info(text: str) -> Note:
    """Something to know, such as what was left out."""
    return {"kind": "info", "text": text}


def local(text: str, path: Path) -> str:
    """An error's words with paths from the dump's folder on."""
    return text.replace(f"{path}/", "").replace(str(path), path.name or str(path))


def _findings(path: Path) -> list[Note]:
    """By every byte of it."""
    wrong = [f for f in verify(path).findings if f.error]
    return [damage(local(_words(f), path)) for f in wrong]


def _words(found: Finding) -> str:
    about = "" if found.kind in ("torn", "missing") else f" ({found.where})"
    return f"{found.text}{about}"


def _by_names(runs: list[RunFolder]) -> list[Note]:
    """By manifests and the names of files, of a dump too large to read all of it here."""
    notes = [info("The dump is large: what is shown is checked as it is read; `dump verify` checks every byte.")]
    for run in runs:
        if run.manifest is None:
            notes.append(damage(f"run {run.number}: {local(run.damage, run.path.parent)}"))
        for folder in run.iterations:
            missing = folder.missing(run.ranks)
            if missing:
                ranks = ", ".join(map(str, list(missing)[:8])) + (" and more" if len(missing) > 8 else "")
                notes.append(damage(f"run {run.number}, iteration {folder.number}: parts of rank {ranks} are missing"))
    return notes


def _some(notes: list[Note]) -> list[Note]:
    if len(notes) <= MOST_NOTES:
        return notes
    more = f"and {len(notes) - MOST_NOTES} more: `megatron-flex dump verify` tells all"
    return [*notes[:MOST_NOTES], damage(more)]
