"""`open_dump`: read a dump as full tensors, without Megatron and without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.reader.array_sources import ActivationSource, ParameterSource
from megatron_flex.dump.reader.dump_array import DumpArray
from megatron_flex.dump.reader.missing_parts import MOST_DETAILED, lost, missing
from megatron_flex.dump.reader.sample_plan import StoredTensorKey
from megatron_flex.dump.reader.shard_files import MOST_OPEN_FILES, ChecksumPolicy, LocatedShard, PartFiles
from megatron_flex.dump.reader.stored_runs import DumpRun, IterationKey, StoredIteration, read_runs
from megatron_flex.dump.reader.token_rows import ShuffledRows, TokenRows
from megatron_flex.dump.schema import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE, Manifest, SiteRecord
from megatron_flex.errors import DumpError, FlexWarning, suggest_nearest
from megatron_flex.sites import GRADIENT_SUFFIX

ExecutionTurn = tuple[int, int, int]  # microbatch, call, and the turn on the rank


def sort_by_execution(
    files: PartFiles, written: StoredIteration, places: Mapping[str, SiteRecord]
) -> list[str]:
    """Names in the order of one microbatch: values stage by stage, then gradients the other way.

    A rank writes only what it owns; every rank counts what all of its stage see, so that their turns compare.
    """
    turns: dict[str, dict[str, ExecutionTurn]] = {VALUE: {}, GRADIENT: {}}
    for replica in written.run.replicas:
        for stage in written.run.stages:
            for rank in written.run.ranks(stage, replica):
                for path in written.paths(rank):
                    for entry in files.open(path).part.index.entries:
                        if entry.kind in turns and entry.site in places:
                            found = entry.microbatch, entry.call, entry.turn
                            first_turns = turns[entry.kind]
                            first_turns[entry.site] = min(found, first_turns.get(entry.site, found))
        if len(turns[VALUE]) == len(places):
            break  # further replicas have the same sites; only experts are spread over them
    model = {name: at for at, name in enumerate(places)}

    def key(name: str, first_turns: Mapping[str, ExecutionTurn], sign: int) -> tuple[int, ...]:
        place = places[name]
        return sign * place.chunk, sign * place.stage, *first_turns[name], model[name]

    values = sorted(turns[VALUE], key=lambda n: key(n, turns[VALUE], 1))
    gradients = sorted(turns[GRADIENT], key=lambda n: key(n, turns[GRADIENT], -1))
    return values + [n + GRADIENT_SUFFIX for n in gradients]


OUTPUT_SUFFIX = ":output"


def open_dump(path: str | PathLike[str], *, check: ChecksumPolicy = "blocks") -> OpenDump:
    """Open a dump for reading.

    Args:
        path: the folder that was passed to `Dump`.
        check: which checksums to compare: `blocks`, of each 64 KiB block when it is first read; `first`, of
            all blocks of a shard when the shard is first read; or `never`. Headers are always checked. A
            shard of format version 1 has one checksum, which needs a read of the full shard.

    An iteration that has lost a part is left out with a warning; an iteration that a killed run did not
    finish, or that the newest run may still be writing, without one. `OpenDump.missing` lists all of them.

    Raises:
        DumpError: there is no dump; the manifest of a run is missing, damaged or of another version; or the
            folder of a run was renamed.

    Example:
        `open_dump("dumps/run")["decoder.layers.3"]`
    """
    return OpenDump(path, check=check)


class NoActivationError(DumpError):
    """No activation reached a hook point in an iteration whose files are undamaged."""


class OpenDump:
    """A dump: a mapping of hook point names to arrays over (iteration, sample, token, *features).

    Opening reads manifests only; open the dump again to see iterations that were written since. If several
    runs have completed an iteration, the first of these runs is used.

    Args:
        path: the folder.
        check: which checksums are verified when tensors are read, as for `open_dump`.
        most_open: the largest number of files that are open at a time.

    Attributes:
        path: the folder.
        runs: the runs of the dump, in order.
    """

    _warns = True  # about iterations that have lost a part

    def __init__(
        self, path: str | PathLike[str], *, check: ChecksumPolicy = "blocks", most_open: int = MOST_OPEN_FILES
    ) -> None:
        self.path, self.check = Path(path), check
        self.files = PartFiles(check, most_open)
        self.runs: list[DumpRun] = read_runs(self.path)
        self._written: dict[IterationKey, StoredIteration | None] = {}

    def __repr__(self) -> str:
        runs = f"{len(self.runs)} run{'' if len(self.runs) == 1 else 's'}"
        names = f"{len(self.site_records)} sites, {len(self._parameter_records)} parameters"
        return f"<OpenDump {self.path}: {names}, {runs}>"

    # -- what there is ---------------------------------------------------------------------------------

    @property
    def manifests(self) -> list[Manifest]:
        """The manifest of each run."""
        return [run.manifest for run in self.runs]

    def describe_meshes(self) -> str:
        """The mesh; of a dump continued in another layout each mesh with its iterations."""
        numbers: dict[str, list[int]] = {}
        for which in self.iteration_keys:
            manifest = self.stored_iteration(which).run.manifest
            experts = {a: n for a, n in manifest.experts.items() if a == "ep" or n != manifest.axes.get("tp")}
            sizes = {**experts, **manifest.axes}
            mesh = " x ".join(f"{a}={n}" for a, n in sizes.items() if n > 1 and a != "edp") or "one rank"
            numbers.setdefault(mesh, []).append(which[0])
        if len(numbers) < 2:
            return next(iter(numbers), "no complete iteration")
        return ", ".join(
            f"{mesh} in iteration{'s' if len(held) > 1 else ''} "
            f"{held[0] if len(held) == 1 else f'{held[0]} to {held[-1]}'}"
            for mesh, held in numbers.items()
        )

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first run."""
        return self.runs[0].manifest

    @cached_property
    def _whole(self) -> dict[IterationKey, StoredIteration]:
        every = sorted({which for run in self.runs for which in run.folders})
        found = {which: self._look(which) for which in every}
        whole = {which: one for which, one in found.items() if one is not None}
        if self._warns and len(whole) < len(every) and (available := lost(self.runs, whole)):
            more = f", and {len(available) - MOST_DETAILED} more" if len(available) > MOST_DETAILED else ""
            text = f"{self.path}: left out, as parts are gone: {'; '.join(available[:MOST_DETAILED])}{more}"
            warnings.warn(f"{text}; `megatron-flex dump verify` lists what was in them", FlexWarning, 4)
        return whole

    @property
    def missing(self) -> list[str]:
        """What is not there, a line for each, by manifests and the names of files: runs without a manifest,
        iterations that no run has whole, and those between others of which there is no folder at all.
        """
        return missing(self.path, self.runs, self._whole)

    @property
    def iteration_keys(self) -> list[IterationKey]:
        """The complete iterations, with further runs of the schedule: (number, 0), (number, 1), ..."""
        return list(self._whole)

    @property
    def iterations(self) -> list[int]:
        """The numbers of the complete iterations."""
        return [number for number, run_of in self._whole if run_of == 0]

    def stored_iteration(self, which: IterationKey) -> StoredIteration:
        """Return a complete iteration.

        Raises:
            DumpError: the iteration is incomplete or absent.
        """
        found = self._look(which)
        if found is None:
            have = self.iterations
            available = f"{have[0]} to {have[-1]}, {len(have)} in all" if have else "none"
            raise DumpError(
                f"{self.path}: iteration {which} is not there, or incomplete; there are {available}"
            )
        return found

    @cached_property
    def site_records(self) -> dict[str, SiteRecord]:
        """The hook points of all runs, in model order."""
        out: dict[str, SiteRecord] = {}
        for manifest in self.manifests:
            for place in manifest.sites:
                out.setdefault(place.name, place)
        return out

    @cached_property
    def _parameter_records(self) -> dict[str, SiteRecord]:
        return {p.name: p for m in reversed(self.manifests) for p in m.parameters}

    def site_record(self, name: str) -> SiteRecord:
        """Return the manifests' record of a hook point or a parameter.

        Raises:
            KeyError: no manifest has the name.
        """
        found = self.site_records.get(name)
        return self._parameter_records[name] if found is None else found

    def axes(self, name: str) -> dict[str, str]:
        """Return the meaning of the dims of a hook point or parameter (`sequence`, `batch`), by layout name.

        From the manifest, or else from the first iteration's records; empty if neither has the information.
        """
        place = self.site_record(name)
        if place.axes or not self.iteration_keys:
            return dict(place.axes)
        written = self.stored_iteration(self.iteration_keys[0])
        kind = VALUE if name in self.site_records else PARAMETER
        found = (
            entry.axes
            for replica in written.run.replicas
            for _, entry, _, _ in self.entries(written, name, kind, place.stage, replica)
        )
        return dict(next((axes for axes in found if axes), {}))

    @property
    def sites(self) -> list[str]:
        """The names of the dumped hook points, in model order, each followed by its gradient if dumped."""
        passed = set(self.order)
        both = ((name, name + GRADIENT_SUFFIX) for name in self.site_records)
        return [n for name, grad in both for n in ((name, grad) if grad in passed else (name,))]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that were dumped, in model order."""
        return list(self._parameter_records)

    @cached_property
    def order(self) -> list[str]:
        """The names in execution order, values before gradients.

        The order is that of the first iteration with gradients, or else of the first iteration.
        """
        written = next((w for k, w in self._whole.items() if k[1] == 0 and self.has_gradients(k)), None)
        written = written or next(iter(self._whole.values()), None)
        return [] if written is None else sort_by_execution(self.files, written, self.site_records)

    def has_gradients(self, which: IterationKey) -> bool:
        """Return whether gradients were computed in an iteration."""
        written = self.stored_iteration(which)
        path = next(iter(written.paths(next(iter(written.run.coords)))))
        return self.files.open(path).part.index.training

    def _look(self, which: IterationKey) -> StoredIteration | None:
        """Return an iteration from the first run that completed it."""
        if which not in self._written:
            like = next(reversed(self._written.values()), None)
            several = (run.stored_iteration(*which, like=like) for run in self.runs)
            self._written[which] = next((w for w in several if w is not None), None)
        return self._written[which]

    # -- arrays ----------------------------------------------------------------------------------------

    def __getitem__(self, key: str | tuple[str, int]) -> DumpArray:
        name, call = key if isinstance(key, tuple) else (key, None)
        found = self._resolve_site(name)
        if found is None:
            raise DumpError(f"{self.path} has no site {name!r}{suggest_nearest(name, self.sites)}")
        site, kind = found
        passes = [w for w in self._whole if w[1] == 0]
        if kind == GRADIENT:
            passes = [w for w in passes if self.has_gradients(w)]
        stage = self.site_records[site].stage
        if call is None and passes:
            self._check_calls(name, site, kind, stage, passes[0])
        return DumpArray(ActivationSource(self, StoredTensorKey(name, site, kind, call or 0, stage), passes))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._resolve_site(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def keys(self) -> list[str]:
        """The names of the hook points."""
        return self.sites

    def items(self) -> Iterator[tuple[str, DumpArray]]:
        """Iterate over the hook points and their arrays."""
        return ((name, self[name]) for name in self.sites)

    def parameter(self, name: str, gradient: bool = False) -> DumpArray:
        """Return a parameter, or its gradient, over (iteration, *dims).

        Args:
            name: the global name of the parameter.
            gradient: whether to return the gradient instead.

        Raises:
            DumpError: the dump has no such parameter.
        """
        place = self._parameter_records.get(name)
        if place is None:
            raise DumpError(f"{self.path} has no parameter {name!r}{suggest_nearest(name, self.parameters)}")
        passes = [w for w in self._whole if w[1] == 0]
        if gradient:
            passes = [w for w in passes if self.has_gradients(w)]
        kind = PARAMETER_GRADIENT if gradient else PARAMETER
        return DumpArray(ParameterSource(self, name, kind, place.stage, passes))

    # -- rows ------------------------------------------------------------------------------------------

    def dataset(
        self,
        sites: str | DumpArray | Sequence[str | DumpArray],
        *,
        iterations: Sequence[int | IterationKey] | None = None,
        tokens: Any = None,
        dtype: torch.dtype | None = None,
    ) -> TokenRows:
        """Return a map-style dataset of token rows `[*features]`; for several hook points, tuples of rows.

        Args:
            sites: names, or arrays of this dump, which may be sliced.
            iterations: only these, by number.
            tokens: only these: an index of the token axis.
            dtype: of the rows; None for the stored dtype.

        Raises:
            DumpError: a hook point has no samples, or samples or tokens differ between hook points.
        """
        return TokenRows(self._arrays(sites, iterations, tokens), _is_single_site(sites), dtype)

    def rows(
        self,
        sites: str | DumpArray | Sequence[str | DumpArray],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        iterations: Sequence[int | IterationKey] | None = None,
        tokens: Any = None,
        dtype: torch.dtype | None = None,
        buffer: int = 1 << 16,
        block: int = 256,
        part: tuple[int, int] = (0, 1),
    ) -> ShuffledRows:
        """Batches of token rows in random order, within bounded memory; see ShuffledRows.

        Args:
            sites: names, or arrays of this dump as they were sliced; several give tuples of aligned batches.
            batch_size: rows in a batch.
            shuffle: in the dump's order if False.
            seed: of the order.
            iterations: these only, by number.
            tokens: these only: an index of the axis of tokens.
            dtype: of the batches; None for the one that is stored.
            buffer: rows that are held in memory.
            block: rows that are read at a time.
            part: `(r, n)`: the r-th of n parts, for n processes.

        Raises:
            DumpError: a site without samples, or several whose samples or tokens differ.
        """
        arrays = self._arrays(sites, iterations, tokens)
        return ShuffledRows(
            arrays, _is_single_site(sites), batch_size, shuffle, seed, dtype, buffer, block, part
        )

    def _arrays(
        self,
        sites: str | DumpArray | Sequence[str | DumpArray],
        iterations: Sequence[int | IterationKey] | None,
        tokens: Any,
    ) -> list[DumpArray]:
        several = [sites] if isinstance(sites, (str, DumpArray)) else list(sites)
        arrays = [self[one] if isinstance(one, str) else one for one in several]
        if iterations is not None:
            arrays = [one.at(*iterations) for one in arrays]
        return arrays if tokens is None else [one[:, :, tokens] for one in arrays]

    def __reduce__(self) -> Any:
        return _reopen_dump, (self.path, self.check)

    # -- names -----------------------------------------------------------------------------------------

    def _resolve_site(self, name: str) -> tuple[str, str] | None:
        """Return a hook point and the kind of its tensors; a module's name means the module's output."""
        for site, kind in ((name, VALUE), (name.removesuffix(GRADIENT_SUFFIX), GRADIENT)):
            for full in (site, site + OUTPUT_SUFFIX):
                if full in self.site_records and (kind == VALUE or full + GRADIENT_SUFFIX in self.order):
                    return full, kind
        return None

    def _check_calls(self, name: str, site: str, kind: str, stage: int, which: IterationKey) -> None:
        written = self.stored_iteration(which)
        calls = {e.call for _, e, _, _ in self.entries(written, site, kind, stage, written.run.replicas[0])}
        if len(calls) > 1:
            raise DumpError(
                f"{name} was passed {len(calls)} times in a microbatch: say which, d[{name!r}, 0] to "
                f"d[{name!r}, {max(calls)}]"
            )

    # -- what the arrays ask ---------------------------------------------------------------------------

    def entries(
        self, written: StoredIteration, site: str, kind: str, stage: int, replica: int
    ) -> list[LocatedShard]:
        """The shards of a site that the ranks of a stage of a replica wrote.

        Args:
            written: the iteration.
            site: the hook point or parameter.
            kind: the kind of the tensor: an activation, a gradient or a parameter.
            stage: the pipeline stage.
            replica: the data parallel replica.

        Raises:
            DumpError: the coordinates of a file are not those of its rank's manifest.
        """
        out: list[LocatedShard] = []
        for rank in written.run.ranks(stage, replica):
            coords = written.run.coords[rank]
            for path in written.paths(rank):
                part, several = self.files.open(path).by.get((site, kind), (None, ()))
                if part is not None and dict(part.index.coords) != dict(coords):
                    raise DumpError(
                        f"{path}: rank {rank} is at {part.index.coords}, by its manifest {coords}"
                    )
                if part is not None:
                    out += [(part, entry, layout, coords) for entry, layout in several]
        return out

    def missing_activation_error(self, name: str, written: StoredIteration, stage: int) -> DumpError:
        """The error where an iteration has no activation of a site.

        Args:
            name: the name of the hook point.
            written: the iteration.
            stage: the pipeline stage of the hook point.
        """
        return NoActivationError(
            f"{name}: nothing passed there in {written.describe()}; .at(...) chooses iterations that have it"
        )

    def _repr_html_(self) -> str:
        from megatron_flex.dump.reader.dump_html import render_dump  # only in notebooks

        return render_dump(self)

    def close(self) -> None:
        """Close all files."""
        self.files.close()

    def __enter__(self) -> OpenDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reopen_dump(path: Path, check: ChecksumPolicy) -> OpenDump:
    return OpenDump(path, check=check)


def _is_single_site(sites: Any) -> bool:
    return isinstance(sites, (str, DumpArray))
