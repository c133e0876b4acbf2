"""What lies in a dump's folder: runs, and which of their iterations are whole; names of files tell it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_flex.dump.part_format import format_iteration_folder, parse_iteration_folder, format_part_name, list_complete_parts
from megatron_flex.dump.manifest import Manifest
from megatron_flex.errors import DumpError

REPLICA_AXIS, STAGE_AXIS = "dp", "pp"  # the axes along which ranks hold other samples, and other sites


class DumpRun:
    """A run of a dump: its manifest, and who was where.

    Attributes:
        folder: of the run.
        manifest: what it says of itself.
        sizes: the mesh.
        coords: of each rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.sizes: Mapping[str, int] = self.manifest.sizes
        self.coords: Mapping[int, Mapping[str, int]] = dict(self.manifest.ranks)
        self._at: dict[tuple[int, int], list[int]] = {}
        for rank, coords in self.coords.items():
            self._at.setdefault((coords.get(STAGE_AXIS, 0), coords.get(REPLICA_AXIS, 0)), []).append(rank)

    def ranks(self, stage: int, replica: int) -> list[int]:
        """The ranks of a pipeline stage of a data parallel replica."""
        return self._at.get((stage, replica), [])

    @cached_property
    def replicas(self) -> list[int]:
        """The data parallel replicas, in order."""
        return sorted({replica for _, replica in self._at})

    @cached_property
    def stages(self) -> list[int]:
        """The pipeline stages, in order."""
        return sorted({stage for stage, _ in self._at})

    @cached_property
    def folders(self) -> list[tuple[int, int]]:
        """The iterations that have a folder, whole or not: number, and which run of the schedule."""
        try:
            found = [parse_iteration_folder(entry.name) for entry in os.scandir(self.folder) if entry.is_dir()]
        except OSError as error:
            raise DumpError(f"{self.folder}: cannot be read: {error.strerror or error}") from error
        return sorted(f for f in found if f is not None)

    def written(self, iteration: int, run_of: int, like: StoredIteration | None = None) -> StoredIteration | None:
        """What ranks wrote of an iteration; None unless it is whole.

        Args:
            iteration: its number.
            run_of: which run of the schedule in it.
            like: another iteration, whose numbers of parts are shared if they are the same.
        """
        folder = self.folder / format_iteration_folder(iteration, run_of)
        try:
            parts = list_complete_parts(folder, list(self.coords))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DumpError(f"{folder}: cannot be read: {error.strerror or error}") from error
        if parts is None:
            return None
        counts = {rank: len(paths) for rank, paths in parts.items()}
        return StoredIteration(self, iteration, run_of, folder, like.parts if like and like.parts == counts else counts)


@dataclass(frozen=True, slots=True)
class StoredIteration:
    """A whole iteration.

    Attributes:
        run: that wrote it.
        iteration: its number.
        run_of: which run of the schedule in it.
        folder: where it is.
        parts: how many parts each rank has.
    """

    run: DumpRun
    iteration: int
    run_of: int
    folder: Path
    parts: Mapping[int, int]

    def paths(self, rank: int) -> Iterable[Path]:
        """The parts of a rank, in order."""
        count = self.parts[rank]
        for part in range(count):
            yield self.folder / format_part_name(rank, part, count if part == count - 1 else 0)

    def describe(self) -> str:
        """The iteration in words."""
        return f"iteration {self.iteration}" + (f", pass {self.run_of}" if self.run_of else "")


def read_runs(path: Path) -> list[DumpRun]:
    """The runs of a dump, in order.

    Raises:
        DumpError: the folder is no dump, or a manifest is damaged.
    """
    try:
        found = sorted((f for f in path.iterdir() if f.name.startswith("run-")), key=_number)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    runs = [DumpRun(f) for f in found if (f / "manifest.json").exists()]
    if not runs:
        raise DumpError(f"{path} has no run of a dump in it; name the folder that mf.Dump was given")
    return runs


def _number(folder: Path) -> int:
    number = folder.name.removeprefix("run-")
    return int(number) if number.isdecimal() and len(number) < 19 else -1
