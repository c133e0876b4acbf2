"""The runs of a dump on disk: their manifests, and their iterations, complete or not.

Readers, verification, pruning, listings, and writers that look for earlier runs all see a dump through
`DumpRun` and `StoredIteration`. An iteration is complete if each rank that writes has closed it: the rank's
last part exists, whose name says how many there are, and all parts before it. Names decide, not contents.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_flex.dump.file_names import (
    MANIFEST_NAME,
    WRITERS_LOCK,
    format_iteration_folder,
    format_part_name,
    format_run_folder,
    parse_iteration_folder,
    parse_part_name,
    parse_run_folder,
)
from megatron_flex.dump.schema import Manifest
from megatron_flex.errors import DumpError, FlexWarning

IterationKey = tuple[int, int]  # the number of an iteration, and which run of the schedule in it
PartNumber = tuple[int, int]  # of a part, from 0; and in the last part how many there are, else 0
RankParts = Mapping[int, tuple[PartNumber, ...]]  # the parts of each rank, in order

REPLICA_AXIS, STAGE_AXIS = "dp", "pp"  # the axes along which ranks hold other samples, and other sites


@dataclass(frozen=True, slots=True)
class StoredIteration:
    """An iteration in the folder of a run, by the names of its files.

    Attributes:
        run: that wrote it.
        iteration: its number.
        run_of: which run of the schedule in it, from 0.
        folder: where it is.
        parts: the parts that exist, by rank.
        strays: files that are not parts: drafts, and files of other origin.
    """

    run: DumpRun
    iteration: int
    run_of: int
    folder: Path
    parts: RankParts
    strays: tuple[Path, ...]

    @property
    def key(self) -> IterationKey:
        """The number, and which run of the schedule."""
        return self.iteration, self.run_of

    @property
    def complete(self) -> bool:
        """Whether no part is missing of the ranks that the manifest names; False without a manifest."""
        return not self.run.damage and not self.missing()

    def missing(self) -> dict[int, list[int]]:
        """The missing parts by rank; of a rank that has not closed the iteration the next number, for all."""
        return find_missing_parts(self.parts, self.run.writers)

    def is_closed(self, rank: int) -> bool:
        """Whether the last part of a rank exists."""
        return any(count for _, count in self.parts.get(rank, ()))

    def paths(self, rank: int) -> Iterable[Path]:
        """The parts of a rank, in order."""
        return _list_part_paths(self.folder, rank, self.parts.get(rank, ()))

    def files(self) -> Iterator[tuple[int, int, Path]]:
        """Rank, number and file of each part, also of ranks that the manifest does not have."""
        for rank, parts in self.parts.items():
            for number, count in parts:
                yield rank, number, self.folder / format_part_name(rank, number, count)

    def describe(self) -> str:
        return describe_iteration(self.key)

    def count_bytes(self) -> int:
        """The bytes of all files in the folder."""
        return count_file_bytes([*(path for _, _, path in self.files()), *self.strays])


@lru_cache(1 << 12)
def _list_part_paths(folder: Path, rank: int, parts: Sequence[PartNumber]) -> tuple[Path, ...]:
    """The parts of a rank. Each tensor that is read asks for them; a path is slow to make and to hash."""
    return tuple(folder / format_part_name(rank, number, count) for number, count in parts)


def list_parts(folder: Path) -> tuple[dict[int, tuple[PartNumber, ...]], tuple[Path, ...]]:
    """The parts in the folder of an iteration by rank, and other files. Raises OSError."""
    numbers: dict[int, dict[int, int]] = {}
    strays = []
    for name in os.listdir(folder):
        if (parsed := parse_part_name(name)) is None:
            strays.append(folder / name)
        else:
            rank, number, count = parsed
            of_rank = numbers.setdefault(rank, {})
            of_rank[number] = max(count, of_rank.get(number, 0))
    return {rank: tuple(sorted(numbers[rank].items())) for rank in sorted(numbers)}, tuple(sorted(strays))


def find_missing_parts(parts: RankParts, ranks: Iterable[int]) -> dict[int, list[int]]:
    """The numbers of the parts that ranks lack; the next one where a rank's latest part is not its last."""
    out = {}
    for rank in ranks:
        numbers = {number for number, _ in parts.get(rank, ())}
        closed, latest = max((count for _, count in parts.get(rank, ())), default=0), max(numbers, default=-1)
        if absent := set(range(closed if closed > latest >= 0 else latest + 2)) - numbers:
            out[rank] = sorted(absent)
    return out


class MissingParts(NamedTuple):
    """The parts of an iteration that a rank lacks.

    Attributes:
        stored: the iteration.
        rank: the rank.
        numbers: of the parts.
        stopped: whether the rank wrote nothing after them: it was killed, or is still writing. Else they are
            lost, for a rank closes an iteration before it begins the next.
    """

    stored: StoredIteration
    rank: int
    numbers: Sequence[int]
    stopped: bool


def list_missing_parts(iterations: Iterable[StoredIteration]) -> Iterator[MissingParts]:
    """The missing parts of iterations of one run, in order; the last iterations of the run are among them."""
    several = list(iterations)
    latest = {rank: stored.key for stored in several for rank in stored.parts}
    for stored in several:
        for rank, numbers in stored.missing().items():
            stopped = not stored.is_closed(rank) and latest.get(rank, stored.key) <= stored.key
            yield MissingParts(stored, rank, numbers, stopped)


def describe_iteration(key: IterationKey) -> str:
    return f"iteration {key[0]}" + (f", pass {key[1]}" if key[1] else "")


class DumpRun:
    """A run of a dump: its manifest, its iterations, and which ranks wrote what. Each is read when asked for.

    Args:
        folder: of the run.
        number: of the run, by the folder's name.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    # -- the manifest

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Raises DumpError if it cannot be read."""
        return Manifest.read(self.folder)

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest, damaged or not."""
        return (self.folder / MANIFEST_NAME).exists()

    @cached_property
    def damage(self) -> str:
        """Why the manifest cannot be read; empty if it can be."""
        try:
            self.manifest  # noqa: B018 - reading it is the test
        except DumpError as error:
            return str(error)
        return ""

    @property
    def contradiction(self) -> str:
        """The number in the manifest if it is not the folder's, and what to do; else empty."""
        number = self.manifest.run
        fix = f"name the folder {format_run_folder(number)}"
        return "" if number == self.number else f"its manifest is of run {number}: {fix}"

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The mesh."""
        return self.manifest.sizes

    @cached_property
    def coords(self) -> Mapping[int, Mapping[str, int]]:
        """The coordinates of each rank that writes."""
        return self.manifest.writers

    @cached_property
    def writers(self) -> list[int]:
        """The ranks that write: those of the manifest; without one those that have written a part."""
        if not self.damage:
            return list(self.coords)
        return sorted({rank for stored in self.iterations for rank in stored.parts})

    @cached_property
    def stage_ranks(self) -> dict[tuple[int, int], list[int]]:
        """The ranks by pipeline stage and data parallel replica."""
        out: dict[tuple[int, int], list[int]] = {}
        for rank, coords in self.coords.items():
            out.setdefault((coords.get(STAGE_AXIS, 0), coords.get(REPLICA_AXIS, 0)), []).append(rank)
        return out

    def ranks(self, stage: int, replica: int) -> list[int]:
        """The ranks of a pipeline stage of a data parallel replica."""
        return self.stage_ranks.get((stage, replica), [])

    @cached_property
    def replicas(self) -> list[int]:
        """The data parallel replicas, in order."""
        return sorted({replica for _, replica in self.stage_ranks})

    @cached_property
    def stages(self) -> list[int]:
        """The pipeline stages, in order."""
        return sorted({stage for stage, _ in self.stage_ranks})

    # -- the folder

    @cached_property
    def _contents(self) -> tuple[list[IterationKey], list[Path]]:
        keys, strays = [], []
        try:
            for entry in os.scandir(self.folder):
                key = parse_iteration_folder(entry.name)
                if key is not None and entry.is_dir():
                    keys.append(key)
                elif entry.name not in (MANIFEST_NAME, WRITERS_LOCK):
                    strays.append(self.folder / entry.name)
        except OSError as error:
            raise _make_read_error(self.folder, error) from error
        return sorted(keys), sorted(strays)

    @property
    def iteration_keys(self) -> list[IterationKey]:
        """The iterations that have a folder, complete or not."""
        return self._contents[0]

    @property
    def strays(self) -> list[Path]:
        """Files that belong to no iteration, except the manifest and the lock."""
        return self._contents[1]

    @cached_property
    def iterations(self) -> list[StoredIteration]:
        """The iterations that have a folder, with their files."""
        return [stored for key in self.iteration_keys if (stored := self.iteration(key)) is not None]

    def iteration(self, key: IterationKey, like: StoredIteration | None = None) -> StoredIteration | None:
        """An iteration as it is now; None if it has no folder.

        Args:
            key: its number, and which run of the schedule in it.
            like: another iteration, whose `parts` are shared if they are the same.

        Raises:
            DumpError: the folder cannot be read.
        """
        folder = self.folder / format_iteration_folder(*key)
        try:
            parts, strays = list_parts(folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _make_read_error(folder, error) from error
        shared = like.parts if like is not None and like.parts == parts else parts
        return StoredIteration(self, *key, folder, shared, strays)

    def complete_iteration(
        self, key: IterationKey, like: StoredIteration | None = None
    ) -> StoredIteration | None:
        """An iteration as `iteration` returns it; None unless it is complete."""
        stored = self.iteration(key, like)
        return stored if stored is not None and stored.complete else None


def scan_runs(path: Path) -> list[DumpRun]:
    """The folders that have the name of a run, by number, with a manifest or without.

    Raises:
        DumpError: the folder cannot be read.
    """
    try:
        numbered = sorted((n, f) for f in path.iterdir() if (n := parse_run_folder(f.name)) is not None)
    except OSError as error:
        raise _make_read_error(path, error) from error
    return [DumpRun(folder, number) for number, folder in numbered if folder.is_dir()]


def has_runs(path: Path) -> bool:
    """Whether a path is a folder with a run. Raises DumpError if the folder cannot be read."""
    return path.is_dir() and bool(scan_runs(path))


def list_runs(path: Path) -> list[DumpRun]:
    """List the runs of a dump, by number, including those without a manifest.

    Raises:
        DumpError: the path has no dump.
    """
    runs = scan_runs(path)
    if not runs:
        inside = path.resolve()
        is_run = parse_run_folder(inside.name) is not None
        fix = f"; name the folder that it is in: {inside.parent}" if is_run else ""
        fix = "".join(f"; {renamed.text}" for renamed in renamed_runs(path)) or fix
        raise DumpError(f"{path} is not a dump: it has no run-0000{fix}", path=path)
    return runs


def read_runs(path: Path) -> list[DumpRun]:
    """The runs of an undamaged dump. A folder of a run without a manifest and without a part is left out.

    Raises:
        DumpError: the folder is not a dump; a manifest is damaged or missing; a run's folder was renamed.
    """
    scanned = scan_runs(path)
    for renamed in renamed_runs(path):
        if renamed.lost:
            raise DumpError(f"{path}: {renamed.text}, or move it out of the dump", path=path)
    runs = []
    for run in scanned:
        manifest = run.folder / MANIFEST_NAME
        if run.has_manifest:
            if run.contradiction:
                text = f"{run.folder}: {run.contradiction}, or move it out of the dump"
                raise DumpError(text, path=manifest)
            runs.append(run)
        elif any(stored.parts for stored in run.iterations):
            raise DumpError(
                f"{manifest} is missing, but the run has iterations: restore it, or move "
                f"{run.folder.name} out of the dump; megatron_flex.dump.reader.open_damaged_dump reads the "
                "other runs",
                path=manifest,
            )
        else:
            text = f"{run.folder} is left out: it has neither a manifest nor a part of an iteration"
            warnings.warn(f"{text}; `megatron-flex dump prune` removes it", FlexWarning, 5)
    if not runs:
        raise DumpError(
            f"{path} has no run of a dump in it; name the folder that mf.Dump was given", path=path
        )
    return runs


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
    numbers = {run.number for run in scan_runs(path)}
    out = []
    for folder in sorted(path.iterdir()):
        if folder.name.startswith(".") or parse_run_folder(folder.name) is not None:
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


def count_file_bytes(paths: Iterable[Path]) -> int:
    """The bytes of files; a file that disappears meanwhile has none."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def count_part_bytes(runs: Iterable[DumpRun]) -> int:
    files = (path for run in runs for stored in run.iterations for _, _, path in stored.files())
    return count_file_bytes(files)


def _make_read_error(path: Path, error: OSError) -> DumpError:
    return DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path)
