"""What is left of a damaged dump: all that can be read where runs, iterations or ranks are gone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megatron_flex.dump.part_format import format_iteration_folder, parse_part_name
from megatron_flex.dump.reader.dump_reader import OpenDump
from megatron_flex.dump.reader.shard_files import ChecksumPolicy, LocatedShard, PartFiles
from megatron_flex.dump.reader.stored_runs import DumpRun, IterationKey, StoredIteration
from megatron_flex.dump.run_folders import list_run_folders
from megatron_flex.errors import DumpError
from megatron_flex.ranges import normalize_path


@dataclass(frozen=True, slots=True)
class IncompleteIteration(StoredIteration):
    """An iteration of which some parts may be gone.

    Attributes:
        files: that open them.
        there: the parts of each rank that are.
        complete: the ranks of which by the names of files no part is gone.
    """

    files: PartFiles
    there: Mapping[int, tuple[Path, ...]]
    complete: frozenset[int]

    def paths(self, rank: int) -> Iterable[Path]:
        """The parts of a rank whose headers can be read, in order."""
        for path in self.there.get(rank, ()):
            try:
                self.files.open(path)
            except DumpError:
                continue  # `verify` tells of it; what was in it is found missing where it is read
            yield path

    def lacks_parts(self, ranks: Iterable[int]) -> bool:
        """Whether a part of these ranks is gone, or its header cannot be read."""
        return any(r not in self.complete or len(list(self.paths(r))) < len(self.there[r]) for r in ranks)


class IncompleteRun(DumpRun):
    """A run of which iterations are given out that are not whole."""

    def __init__(self, folder: Path, files: PartFiles) -> None:
        super().__init__(folder)
        self.files = files

    def stored_iteration(
        self, iteration: int, run_of: int, like: StoredIteration | None = None
    ) -> IncompleteIteration | None:
        """What is left of an iteration; None of nothing."""
        complete = super().stored_iteration(iteration, run_of, like)
        folder = self.folder / format_iteration_folder(iteration, run_of)
        if complete is not None:
            paths_by_rank = {rank: tuple(complete.paths(rank)) for rank in complete.parts}
            return IncompleteIteration(
                self,
                iteration,
                run_of,
                folder,
                complete.parts,
                self.files,
                paths_by_rank,
                frozenset(paths_by_rank),
            )
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return None
        present: dict[int, list[Path]] = {}
        count: dict[int, int] = {}  # of the parts that there were, which the last one's name says
        for name in names:
            named = parse_part_name(name)
            if named is not None and named[0] in self.coords:
                present.setdefault(named[0], []).append(folder / name)
                count[named[0]] = max(named[2], count.get(named[0], 0))
        if not present:
            return None
        parts = {rank: len(paths) for rank, paths in present.items()}
        paths_by_rank = {rank: tuple(paths) for rank, paths in present.items()}
        good = frozenset(rank for rank, number in parts.items() if number == count[rank])
        return IncompleteIteration(self, iteration, run_of, folder, parts, self.files, paths_by_rank, good)


class DamagedDump(OpenDump):
    """A dump opened without asking that it be whole: a tensor is read if all of its own shards are there.

    Attributes:
        damage: the damage that was found, one line each; None until the dump was checked.
    """

    damage: list[str] | None = None
    _warns = False

    def __init__(self, path: str | PathLike[str], *, check: ChecksumPolicy = "blocks") -> None:
        self.path, self.check = Path(normalize_path("path", path)), check
        self.files = PartFiles(check)
        folders = [f for f in list_run_folders(self.path) if f.manifest is not None]
        if not folders:
            raise DumpError(f"{self.path}: no run of it has a manifest that can be read", path=self.path)
        self.runs = [IncompleteRun(f.path, self.files) for f in folders]
        self._written = {}

    def _look(self, which: IterationKey) -> StoredIteration | None:
        """An iteration of the last run that has it complete; else of the one that has most of its parts."""
        if which not in self._written:
            several = [
                rest
                for run in reversed(self.runs)
                if isinstance(rest := run.stored_iteration(*which), IncompleteIteration)
            ]
            best = next((rest for rest in several if rest.complete.issuperset(rest.run.coords)), None)
            most = max(several, key=lambda rest: sum(rest.parts.values()), default=None)
            self._written[which] = best or most
        return self._written[which]

    def has_gradients(self, which: IterationKey) -> bool:
        """Whether an iteration has gradients, by the first part that can be read."""
        written = self.stored_iteration(which)
        paths = (path for rank in written.run.coords for path in written.paths(rank))
        first = next(paths, None)
        return first is not None and self.files.open(first).part.index.training

    def entries(
        self, written: StoredIteration, site: str, kind: str, stage: int, replica: int
    ) -> list[LocatedShard]:
        """The remaining shards of a site that the ranks of a stage of a replica wrote.

        Raises:
            DumpError: rows of experts, of an iteration that lost some: the lost ones would read as zeros.
        """
        located = super().entries(written, site, kind, stage, replica)
        routed = any(entry.route is not None for _, entry, _, _ in located)
        if routed and isinstance(written, IncompleteIteration) and written.lacks_parts(written.run.coords):
            raise DumpError(
                f"{site}: {written.describe()} is incomplete, and rows of experts are read of whole ones only"
            )
        return located

    def missing_activation_error(self, name: str, written: StoredIteration, stage: int) -> DumpError:
        """The error where an iteration has nothing of a site: the lost parts may have had the site."""
        ranks = [r for replica in written.run.replicas for r in written.run.ranks(stage, replica)]
        if isinstance(written, IncompleteIteration) and written.lacks_parts(ranks):
            named = written.describe()
            return DumpError(f"{name}: {named} is incomplete, and no part with this hook point is left")
        return super().missing_activation_error(name, written, stage)


def open_damaged_dump(path: str | PathLike[str], *, check: ChecksumPolicy = "blocks") -> DamagedDump:
    """Open what is left of a damaged dump; of a good one all.

    Runs whose manifest cannot be read are left out. An incomplete iteration is included: each of its
    tensors is read if all of its own shards are, and raises else.

    Args:
        path: the folder that `Dump` was given.
        check: as for `open_dump`.

    Raises:
        DumpError: there is no dump, or no run of it has a manifest that can be read.
    """
    return DamagedDump(path, check=check)
