"""`open_dump`: read a dump as full tensors, without Megatron and without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.expert_routing import ExpertRouting
from megatron_flex.dump.reader.array_sources import ActivationSource, ParameterSource
from megatron_flex.dump.reader.dump_array import DumpArray
from megatron_flex.dump.reader.missing_parts import MAX_DETAILED, lost, missing, replaced
from megatron_flex.dump.reader.sample_plan import StoredTensorKey
from megatron_flex.dump.reader.shard_files import (
    MAX_OPEN_FILES,
    ChecksumPolicy,
    LocatedShard,
    PartFiles,
)
from megatron_flex.dump.reader.token_rows import ShuffledRows, TokenRows, is_row_mask
from megatron_flex.dump.reader.weighted_cache import WeightedCache
from megatron_flex.dump.run_folders import DumpRun, IterationKey, StoredIteration, read_runs
from megatron_flex.dump.schema import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE, Manifest, SiteRecord
from megatron_flex.errors import DumpError, FlexWarning, SiteError, error_attributes, suggest_nearest
from megatron_flex.gpt_names import NAMESPACE, GptNames, layer_pattern
from megatron_flex.mesh import describe_sizes
from megatron_flex.ranges import describe_numbers, normalize_path
from megatron_flex.sites import GRADIENT_SUFFIX, find_recorded_names
from megatron_flex.wording import count_words

MAX_ROUTED = 1 << 24  # entries of routers' decisions that are kept
OUTPUT_SUFFIX = ":output"
RoutingKey = tuple[IterationKey, int, str, int, int]  # iteration, stage, layer, call, microbatch
ExecutionTurn = tuple[int, int, int]  # microbatch, call, and the turn on the rank


def sort_by_execution(
    files: PartFiles, written: StoredIteration, records: Mapping[str, SiteRecord]
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
                        if entry.kind in turns and entry.site in records:
                            turn = entry.microbatch, entry.call, entry.turn
                            first_turns = turns[entry.kind]
                            first_turns[entry.site] = min(turn, first_turns.get(entry.site, turn))
        if len(turns[VALUE]) == len(records):
            break  # further replicas have the same sites; only experts are spread over them
    model = {name: at for at, name in enumerate(records)}

    def key(name: str, first_turns: Mapping[str, ExecutionTurn], sign: int) -> tuple[int, ...]:
        record = records[name]
        return sign * record.chunk, sign * record.stage, *first_turns[name], model[name]

    values = sorted(turns[VALUE], key=lambda n: key(n, turns[VALUE], 1))
    gradients = sorted(turns[GRADIENT], key=lambda n: key(n, turns[GRADIENT], -1))
    return values + [n + GRADIENT_SUFFIX for n in gradients]


def open_dump(path: str | PathLike[str], *, check: ChecksumPolicy = "blocks") -> OpenDump:
    """Open a dump for reading.

    An iteration that has lost a part is left out with a warning; an iteration that a killed run did not
    finish, or that the newest run may still be writing, without one. `OpenDump.missing` lists all of them.

    Args:
        path: the folder that was passed to `Dump`.
        check: which checksums to compare: `blocks`, of each block when it is first read; `first`, of
            all blocks of a shard when the shard is first read; or `never`. Headers are always checked.

    Returns:
        The dump: a mapping of names to arrays, which reads a tensor when it is converted.

    Raises:
        DumpError: there is no dump; the manifest of a run is missing, damaged or of another version; or the
            folder of a run was renamed.

    Examples:
        >>> dump = open_dump("dumps/run")
        >>> dump["decoder.layers.3"]
        DumpArray(decoder.layers.3: iteration 2, sample 4, token 16, h 32; float32, 16,384 bytes; [s, b, h])
    """
    return OpenDump(path, check=check)


class NoActivationError(DumpError):
    """No activation reached a hook point in an iteration whose files are undamaged."""


class OpenDump:
    """A dump: a mapping of hook point names to arrays over (iteration, sample, token, *features).

    Opening reads manifests only; open the dump again to see iterations that were written since. If several
    runs have completed an iteration, as after a rollback to a checkpoint, the last of these runs is used, as
    for statistics; a warning and `replaced` name such iterations.

    Args:
        path: the folder.
        check: which checksums are verified when tensors are read, as for `open_dump`.
        most_open: the largest number of files that are open at a time.

    Attributes:
        path: the folder.
        runs: the runs of the dump, in order.

    Examples:
        >>> dump = open_dump("dumps/run")
        >>> dump
        <OpenDump dumps/run: 54 sites, 8 parameters, 1 run>
        >>> dump["decoder.layers.3"][-1, 0].torch().shape  # last iteration, first sample: [token, h]
        torch.Size([16, 32])
        >>> dump.close()
    """

    _warns = True  # about iterations that have lost a part

    def __init__(
        self, path: str | PathLike[str], *, check: ChecksumPolicy = "blocks", most_open: int = MAX_OPEN_FILES
    ) -> None:
        self.path, self.check = Path(normalize_path("path", path)), check
        self.files = PartFiles(check, most_open)
        self.runs = self._list_runs()
        self._written: dict[IterationKey, StoredIteration | None] = {}

    def _list_runs(self) -> list[DumpRun]:
        return read_runs(self.path)

    def __repr__(self) -> str:
        sites, parameters = len(self.site_records), len(self._parameter_records)
        names = f"{count_words(sites, 'site')}, {count_words(parameters, 'parameter')}"
        return f"<OpenDump {self.path}: {names}, {count_words(len(self.runs), 'run')}>"

    @cached_property
    def routings(self) -> WeightedCache[RoutingKey, ExpertRouting]:
        """Routers' decisions, of which all sites of a layer's experts ask for the same."""
        return WeightedCache(MAX_ROUTED)

    # -- contents -------------------------------------------------------------------------------------

    @property
    def manifests(self) -> list[Manifest]:
        """The manifest of each run."""
        return [run.manifest for run in self.runs]

    def describe_meshes(self) -> str:
        """Return the mesh; of a dump continued in another layout each mesh with its iterations.

        Examples:
            >>> open_dump("dumps/run").describe_meshes()
            'one rank'
        """
        numbers: dict[str, list[int]] = {}
        for which in self.iteration_keys:
            manifest = self.stored_iteration(which).run.manifest
            experts = {a: n for a, n in manifest.experts.items() if a == "ep" or n != manifest.axes.get("tp")}
            sizes = {**experts, **manifest.axes}
            mesh = describe_sizes(sizes)
            numbers.setdefault(mesh, []).append(which[0])
        if len(numbers) < 2:
            return next(iter(numbers), "no complete iteration")
        return ", ".join(
            f"{mesh} in iteration{'s' if len(iterations) > 1 else ''} "
            f"{iterations[0] if len(iterations) == 1 else f'{iterations[0]} to {iterations[-1]}'}"
            for mesh, iterations in numbers.items()
        )

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first run."""
        return self.runs[0].manifest

    @cached_property
    def _complete(self) -> dict[IterationKey, StoredIteration]:
        every = sorted({which for run in self.runs for which in run.iteration_keys})
        by_key = {which: self._find_complete(which) for which in every}
        complete = {which: stored for which, stored in by_key.items() if stored is not None}
        if self._warns and len(complete) < len(every) and (lost_iterations := lost(self.runs, complete)):
            rest = len(lost_iterations) - MAX_DETAILED
            more = f", and {rest} more" if rest > 0 else ""
            named = "; ".join(lost_iterations[:MAX_DETAILED])
            text = f"{self.path}: left out, because parts are missing: {named}{more}"
            warnings.warn(f"{text}; `megatron-flex dump verify` lists what was in them", FlexWarning, 4)
        if self._warns and (several := replaced(self.runs, complete)):
            warnings.warn(f"{self.path}: {'; '.join(several[-MAX_DETAILED:])}", FlexWarning, 4)
        return complete

    @property
    def replaced(self) -> list[str]:
        """The iterations that several runs have completed, a line for each run whose iterations are not read.

        Examples:
            >>> open_dump("dumps/run").replaced
            []
        """
        return replaced(self.runs, self._complete)

    @property
    def missing(self) -> list[str]:
        """What is not there, a line for each, by manifests and the names of files: runs without a manifest,
        iterations that no run has whole, and those between others of which there is no folder at all.
        """
        return missing(self.path, self.runs, self._complete)

    @property
    def iteration_keys(self) -> list[IterationKey]:
        """The complete iterations, with further runs of the schedule: (number, 0), (number, 1), ..."""
        return list(self._complete)

    @property
    def iterations(self) -> list[int]:
        """The numbers of the complete iterations."""
        return [number for number, run_of in self._complete if run_of == 0]

    def stored_iteration(self, which: IterationKey) -> StoredIteration:
        """Return a complete iteration: `which` is its number, and which run of the schedule in it, from 0.

        Raises:
            DumpError: the iteration is incomplete or absent.

        Examples:
            >>> dump = open_dump("dumps/run")
            >>> dump.stored_iteration((1, 0)).iteration
            1
        """
        stored = self._find_complete(which)
        if stored is None:
            numbers = self.iterations
            complete = describe_numbers("iteration", numbers) if numbers else "no iteration"
            verb = "is" if len(numbers) < 2 else "are"
            raise DumpError(
                f"{self.path}: iteration {which} is missing or incomplete; {complete} {verb} complete",
                path=self.path,
            )
        return stored

    @cached_property
    def site_records(self) -> dict[str, SiteRecord]:
        """Return the records of the hook points of all runs, in model order.

        Examples:
            >>> len(open_dump("dumps/run").site_records)
            54
        """
        out: dict[str, SiteRecord] = {}
        for manifest in self.manifests:
            for record in manifest.sites:
                out.setdefault(record.name, record)
        return out

    @cached_property
    def _parameter_records(self) -> dict[str, SiteRecord]:
        return {p.name: p for m in reversed(self.manifests) for p in m.parameters}

    def site_record(self, name: str) -> SiteRecord:
        """Return the manifests' record of a hook point or a parameter.

        Raises:
            KeyError: no manifest has the name.

        Examples:
            >>> open_dump("dumps/run").site_record("decoder.layers.3:output").shape
            ['s', 'b', 32]
        """
        record = self.site_records.get(name)
        return self._parameter_records[name] if record is None else record

    def axes(self, name: str) -> dict[str, str]:
        """Return the meaning of the dims of a hook point or parameter (`sequence`, `batch`), by layout name.

        From the manifest, or else from the first iteration's records; empty if neither has the information.

        Examples:
            >>> open_dump("dumps/run").axes("decoder.layers.3:output")
            {'s': 'sequence', 'b': 'batch', 'h': 'hidden'}
        """
        record = self.site_record(name)
        if record.axes or not self.iteration_keys:
            return dict(record.axes)
        written = self.stored_iteration(self.iteration_keys[0])
        kind = VALUE if name in self.site_records else PARAMETER
        recorded = (
            entry.axes
            for replica in written.run.replicas
            for _, entry, _, _ in self.entries(written, name, kind, record.stage, replica)
        )
        return dict(next((axes for axes in recorded if axes), {}))

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
        """Return the names in execution order, values before gradients.

        The order is that of the first iteration with gradients, or else of the first iteration.

        Examples:
            >>> list(open_dump("dumps/run").order)[:3]
            ['embedding.word_embeddings:output', 'embedding:output', 'decoder.layers.0:input']
        """
        written = next((w for k, w in self._complete.items() if k[1] == 0 and self.has_gradients(k)), None)
        written = written or next(iter(self._complete.values()), None)
        return [] if written is None else sort_by_execution(self.files, written, self.site_records)

    def has_gradients(self, which: IterationKey) -> bool:
        """Return whether gradients were computed in an iteration, `(number, run of the schedule)`.

        Examples:
            >>> open_dump("dumps/run").has_gradients((1, 0))
            True
        """
        written = self.stored_iteration(which)
        path = next(iter(written.paths(next(iter(written.run.coords)))))
        return self.files.open(path).part.index.training

    def _find_complete(self, which: IterationKey) -> StoredIteration | None:
        """Return an iteration from the last run that completed it."""
        if which not in self._written:
            like = next(reversed(self._written.values()), None)
            several = (run.complete_iteration(which, like) for run in reversed(self.runs))
            self._written[which] = next((w for w in several if w is not None), None)
        return self._written[which]

    # -- arrays ----------------------------------------------------------------------------------------

    def __getitem__(self, key: str | tuple[str, int]) -> DumpArray:
        name, call = key if isinstance(key, tuple) else (key, None)
        with error_attributes(site=name, path=self.path):
            site, kind = self._resolve_site(name) or self._find_site(name)
            passes = [w for w in self._complete if w[1] == 0]
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
        """Return the names of the hook points.

        Examples:
            >>> [name for name in open_dump("dumps/run").keys() if name.startswith("decoder.layers.3.mlp:")]
            ['decoder.layers.3.mlp:output']
        """
        return self.sites

    def items(self) -> Iterator[tuple[str, DumpArray]]:
        """Iterate over the hook points and their arrays.

        Returns:
            An iterator over pairs of a name and a DumpArray.

        Examples:
            >>> for name, array in open_dump("dumps/run").items():
            ...     if name.endswith(".mlp:output"):
            ...         print(name, array.shape)
            decoder.layers.0.mlp:output (2, 4, 16, 32)
            decoder.layers.1.mlp:output (2, 4, 16, 32)
            decoder.layers.2.mlp:output (2, 4, 16, 32)
            decoder.layers.3.mlp:output (2, 4, 16, 32)
        """
        return ((name, self[name]) for name in self.sites)

    def parameter(self, name: str, gradient: bool = False) -> DumpArray:
        """Return a parameter, or its gradient, over (iteration, *dims).

        Args:
            name: the global name of the parameter.
            gradient: whether to return the gradient instead.

        Raises:
            DumpError: the dump has no such parameter.

        Examples:
            >>> open_dump("dumps/run").parameter("decoder.final_layernorm.weight")
            DumpArray(decoder.final_layernorm.weight: iteration 2, d0 32; float32, 256 bytes; [d0])
        """
        with error_attributes(site=name):
            name = self._own_name(name)
        record = self._parameter_records.get(name)
        if record is None:
            raise DumpError(
                f"{self.path} has no parameter {name!r}{suggest_nearest(name, self.parameters)}",
                site=name,
                path=self.path,
            )
        passes = [w for w in self._complete if w[1] == 0]
        if gradient:
            passes = [w for w in passes if self.has_gradients(w)]
        kind = PARAMETER_GRADIENT if gradient else PARAMETER
        return DumpArray(ParameterSource(self, name, kind, record.stage, passes))

    # -- rows ------------------------------------------------------------------------------------------

    def dataset(
        self,
        sites: str | DumpArray | Sequence[str | DumpArray],
        *,
        iterations: Sequence[int | IterationKey] | None = None,
        tokens: Any = None,
        dtype: torch.dtype | None = None,
        places: bool = False,
    ) -> TokenRows:
        """Return a map-style dataset of token rows `[*features]`; for several hook points, tuples of rows.

        Args:
            sites: names, or arrays of this dump, which may be sliced.
            iterations: only these, by number.
            tokens: only these: an index of the token axis, or a mask `[iteration, sample, token]` or
                `[sample, token]`.
            dtype: of the rows; None for the stored dtype. Integers, such as token ids, keep theirs.
            places: whether to put beside each row, as the last of a tuple, its place: an int64 tensor of the
                iteration, the sample in the global batch and the position of the token.

        Raises:
            DumpError: a hook point has no samples, or samples or tokens differ between hook points.

        Examples:
            >>> rows = open_dump("dumps/run").dataset("decoder.layers.3", iterations=[1])
            >>> len(rows), rows[0].shape
            (64, torch.Size([32]))
            >>> loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
        """
        with error_attributes(path=self.path):
            arrays, mask = self._arrays(sites, iterations, tokens)
            return TokenRows(arrays, _is_single_site(sites), dtype, mask, places)

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
        places: bool = False,
    ) -> ShuffledRows:
        """Iterate over batches of token rows in random order, within bounded memory; see ShuffledRows.

        Args:
            sites: names, or arrays of this dump as they were sliced; several give tuples of aligned batches.
            batch_size: rows in a batch.
            shuffle: in the dump's order if False.
            seed: of the order.
            iterations: these only, by number.
            tokens: these only: an index of the axis of tokens, or a mask `[iteration, sample, token]` or
                `[sample, token]`, such as of tokens that are not padding.
            dtype: of the batches; None for the stored dtype. Integers, such as token ids, keep theirs.
            buffer: rows that are held in memory.
            block: rows that are read at a time.
            part: `(r, n)`: the r-th of n parts, for n processes.
            places: whether to put beside each batch, as the last of a tuple, the places of its rows
                `[batch_size, 3]`: the iteration, the sample in the global batch, the position of the token.

        Returns:
            An iterable of tensors `[batch_size, *features]`; for several hook points, and with `places`, of
                tuples of them.

        Raises:
            DumpError: a site without samples, or several whose samples or tokens differ.

        Examples:
            >>> batches = open_dump("dumps/run").rows("decoder.layers.3", batch_size=32)
            >>> [tuple(batch.shape) for batch in batches]
            [(32, 32), (32, 32), (32, 32), (32, 32)]
        """
        with error_attributes(path=self.path):
            arrays, mask = self._arrays(sites, iterations, tokens)
            single = _is_single_site(sites)
            return ShuffledRows(
                arrays, single, batch_size, shuffle, seed, dtype, buffer, block, part, mask, places
            )

    def _arrays(
        self,
        sites: str | DumpArray | Sequence[str | DumpArray],
        iterations: Sequence[int | IterationKey] | None,
        tokens: Any,
    ) -> tuple[list[DumpArray], Any]:
        """The arrays of rows, and the mask over them, if one is given."""
        several = [sites] if isinstance(sites, (str, DumpArray)) else list(sites)
        arrays = [self[array] if isinstance(array, str) else array for array in several]
        if iterations is not None:
            arrays = [array.at(*iterations) for array in arrays]
        if tokens is None or is_row_mask(tokens):
            return arrays, tokens
        return [array[:, :, tokens] for array in arrays], None

    def __reduce__(self) -> Any:
        return partial(OpenDump, self.path, check=self.check), ()

    # -- names -----------------------------------------------------------------------------------------

    def _resolve_site(self, name: str) -> tuple[str, str] | None:
        """Return a hook point and the kind of its tensors; a module's name means the module's output."""
        name = self._own_name(name)
        for site, kind in ((name, VALUE), (name.removesuffix(GRADIENT_SUFFIX), GRADIENT)):
            for full in (site, site + OUTPUT_SUFFIX):
                if full in self.site_records and (kind == VALUE or full + GRADIENT_SUFFIX in self.order):
                    return full, kind
        return None

    @cached_property
    def gpt_names(self) -> GptNames:
        """Return the correspondence with the names of a GPTModel.

        Examples:
            >>> open_dump("dumps/run").gpt_names.pattern
            'TTTT'
        """
        layers = next((m.layers for m in self.manifests if m.layers), "")
        return GptNames(layers or layer_pattern([*self.site_records, *self._parameter_records]))

    def _own_name(self, name: str) -> str:
        """The dump's name for one of a GPTModel, written `gpt:NAME`; other names as they are."""
        if not name.startswith(NAMESPACE):
            return name
        try:
            return self.gpt_names.to_model(name.removeprefix(NAMESPACE))
        except SiteError as error:
            raise DumpError(f"{self.path}: {error}", path=self.path) from None

    def _find_site(self, name: str) -> tuple[str, str]:
        """Resolve a site by the end of a module's name, or by a pattern that matches one hook point."""
        try:
            names = find_recorded_names(name, self.sites, str(self.path), self.gpt_names.pattern)
        except SiteError as error:
            raise DumpError(str(error)) from None
        if not names:
            raise DumpError(
                f"{self.path} has no site {name!r}{suggest_nearest(name, self.sites)}", path=self.path
            )
        if len(names) > 1:
            raise DumpError(
                f"{self.path}: {name!r} means {', '.join(names[:4])}{' ...' * (len(names) > 4)}; "
                "name one of them; keys() lists all",
                path=self.path,
            )
        resolved = self._resolve_site(names[0])
        assert resolved is not None  # it is one of `sites`
        return resolved

    def _check_calls(self, name: str, site: str, kind: str, stage: int, which: IterationKey) -> None:
        written = self.stored_iteration(which)
        calls = {e.call for _, e, _, _ in self.entries(written, site, kind, stage, written.run.replicas[0])}
        if len(calls) > 1:
            raise DumpError(
                f"{name} was called {len(calls)} times in a microbatch: read one call, d[{name!r}, 0] to "
                f"d[{name!r}, {max(calls)}]"
            )

    # -- what the arrays ask ---------------------------------------------------------------------------

    def entries(
        self, written: StoredIteration, site: str, kind: str, stage: int, replica: int
    ) -> list[LocatedShard]:
        """Return the shards of a site that the ranks of a stage of a replica wrote.

        Args:
            written: the iteration.
            site: the hook point or parameter.
            kind: the kind of the tensor: an activation, a gradient or a parameter.
            stage: the pipeline stage.
            replica: the data parallel replica.

        Returns:
            The shards, each with its file.

        Raises:
            DumpError: the coordinates of a file are not those of its rank's manifest.

        Examples:
            >>> dump = open_dump("dumps/run")
            >>> written = dump.stored_iteration((0, 0))
            >>> len(dump.entries(written, "decoder.layers.3:output", "value", stage=0, replica=0))
            2
        """
        out: list[LocatedShard] = []
        for rank in written.run.ranks(stage, replica):
            coords = written.run.coords[rank]
            for path in written.paths(rank):
                part, several = self.files.open(path).entries_by_site.get((site, kind), (None, ()))
                if part is not None and dict(part.index.coords) != dict(coords):
                    raise DumpError(
                        f"{path}: the header has rank {rank} at {part.index.coords}, the manifest at "
                        f"{coords}; the file is of another run: restore it",
                        path=path,
                    )
                if part is not None:
                    out += [(part, entry, layout, coords) for entry, layout in several]
        return out

    def missing_activation_error(self, name: str, written: StoredIteration, stage: int) -> DumpError:
        """Return the error for an iteration that has no activation of a site.

        Args:
            name: the name of the hook point.
            written: the iteration.
            stage: the pipeline stage of the hook point.

        Examples:
            >>> dump = open_dump("dumps/run")
            >>> written = dump.stored_iteration((0, 0))
            >>> type(dump.missing_activation_error("decoder.layers.3:output", written, stage=0)).__name__
            'NoActivationError'
        """
        return NoActivationError(
            f"{name}: nothing was recorded there in {written.describe()}; choose others with .at(...)"
        )

    def _repr_html_(self) -> str:
        from megatron_flex.dump.reader.dump_documents import describe_dump  # only in notebooks

        return describe_dump(self)._repr_html_()

    def close(self) -> None:
        """Close all files.

        Examples:
            >>> dump = open_dump("dumps/run")
            >>> dump.close()
        """
        self.files.close()
        self.routings.clear()

    def __enter__(self) -> OpenDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_single_site(sites: Any) -> bool:
    return isinstance(sites, (str, DumpArray))
