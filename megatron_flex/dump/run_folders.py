"""The folders of a dump on disk: runs, iterations and parts, complete or not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_flex.dump.part_format import (
    WRITERS_LOCK,
    format_run_folder,
    parse_iteration_folder,
    parse_part_name,
)
from megatron_flex.dump.schema import MANIFEST_NAME, Manifest
from megatron_flex.errors import DumpError

RUN_NUMBER = re.compile(r"run-(\d{4,18})", re.ASCII)


@dataclass(slots=True)
class IterationFolder:
    """The folder of an iteration in a run.

    Attributes:
        path: the folder.
        number: of the iteration.
        run_of: the run of the schedule in the iteration, from 0.
        files: the parts' files by rank and number, with their sizes in bytes.
        closed: for each rank whose last part exists, the number of its parts.
        strays: files that are not parts: temporary files, and files of other origin.
    """

    path: Path
    number: int
    run_of: int
    files: dict[tuple[int, int], tuple[Path, int]] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    strays: list[tuple[Path, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes of all files in the folder."""
        return sum(n for _, n in self.files.values()) + sum(n for _, n in self.strays)

    def missing(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """The missing parts by rank.

        For a rank that has not closed the iteration, the next number represents all missing ones.
        """
        present: dict[int, set[int]] = {rank: set() for rank in ranks}
        for rank, part in self.files:
            if rank in present:
                present[rank].add(part)
        out = {}
        for rank, parts in present.items():
            count = self.closed.get(rank) or max(parts, default=-1) + 2
            if absent := set(range(count)) - parts:
                out[rank] = sorted(absent)
        return out


@dataclass(slots=True)
class RunFolder:
    """The folder of a run of the dump.

    Attributes:
        path: the folder.
        number: of the run.
        manifest: of the run; None if it cannot be read.
        damage: why the manifest cannot be read.
        iterations: in order.
        strays: files that belong to no iteration, except the manifest.
    """

    path: Path
    number: int
    manifest: Manifest | None
    damage: str
    iterations: list[IterationFolder]
    strays: list[tuple[Path, int]]

    @property
    def ranks(self) -> list[int]:
        """The ranks that write to the folder: those of the manifest, else those that have written a part."""
        if self.manifest is not None:
            return list(self.manifest.writers)
        return sorted({rank for folder in self.iterations for rank, _ in folder.files})


def list_run_folders(path: Path) -> list[RunFolder]:
    """List the runs of a dump, by number, including those without a manifest.

    Raises:
        DumpError: there is no dump.
    """
    numbered = run_paths(path)
    if not numbered:
        inside = RUN_NUMBER.fullmatch(path.resolve().name)
        fix = f"; name the folder that it is in: {path.resolve().parent}" if inside else ""
        fix = "".join(f"; {renamed.text}" for renamed in renamed_runs(path)) or fix
        raise DumpError(f"{path} is not a dump: it has no run-0000{fix}", path=path)
    return [_list_run_folder(number, folder) for number, folder in numbered]


def run_paths(path: Path) -> list[tuple[int, Path]]:
    """Return the folders that have the name of a run, by number, without reading their contents.

    Raises:
        DumpError: the folder cannot be read.
    """
    try:
        return sorted((n, f) for f in path.iterdir() if (n := _number(f.name)) is not None and f.is_dir())
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error


def _number(name: str) -> int | None:
    """The number of a run by the name of its folder, which has one spelling."""
    matched = RUN_NUMBER.fullmatch(name)
    return int(matched[1]) if matched is not None and format_run_folder(int(matched[1])) == name else None


@dataclass(frozen=True, slots=True)
class Renamed:
    """The folder of a run under a name that is not its own.

    Attributes:
        path: the folder.
        text: what it is, and what to do.
        lost: whether the run is not in the dump under its own name either.
    """

    path: Path
    text: str
    lost: bool


def renamed_runs(path: Path) -> list[Renamed]:
    """Folders beside the runs that have a run's manifest; those whose name begins with a dot are drafts.

    Raises:
        DumpError: the folder cannot be read.
    """
    numbers = {number for number, _ in run_paths(path)}
    out = []
    for folder in sorted(path.iterdir()):
        if folder.name.startswith(".") or _number(folder.name) is not None:
            continue
        if not (folder / MANIFEST_NAME).is_file():
            continue
        try:
            number = Manifest.read(folder).run
        except DumpError as error:
            if folder.name.startswith("run-"):
                out.append(Renamed(folder, f"{folder.name} is not the name of a run, and {error}", True))
            continue  # else somebody else's folder
        lost = number not in numbers
        fix = f"name it {format_run_folder(number)}" if lost else f"{format_run_folder(number)} exists, too"
        text = f"{folder.name} is run {number} under another name, and is not read: {fix}"
        out.append(Renamed(folder, text, lost))
    return out


def has_parts(path: Path) -> bool:
    """Return whether any iteration in the folder of a run has a part.

    Raises:
        DumpError: the folder cannot be read.
    """
    try:
        inside = [f for f in os.scandir(path) if parse_iteration_folder(f.name) is not None and f.is_dir()]
        return any(parse_part_name(name) is not None for f in inside for name in os.listdir(f))
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error


def _list_run_folder(number: int, path: Path) -> RunFolder:
    manifest, damage = None, ""
    try:
        manifest = Manifest.read(path)
    except DumpError as error:
        damage = str(error)
    run = RunFolder(path, number, manifest, damage, [], [])
    for item, nbytes in _list_files(path):
        named = parse_iteration_folder(item.name)
        if named is not None and item.is_dir():
            run.iterations.append(list_iteration_folder(item, *named))
        elif item.name not in (MANIFEST_NAME, WRITERS_LOCK):
            run.strays.append((item, nbytes))
    run.iterations.sort(key=lambda f: (f.number, f.run_of))
    return run


def list_iteration_folder(path: Path, number: int, run_of: int) -> IterationFolder:
    """List the contents of the folder of an iteration."""
    folder = IterationFolder(path, number, run_of)
    for item, nbytes in _list_files(path):
        if (named := parse_part_name(item.name)) is not None and item.is_file():
            rank, part, parts = named
            folder.files[rank, part] = item, nbytes
            if parts:
                folder.closed[rank] = parts
        else:
            folder.strays.append((item, nbytes))
    return folder


def _list_files(path: Path) -> Iterator[tuple[Path, int]]:
    """List the files of a folder, with their sizes in bytes; a file that disappears meanwhile is left out."""
    try:
        items = sorted(path.iterdir())
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
    for item in items:
        try:
            yield item, item.stat().st_size
        except FileNotFoundError:
            continue


def count_part_bytes(runs: list[RunFolder]) -> int:
    """Bytes of all parts."""
    return sum(n for run in runs for folder in run.iterations for _, n in folder.files.values())


def is_temporary(path: Path) -> bool:
    """Return whether a file is one that a writer did not finish."""
    return path.is_file() and path.name.endswith(".tmp")


def map_stages(manifest: Manifest | None) -> Mapping[str, int]:
    """The stage of each site and parameter."""
    if manifest is None:
        return {}
    return {record.name: record.stage for record in (*manifest.sites, *manifest.parameters)}
