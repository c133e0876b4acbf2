"""What is left of a damaged dump: all that can be read where runs, iterations or ranks are gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megatron_flex.dump.reader.dump_reader import OpenDump
from megatron_flex.dump.reader.shard_files import ChecksumPolicy, LocatedShard, PartFiles
from megatron_flex.dump.run_folders import DumpRun, IterationKey, StoredIteration, list_runs
from megatron_flex.errors import DumpError


@dataclass(frozen=True, slots=True)
class IncompleteIteration(StoredIteration):
    """An iteration of which some parts may be gone.

    Attributes:
        opened: the files of the dump, with the headers that were read.
    """

    opened: PartFiles

    def paths(self, rank: int) -> Iterable[Path]:
        """The parts of a rank whose headers can be read, in order."""
        for path in StoredIteration.paths(self, rank):
            try:
                self.opened.open(path)
            except DumpError:
                continue  # `verify` reports it; what was in it is missing where it is read
            yield path

    def lacks_parts(self, ranks: Iterable[int]) -> bool:
        """Whether a part of these ranks is gone, or its header cannot be read."""
        missing = self.missing()
        return any(r in missing or len(list(self.paths(r))) < len(self.parts[r]) for r in ranks)


class DamagedDump(OpenDump):
    """A dump opened without asking that it be whole: a tensor is read if all of its own shards are there.

    Attributes:
        damage: the damage that was found, one line each; None until the dump was checked.
    """

    damage: list[str] | None = None
    _warns = False

    def _list_runs(self) -> list[DumpRun]:
        readable = [run for run in list_runs(self.path) if not run.damage]
        if not readable:
            raise DumpError(f"{self.path}: no run of it has a manifest that can be read", path=self.path)
        return readable

    def _find_complete(self, which: IterationKey) -> StoredIteration | None:
        """An iteration of the last run that has it complete; else of the one that has most of its parts."""
        if which not in self._written:
            scanned = [self._scan(run, which) for run in reversed(self.runs)]
            several = [stored for stored in scanned if stored is not None]
            best = next((stored for stored in several if stored.complete), None)
            most = max(several, key=lambda stored: sum(map(len, stored.parts.values())), default=None)
            self._written[which] = best or most
        return self._written[which]

    def _scan(self, run: DumpRun, which: IterationKey) -> IncompleteIteration | None:
        """The parts that a run's own ranks have of an iteration; None if they have none."""
        stored = run.iteration(which)
        parts = {} if stored is None else {r: stored.parts[r] for r in run.coords if r in stored.parts}
        if stored is None or not parts:
            return None
        return IncompleteIteration(run, *which, stored.folder, parts, stored.strays, self.files)

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
