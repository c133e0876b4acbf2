"""What lies in a dump's folder, run by run, whole or not: what `ls`, `verify` and `prune` start from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_flex.dump.part_format import MANIFEST_NAME, parse_iteration_folder, parse_part_name
from megatron_flex.dump.manifest import Manifest
from megatron_flex.errors import DumpError

RUN_NUMBER = re.compile(r"run-(\d{4,})", re.ASCII)


@dataclass(slots=True)
class IterationFolder:
    """The folder of an iteration in a run.

    Attributes:
        path: the folder.
        number: of the iteration.
        run_of: which run of the schedule in it.
        files: the parts' files by rank and number, with their bytes.
        closed: for each rank whose last part is there how many it has.
        strays: what is no part: temporary files, and what somebody put there.
    """

    path: Path
    number: int
    run_of: int
    files: dict[tuple[int, int], tuple[Path, int]] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    strays: list[tuple[Path, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is in it."""
        return sum(n for _, n in self.files.values()) + sum(n for _, n in self.strays)

    def missing(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """By rank the parts that are not there.

        Where a rank has not closed the iteration, the next number stands for all others.
        """
        present: dict[int, set[int]] = {rank: set() for rank in ranks}
        for rank, part in self.files:
            if rank in present:
                present[rank].add(part)
        out = {}
        for rank, seen in present.items():
            count = self.closed.get(rank) or max(seen, default=-1) + 2
            if absent := set(range(count)) - seen:
                out[rank] = sorted(absent)
        return out


@dataclass(slots=True)
class RunFolder:
    """A run of the dump, as it lies there.

    Attributes:
        path: the folder.
        number: of the run.
        manifest: what the run says of itself; None where that cannot be read.
        damage: why it cannot.
        iterations: in order.
        strays: what belongs to no iteration, and is not the manifest.
    """

    path: Path
    number: int
    manifest: Manifest | None
    damage: str
    iterations: list[IterationFolder]
    strays: list[tuple[Path, int]]

    @property
    def ranks(self) -> list[int]:
        """Who writes to it: as the manifest says, else who has left a part."""
        if self.manifest is not None:
            return [rank for rank, _ in self.manifest.ranks]
        return sorted({rank for folder in self.iterations for rank, _ in folder.files})


def list_run_folders(path: Path) -> list[RunFolder]:
    """The runs of a dump, by number; also those that have no manifest.

    Raises:
        DumpError: there is no dump.
    """
    try:
        found = sorted((int(m[1]), f) for f in path.iterdir() if (m := RUN_NUMBER.fullmatch(f.name)) and f.is_dir())
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not found:
        inside = RUN_NUMBER.fullmatch(path.resolve().name)
        fix = f"; name the folder that it is in: {path.resolve().parent}" if inside else ""
        raise DumpError(f"{path} is no dump: no run-0000 is in it{fix}")
    return [_list_run_folder(number, folder) for number, folder in found]


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
        elif item.name != MANIFEST_NAME:
            run.strays.append((item, nbytes))
    run.iterations.sort(key=lambda f: (f.number, f.run_of))
    return run


def list_iteration_folder(path: Path, number: int, run_of: int) -> IterationFolder:
    """What lies in the folder of an iteration."""
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
    """What is in a folder, with its bytes; a file that goes away meanwhile is not there."""
    try:
        items = sorted(path.iterdir())
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    for item in items:
        try:
            yield item, item.stat().st_size
        except FileNotFoundError:
            continue


def count_part_bytes(runs: list[RunFolder]) -> int:
    """Bytes of all parts."""
    return sum(n for run in runs for folder in run.iterations for _, n in folder.files.values())


def is_temporary(path: Path) -> bool:
    """Whether a file is one that a writer had begun and not finished."""
    return path.is_file() and path.name.endswith(".tmp")


def map_stages(manifest: Manifest | None) -> Mapping[str, int]:
    """The stage of each site and parameter."""
    if manifest is None:
        return {}
    return {place.name: place.stage for place in (*manifest.sites, *manifest.parameters)}
