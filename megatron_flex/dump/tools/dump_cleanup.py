"""Removal of what no reader uses or a user no longer wants; never of what is still being written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_flex.document import Document, Note, Row, Table
from megatron_flex.dump.file_names import PRUNED_PREFIX, RUN_DRAFT, is_draft
from megatron_flex.dump.run_folders import DumpRun, StoredIteration, count_file_bytes, list_runs
from megatron_flex.dump.writer.writers_lock import is_being_written
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.progress import format_bytes, track
from megatron_flex.wording import count_words

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
        DumpError: the path has no dump.
        FlexError: `keep_every` is less than 1.
    """
    if keep_every is not None and keep_every < 1:
        raise FlexError(f"keep-every {keep_every}: keep every n-th iteration, n at least 1")
    runs = list_runs(path)
    out = [
        Removal(leftover, _count_path_bytes(leftover), LEFTOVER)
        for leftover in sorted(path.glob(PRUNED_PREFIX + "*"))
        if leftover.is_dir()
    ]
    if force:  # else a job may be opening the dump
        out += [
            Removal(f, _count_path_bytes(f), "temporary")
            for f in sorted(path.iterdir())
            if RUN_DRAFT.fullmatch(f.name)
        ]
    for run in runs if force else runs[:-1]:
        if is_being_written(run.folder):
            continue
        out += _list_run_removals(run, keep_every, before)
    return out


def _list_run_removals(run: DumpRun, keep_every: int | None, before: int | None) -> list[Removal]:
    out = _list_drafts(run.strays, run.number)
    if run.damage:
        if run.iteration_keys or len(out) < len(run.strays):
            return []  # its data may be all there: it is for a person to say what becomes of them
        return [Removal(run.folder, count_file_bytes(run.strays), "empty run", run.number)]
    for stored in run.iterations:
        about = run.number, stored.iteration
        if not stored.complete:
            out.append(Removal(stored.folder, stored.count_bytes(), "incomplete", *about))
        elif _is_unwanted(stored, keep_every, before):
            out.append(Removal(stored.folder, stored.count_bytes(), "not kept", *about))
        else:
            out += _list_drafts(stored.strays, *about)
    return out


def _list_drafts(strays: Sequence[Path], run: int, iteration: int | None = None) -> list[Removal]:
    drafts = [path for path in strays if is_draft(path)]
    return [Removal(path, count_file_bytes([path]), "temporary", run, iteration) for path in drafts]


def _is_unwanted(stored: StoredIteration, keep_every: int | None, before: int | None) -> bool:
    if keep_every is None and before is None:
        return False
    old = before is None or stored.iteration < before
    return old and (keep_every is None or stored.iteration % keep_every != 0)


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
