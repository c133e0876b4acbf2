"""open_dump: a dump as one device would have made it, with neither Megatron nor a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.part_format import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.manifest import Manifest, SiteRecord
from megatron_flex.dump.reading.activations import ActivationSource
from megatron_flex.dump.reading.array import DumpArray, IterationKey
from megatron_flex.dump.reading.folders import DumpRun, StoredIteration, read_runs
from megatron_flex.dump.reading.ordering import sort_by_execution
from megatron_flex.dump.reading.parameters import ParameterSource
from megatron_flex.dump.reader.sample_plan import StoredTensorKey
from megatron_flex.dump.reader.token_rows import ShuffledRows, TokenRows
from megatron_flex.dump.reading.shards import MOST_OPEN_FILES, ChecksumPolicy, PartFiles, LocatedShard
from megatron_flex.errors import DumpError, suggest_nearest
from megatron_flex.sites import GRADIENT_SUFFIX

OUTPUT_SUFFIX = ":output"


def open_dump(path: str | PathLike[str], *, check: ChecksumPolicy = "whole") -> OpenDump:
    """Open a dump to read.

    Args:
        path: the folder that `Dump` was given.
        check: compare a shard's bytes with its checksum when it is `first` read (all of it is read for that),
            when it is first read as a `whole`, or `never`. Headers are always checked.

    Raises:
        DumpError: there is no dump, or its manifest is damaged or of another version.
    """
    return OpenDump(path, check=check)


class NoActivationError(DumpError):
    """Nothing passed at a site in an iteration, of which nothing is damaged."""


class OpenDump:
    """A dump: names of sites to arrays over (iteration, sample, token, *features).

    Opening reads manifests only; what is written later is seen by who opens it anew. Iterations that several
    runs have whole are the first run's.

    Attributes:
        path: the folder.
        runs: the runs it consists of, in order.
    """

    def __init__(
        self, path: str | PathLike[str], *, check: ChecksumPolicy = "whole", most_open: int = MOST_OPEN_FILES
    ) -> None:
        self.path, self.check = Path(path), check
        self.files = PartFiles(check, most_open)
        self.runs: list[DumpRun] = read_runs(self.path)
        self._written: dict[IterationKey, StoredIteration | None] = {}

    # -- what there is ---------------------------------------------------------------------------------

    @property
    def manifests(self) -> list[Manifest]:
        """What each run says of itself."""
        return [run.manifest for run in self.runs]

    @property
    def manifest(self) -> Manifest:
        """That of the first run."""
        return self.runs[0].manifest

    @cached_property
    def _whole(self) -> dict[IterationKey, StoredIteration]:
        every = sorted({which for run in self.runs for which in run.folders})
        found = {which: self._look(which) for which in every}
        return {which: one for which, one in found.items() if one is not None}

    @property
    def passes(self) -> list[IterationKey]:
        """The whole iterations, with further runs of the schedule: (number, 0), (number, 1), ..."""
        return list(self._whole)

    @property
    def iterations(self) -> list[int]:
        """The numbers of the whole iterations."""
        return [number for number, run_of in self._whole if run_of == 0]

    def written(self, which: IterationKey) -> StoredIteration:
        """A whole iteration.

        Raises:
            DumpError: it is not whole, or not there.
        """
        found = self._look(which)
        if found is None:
            have = self.iterations
            available = f"{have[0]} to {have[-1]}, {len(have)} in all" if have else "none"
            raise DumpError(f"{self.path}: iteration {which} is not there, or not whole; there are {available}")
        return found

    @cached_property
    def places(self) -> dict[str, SiteRecord]:
        """The sites of all runs, in model order."""
        out: dict[str, SiteRecord] = {}
        for manifest in self.manifests:
            for place in manifest.sites:
                out.setdefault(place.name, place)
        return out

    @cached_property
    def _parameter_records(self) -> dict[str, SiteRecord]:
        return {p.name: p for m in reversed(self.manifests) for p in m.parameters}

    def place(self, name: str) -> SiteRecord:
        """Of a site or a parameter, what the manifests say.

        Raises:
            KeyError: no manifest has the name.
        """
        found = self.places.get(name)
        return self._parameter_records[name] if found is None else found

    @property
    def sites(self) -> list[str]:
        """The names of what was dumped, in model order, each followed by its gradient if that was."""
        passed = set(self.order)
        both = ((name, name + GRADIENT_SUFFIX) for name in self.places)
        return [n for name, grad in both for n in ((name, grad) if grad in passed else (name,))]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that were dumped, in model order."""
        return list(self._parameter_records)

    @cached_property
    def order(self) -> list[str]:
        """The names in the order in which they passed, values before gradients.

        It is the first iteration that made gradients that tells, or else the first one.
        """
        written = next((w for k, w in self._whole.items() if k[1] == 0 and self.trained(k)), None)
        written = written or next(iter(self._whole.values()), None)
        return [] if written is None else sort_by_execution(self.files, written, self.places)

    def trained(self, which: IterationKey) -> bool:
        """Whether gradients were made in an iteration."""
        written = self.written(which)
        path = next(iter(written.paths(next(iter(written.run.coords)))))
        return self.files.open(path).part.index.training

    def _look(self, which: IterationKey) -> StoredIteration | None:
        """An iteration of the first run that has it whole; no other is looked at."""
        if which not in self._written:
            like = next(reversed(self._written.values()), None)
            several = (run.written(*which, like=like) for run in self.runs)
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
            passes = [w for w in passes if self.trained(w)]
        stage = self.places[site].stage
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
        """The names of the sites."""
        return self.sites

    def items(self) -> Iterator[tuple[str, DumpArray]]:
        """The sites and their arrays."""
        return ((name, self[name]) for name in self.sites)

    def parameter(self, name: str, gradient: bool = False) -> DumpArray:
        """A parameter, or its gradient, over (iteration, *dims)."""
        place = self._parameter_records.get(name)
        if place is None:
            raise DumpError(f"{self.path} has no parameter {name!r}{suggest_nearest(name, self.parameters)}")
        passes = [w for w in self._whole if w[1] == 0]
        if gradient:
            passes = [w for w in passes if self.trained(w)]
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
        """A map-style dataset of token rows `[*features]`; of several sites, tuples of them.

        Args:
            sites: names, or arrays of this dump as they were sliced.
            iterations: these only, by number.
            tokens: these only: an index of the axis of tokens.
            dtype: of the rows; None for the one that is stored.

        Raises:
            DumpError: a site without samples, or several whose samples or tokens differ.
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
        """Batches of token rows in random order, within bounded memory; ShuffledRows says how random.

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
        return ShuffledRows(arrays, _is_single_site(sites), batch_size, shuffle, seed, dtype, buffer, block, part)

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
        """A site, and which kind of its tensors; a module's name stands for its output."""
        for site, kind in ((name, VALUE), (name.removesuffix(GRADIENT_SUFFIX), GRADIENT)):
            for full in (site, site + OUTPUT_SUFFIX):
                if full in self.places and (kind == VALUE or full + GRADIENT_SUFFIX in self.order):
                    return full, kind
        return None

    def _check_calls(self, name: str, site: str, kind: str, stage: int, which: IterationKey) -> None:
        written = self.written(which)
        calls = {e.call for _, e, _, _ in self.entries(written, site, kind, stage, written.run.replicas[0])}
        if len(calls) > 1:
            raise DumpError(
                f"{name} was passed {len(calls)} times in a microbatch: say which, d[{name!r}, 0] to "
                f"d[{name!r}, {max(calls)}]"
            )

    # -- what the arrays ask ---------------------------------------------------------------------------

    def entries(self, written: StoredIteration, site: str, kind: str, stage: int, replica: int) -> list[LocatedShard]:
        """What the ranks of a stage of a replica wrote of a site."""
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

    def nothing(self, name: str, written: StoredIteration, stage: int) -> DumpError:
        """What there is to say where nothing of a site of a stage is in an iteration."""
        return NoActivationError(
            f"{name}: nothing passed there in {written.describe()}; .at(...) chooses iterations that have it"
        )

    def _repr_html_(self) -> str:
        from megatron_flex.dump.reader.dump_html import render_dump  # which needs what needs this file

        return render_dump(self)

    def close(self) -> None:
        """Let go of all files."""
        self.files.close()

    def __enter__(self) -> OpenDump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reopen_dump(path: Path, check: ChecksumPolicy) -> OpenDump:
    return OpenDump(path, check=check)


def _is_single_site(sites: Any) -> bool:
    return isinstance(sites, (str, DumpArray))
