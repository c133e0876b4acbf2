"""Damage of a dump, as notes for the page, and the part that can still be read."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from megatron_flex.dump.reader import DamagedDump, OpenDump, open_damaged_dump
from megatron_flex.dump.reader.missing_parts import describe_gaps
from megatron_flex.dump.run_folders import DumpRun, count_part_bytes, list_runs, renamed_runs
from megatron_flex.dump.tools.dump_verification import DumpFinding, verify_dump
from megatron_flex.errors import DumpError
from megatron_flex.page.html_page import PageNote, damage_note, info_note

MAX_BYTES = 1 << 30  # maximum size of a dump to check every byte, which takes some seconds
MAX_NOTES = 24


class ReadableDump(NamedTuple):
    """The result of `open_readable`.

    Attributes:
        dump: the readable part; None if no manifest is readable.
        notes: the damage, `{"kind": "damage" | "info", "text"}`.
    """

    dump: OpenDump | None
    notes: list[PageNote]


def open_readable(dump: OpenDump | str | PathLike[str]) -> ReadableDump:
    """Open the readable part of a dump, and describe the damage.

    Args:
        dump: a dump's folder, or an opened dump.

    Returns:
        Of a good dump all of it, and no notes.

    Raises:
        DumpError: there is no dump at that path at all.
    """
    path = dump.path if isinstance(dump, OpenDump) else Path(dump)
    opened = dump if isinstance(dump, DamagedDump) else None
    if opened is None or opened.damage is None:
        runs = list_runs(path)
        large = count_part_bytes(runs) > MAX_BYTES
        damage = _find_by_names(runs) if large else _find_by_checksums(path)
        try:
            opened = opened or open_damaged_dump(path, check="blocks" if large else "first")
        except DumpError as error:
            return ReadableDump(
                None, _first_notes([f"{shorten_paths(str(error), path)}: it cannot be shown", *damage])
            )
        opened.damage = damage
    between = describe_gaps(opened.runs)
    return ReadableDump(opened, _first_notes(opened.damage or []) + ([info_note(between)] if between else []))


def shorten_paths(text: str, path: Path) -> str:
    """An error's text with paths relative to the dump's folder."""
    return text.replace(f"{path}/", "").replace(str(path), path.name or str(path))


def _find_by_checksums(path: Path) -> list[str]:
    return [shorten_paths(_describe_finding(f), path) for f in verify_dump(path).findings if f.error]


def _describe_finding(finding: DumpFinding) -> str:
    about = "" if finding.kind in ("incomplete", "missing") else f" ({finding.where})"
    return f"{finding.text}{about}"


def _find_by_names(runs: list[DumpRun]) -> list[str]:
    """Check manifests and file names, for a dump too large to read completely."""
    out = [renamed.text for renamed in renamed_runs(runs[0].folder.parent) if renamed.lost]
    for run in runs:
        if run.damage:
            out.append(f"run {run.number}: {shorten_paths(run.damage, run.folder.parent)}")
        elif run.contradiction:
            out.append(f"run {run.number}: {run.contradiction}")
        for stored in run.iterations:
            if missing := stored.missing():
                ranks = ", ".join(map(str, list(missing)[:8])) + (" and more" if len(missing) > 8 else "")
                out.append(
                    f"run {run.number}, iteration {stored.iteration}: parts of rank {ranks} are missing"
                )
    return out


def _first_notes(texts: list[str]) -> list[PageNote]:
    notes = [damage_note(text) for text in texts[:MAX_NOTES]]
    if len(texts) > MAX_NOTES:
        notes.append(damage_note(f"and {len(texts) - MAX_NOTES} more: `megatron-flex dump verify` lists all"))
    return notes
