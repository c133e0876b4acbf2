"""The runs of a dump as readers see them: manifests, coordinates of ranks, complete iterations."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from megatron_flex.dump.part_format import (
    format_iteration_folder,
    format_part_name,
    format_run_folder,
    list_complete_parts,
    parse_iteration_folder,
)
from megatron_flex.dump.run_folders import has_parts, renamed_runs, run_paths
from megatron_flex.dump.schema import MANIFEST_NAME, Manifest
from megatron_flex.errors import DumpError, FlexWarning

IterationKey = tuple[int, int]  # the number of an iteration, and which run of the schedule in it


REPLICA_AXIS, STAGE_AXIS = "dp", "pp"  # the axes along which ranks hold other samples, and other sites


class DumpRun:
    """A run of a dump: its manifest, and who was where.

    Attributes:
        folder: of the run.
        manifest: of the run.
        sizes: the mesh.
        coords: of each rank that writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.sizes: Mapping[str, int] = self.manifest.sizes
        self.coords: Mapping[int, Mapping[str, int]] = self.manifest.writers
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
        """The iterations that have a folder, complete or not: number, and which run of the schedule."""
        try:
            parsed = [
                parse_iteration_folder(entry.name) for entry in os.scandir(self.folder) if entry.is_dir()
            ]
        except OSError as error:
            raise DumpError(
                f"{self.folder}: cannot be read: {error.strerror or error}", path=self.folder
            ) from error
        return sorted(f for f in parsed if f is not None)

    def stored_iteration(
        self, iteration: int, run_of: int, like: StoredIteration | None = None
    ) -> StoredIteration | None:
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
            raise DumpError(f"{folder}: cannot be read: {error.strerror or error}", path=folder) from error
        if parts is None:
            return None
        counts = {rank: len(paths) for rank, paths in parts.items()}
        return StoredIteration(
            self, iteration, run_of, folder, like.parts if like and like.parts == counts else counts
        )


@dataclass(frozen=True, slots=True)
class StoredIteration:
    """A complete iteration.

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
        return _list_part_paths(self.folder, rank, self.parts[rank])

    def describe(self) -> str:
        """The iteration in words."""
        return f"iteration {self.iteration}" + (f", pass {self.run_of}" if self.run_of else "")


@lru_cache(1 << 12)
def _list_part_paths(folder: Path, rank: int, count: int) -> tuple[Path, ...]:
    """The parts of a rank. Each tensor that is read asks for them; a path is slow to make and to hash."""
    return tuple(
        folder / format_part_name(rank, part, count if part == count - 1 else 0) for part in range(count)
    )


def read_runs(path: Path) -> list[DumpRun]:
    """The runs of a dump, in order. A folder of a run without a manifest and without a part is left out.

    Raises:
        DumpError: the folder is not a dump; a manifest is damaged or missing; a run's folder was renamed.
    """
    numbered = run_paths(path)
    for renamed in renamed_runs(path):
        if renamed.lost:
            raise DumpError(f"{path}: {renamed.text}, or move it out of the dump", path=path)
    runs = []
    for number, folder in numbered:
        if (folder / MANIFEST_NAME).exists():
            run = DumpRun(folder)
            if run.manifest.run != number:
                fix = f"name it {format_run_folder(run.manifest.run)}, or move it out of the dump"
                raise DumpError(
                    f"{folder / MANIFEST_NAME}: it is of run {run.manifest.run}: {fix}",
                    path=folder / MANIFEST_NAME,
                )
            runs.append(run)
        elif has_parts(folder):
            raise DumpError(
                f"{folder / MANIFEST_NAME} is missing, but the run has iterations: restore it, or move "
                f"{folder.name} out of the dump; megatron_flex.dump.reader.open_damaged_dump reads the "
                "other runs",
                path=folder / MANIFEST_NAME,
            )
        else:
            text = f"{folder} is left out: it has neither a manifest nor a part of an iteration"
            warnings.warn(f"{text}; `megatron-flex dump prune` removes it", FlexWarning, 4)
    if not runs:
        raise DumpError(
            f"{path} has no run of a dump in it; name the folder that mf.Dump was given", path=path
        )
    return runs
