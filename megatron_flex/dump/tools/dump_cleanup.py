"""Removal of what no reader uses or a user no longer wants; never of what is still being written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_flex.document import Document, Note, Row, Table
from megatron_flex.dump.run_folders import IterationFolder, RunFolder, is_temporary, list_run_folders
from megatron_flex.dump.writer.run_creation import TEMPORARY_RUN_NAME
from megatron_flex.dump.writer.writers_lock import is_being_written
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.progress import format_bytes, track
from megatron_flex.wording import count_words

PRUNED_PREFIX = (
    ".pruned-"  # a folder beside the runs that readers do not look into: what is in it is being removed
)
RemovalReason = Literal["incomplete", "temporary", "not kept", "empty run", "left over"]
LEFTOVER: RemovalReason = "left over"  # of a prune that was stopped


@dataclass(frozen=True, slots=True)
class Removal:
    """A file or folder that goes.

    Attributes:
        path: of it.
        nbytes: that it takes.
        why: `incomplete`, `temporary`, `not kept`, `empty run`, `left over`.
        run: the run that it is in; None where it is in none.
        iteration: the iteration; None where it is not one.
    """

    path: Path
    nbytes: int
    why: RemovalReason
    run: int | None = None
    iteration: int | None = None


def list_removals(
    path: Path, keep_every: int | None = None, before: int | None = None, force: bool = False
) -> list[Removal]:
    """What `prune_dump` would remove.

    Of the runs that are over: iterations that some rank has not closed, and temporary files. Of their whole
    iterations only those that `keep_every` and `before` select.

    Args:
        path: the dump's folder.
        keep_every: of the complete iterations keep those whose number is a multiple of it.
        before: only complete iterations of smaller numbers go: those that `keep_every` does not keep, or all.
        force: prune the newest run too. Else it is left alone: a job may be opening it. A run whose writers
            hold its lock is left alone either way.

    Raises:
        DumpError: there is no dump.
        FlexError: `keep_every` is less than 1.
    """
    if keep_every is not None and keep_every < 1:
        raise FlexError(f"keep-every {keep_every}: keep every n-th iteration, n at least 1")
    runs = list_run_folders(path)
    out = [
        Removal(leftover, _count_path_bytes(leftover), LEFTOVER)
        for leftover in sorted(path.glob(PRUNED_PREFIX + "*"))
        if leftover.is_dir()
    ]
    if force:  # else a job may be opening the dump
        out += [
            Removal(f, _count_path_bytes(f), "temporary")
            for f in sorted(path.iterdir())
            if TEMPORARY_RUN_NAME.fullmatch(f.name)
        ]
    for run in runs if force else runs[:-1]:
        if is_being_written(run.path):
            continue
        out += _list_run_removals(run, keep_every, before)
    return out


def _list_run_removals(run: RunFolder, keep_every: int | None, before: int | None) -> list[Removal]:
    out = [Removal(f, n, "temporary", run.number) for f, n in run.strays if is_temporary(f)]
    if run.manifest is None:
        if run.iterations or len(out) < len(run.strays):
            return []  # its data may be all there: it is for a person to say what becomes of them
        return [Removal(run.path, sum(n for _, n in run.strays), "empty run", run.number)]
    ranks = run.ranks
    for folder in run.iterations:
        about = run.number, folder.number
        if folder.missing(ranks):
            out.append(Removal(folder.path, folder.nbytes, "incomplete", *about))
        elif _is_unwanted(folder, keep_every, before):
            out.append(Removal(folder.path, folder.nbytes, "not kept", *about))
        else:
            out += [Removal(f, n, "temporary", *about) for f, n in folder.strays if is_temporary(f)]
    return out


def _is_unwanted(folder: IterationFolder, keep_every: int | None, before: int | None) -> bool:
    if keep_every is None and before is None:
        return False
    old = before is None or folder.number < before
    return old and (keep_every is None or folder.number % keep_every != 0)


def prune_dump(path: Path, removals: Sequence[Removal]) -> int:
    """Remove what `list_removals` listed; returns how many bytes that frees.

    An iteration leaves the dump in one step, before anything of it is removed, so that no reader ever sees a
    part of it; the rest of an interrupted prune is removed by the next one.

    Raises:
        DumpError: something cannot be removed; what was removed before that is gone.
    """
    aside = path / f"{PRUNED_PREFIX}{os.getpid()}"
    freed = 0
    try:
        for number, removal in enumerate(track(removals, "pruning", unit="items")):
            if removal.why == LEFTOVER:
                shutil.rmtree(removal.path)
            elif removal.path.is_dir():
                aside.mkdir(exist_ok=True)
                target = aside / str(number)
                removal.path.rename(target)
                shutil.rmtree(target)
            else:
                removal.path.unlink(missing_ok=True)
            freed += removal.nbytes
        if aside.is_dir():
            aside.rmdir()
    except OSError as error:
        raise DumpError(
            f"{error.filename or path}: cannot be removed: {error.strerror or error}",
            path=error.filename or path,
        ) from error
    return freed


def _count_path_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def describe_removals(path: Path, removals: Sequence[Removal], freed: int, dry_run: bool) -> Document:
    """What went, or would go, and what that frees."""
    if not removals:
        return Document("", [Note("nothing to remove")])
    rows = [Row((str(r.path.relative_to(path)), r.why, format_bytes(r.nbytes))) for r in removals]
    would = "would be " if dry_run else ""
    items = count_words(len(removals), "item")
    return Document(
        "", [Table(("what", "why", ">size"), rows), Note(f"{items}: {format_bytes(freed)} {would}freed")]
    )
