"""Verification of a dump: every checksum, differing replicas, and what is missing, by rank and site."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_flex.document import Document, Note, Renderable, Span, Tone
from megatron_flex.dump.export import read_blocks
from megatron_flex.dump.file_names import MANIFEST_NAME, is_draft
from megatron_flex.dump.part_format import StoredPart, read_part
from megatron_flex.dump.reader import DumpArray
from megatron_flex.dump.reader.dump_reader import NoActivationError
from megatron_flex.dump.reader.missing_parts import describe_gaps
from megatron_flex.dump.reader.shard_files import count_shard_blocks, find_wrong_blocks
from megatron_flex.dump.run_folders import (
    DumpRun,
    IterationKey,
    StoredIteration,
    count_file_bytes,
    count_part_bytes,
    list_missing_parts,
    list_runs,
    renamed_runs,
)
from megatron_flex.dump.schema import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    REPLICA,
    ROUTING,
    VALUE,
    Manifest,
    ShardEntry,
    layout_from_json,
    list_dim_names,
)
from megatron_flex.dump.tools.dump_contents import (
    QuietDump,
    get_named_array,
    list_parameter_names,
    list_site_names,
)
from megatron_flex.dump.writer.run_creation import check_same_dump
from megatron_flex.errors import DumpError, LayoutError, list_some
from megatron_flex.layout import Layout
from megatron_flex.progress import BYTES, ProgressBar, format_bytes, progress
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.wording import count_words, format_series

UNSHARED_AXES = (
    "pp",
    "dp",
    "edp",
)  # axes along which ranks have other activations, though no layout names them


class _Replica(NamedTuple):
    rank: int
    entry: ShardEntry


MAX_RANKS = 8  # ranks that a finding names
MAX_NAMES = 3  # and names of tensors and blocks


@dataclass(slots=True)
class ReplicaChecksums:
    """The replicas of one iteration.

    Attributes:
        manifest: of the run; without one nothing is compared.
        compared: how many checksums of replicas there are.
    """

    manifest: Manifest | None
    compared: int = 0
    _owners: dict[tuple[Any, ...], _Replica] = field(default_factory=dict)
    _copies: dict[tuple[Any, ...], list[_Replica]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rank: int, part: StoredPart) -> None:
        if self.manifest is None or not self.manifest.settings.get("replicas"):
            return
        try:
            layouts = [layout_from_json(record) for record in part.index.layouts]
        except (LayoutError, KeyError, TypeError, ValueError, AttributeError):
            return  # _find_contradictions reports it
        for entry in part.index.entries:
            if entry.kind == ROUTING or entry.route is not None or not 0 <= entry.layout < len(layouts):
                continue  # experts' rows: no layout tells which ranks hold the same ones
            key = self._key(entry, layouts[entry.layout], dict(part.index.coords))
            if entry.kind == REPLICA:
                self.compared += 1
                self._copies[key].append(_Replica(rank, entry))
            else:
                self._owners[key] = _Replica(rank, entry)

    def differing(self) -> Iterator[tuple[int, int, ShardEntry]]:
        """The rank, the one that it is compared with (which wrote it, if one did), and that one's entry."""
        for key, copies in self._copies.items():
            first = self._owners.get(key, copies[0])
            for rank, entry in copies:
                if entry.checksum != first.entry.checksum:
                    yield rank, first.rank, first.entry

    def _key(self, entry: ShardEntry, layout: Layout, coords: dict[str, int]) -> tuple[Any, ...]:
        """What ranks that hold the same tensor have in common."""
        assert self.manifest is not None
        whose = entry.kind == REPLICA and entry.site.removesuffix(GRADIENT_SUFFIX) in {
            p.name for p in self.manifest.parameters
        }
        apart = () if whose or entry.kind in (PARAMETER, PARAMETER_GRADIENT) else UNSHARED_AXES
        expert = any(a in layout.axes for a in self.manifest.experts)
        copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
        at = tuple(
            (axis, coords.get(axis, 0) // copies.get(axis, 1))
            for axis, size in (self.manifest.experts if expert else self.manifest.axes).items()
            if size > 1 and (axis in apart or axis in layout.axes)
        )
        return entry.name, entry.microbatch, entry.call, entry.span, at


@dataclass(frozen=True, slots=True)
class DumpFinding:
    """Something that is not as it should be.

    Attributes:
        kind: `manifest`, `missing`, `incomplete`, `header`, `checksum`, `replica`, `contradiction`, `stray`,
            `gap`.
        where: the file or folder, from the dump's folder on.
        text: what is wrong, in a line.
        rank: whose file it is; None where it belongs to no rank.
        iteration: None where it belongs to none.
        sites: what is lost or wrong; gradients as `NAME.grad`.
        error: whether something is lost or wrong; else nothing that a reader shows is.
    """

    kind: str
    where: str
    text: str
    rank: int | None = None
    iteration: int | None = None
    sites: tuple[str, ...] = ()
    error: bool = True

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        values = {n: getattr(self, n) for n in ("kind", "where", "text", "rank", "iteration", "error")}
        return {**values, "sites": list(self.sites)}


@dataclass(slots=True)
class Verification(Renderable):
    """The counts of what was checked, and the findings.

    Attributes:
        findings: in the order of runs and iterations.
        files: parts that were read.
        tensors: whose checksum was computed.
        nbytes: of them.
        replicas: checksums of replicas that were compared.
        complete: iterations that some run has whole.
    """

    findings: list[DumpFinding] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    replicas: int = 0
    complete: list[int] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is lost or wrong."""
        return not any(f.error for f in self.findings)

    def joined(self) -> list[DumpFinding]:
        """The findings, errors first; parts of one iteration that several ranks lack are one finding."""
        return sorted(_join_ranks(self.findings), key=lambda finding: not finding.error)

    def summary(self) -> tuple[str, str]:
        """The counts of files and tensors, and the verdict."""
        findings = self.joined()
        errors = sum(finding.error for finding in findings)
        notes = len(findings) - errors
        read = (
            f"{count_words(self.files, 'file')}, {count_words(self.tensors, 'tensor')}, "
            f"{format_bytes(self.nbytes)} read"
        )
        read += f", {count_words(self.replicas, 'replica')} compared" if self.replicas else ""
        read += f"; complete iterations: {format_series(self.complete)}"
        noted = f"; {count_words(notes, 'note')}" if notes else ""
        if errors:
            return read, f"{count_words(errors, 'error')}{noted}"
        if not self.complete:
            return read, f"no iteration is complete, so none can be read{noted}"
        return read, f"OK: all checksums match{noted}"

    def to_document(self) -> Document:
        """Return the findings, a line each, the counts of files and tensors, and the verdict."""
        notes = []
        for finding in self.joined():
            kind = (
                Span(f"error: {finding.kind}", "bad")
                if finding.error
                else Span(f"note: {finding.kind}", "note")
            )
            notes.append(Note((kind, Span("  "), Span(finding.where, "strong"), Span(f"  {finding.text}"))))
        read, verdict = self.summary()
        tone: Tone = "bad" if not self.good else "good" if self.complete else "note"
        return Document("Verification", [*notes, Note(read), Note(verdict, tone)])

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "good": self.good,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "replicas": self.replicas,
            "iterations": self.complete,
            "findings": [f.to_json() for f in self.findings],
        }


def _join_ranks(findings: Sequence[DumpFinding]) -> list[DumpFinding]:
    """The findings; those of several ranks of which parts of one iteration are not there are one."""
    out: dict[object, list[DumpFinding]] = {}
    for number, finding in enumerate(findings):
        joins = finding.kind in ("missing", "incomplete")
        out.setdefault((finding.where, finding.error) if joins else number, []).append(finding)
    joined = []
    for first, *others in out.values():
        if others:
            ranks = [str(f.rank) for f in (first, *others)]
            sites = dict.fromkeys(name for f in (first, *others) for name in f.sites)
            lost = f"; lost: what they wrote of {count_words(len(sites), 'site')}" if sites else ""
            text = f"parts of ranks {list_some(ranks, MAX_RANKS)} are missing{lost}"
            elsewhere = "" if first.error else "; another run has it complete"
            first = replace(first, text=f"iteration {first.iteration} is incomplete: {text}{elsewhere}")
        joined.append(first)
    return joined


def verify_dump(path: Path, live: bool = False) -> Verification:
    """Read every byte of a dump and compare it with its checksum; find what is not there.

    Args:
        path: the dump's folder.
        live: the newest run still writes: what it has not closed yet is not counted as incomplete.

    Raises:
        DumpError: the path has no dump.
    """
    runs = list_runs(path)
    with progress("verifying", 2 * count_part_bytes(runs), BYTES) as bar:
        return _Verifier(path, runs, bar, live).run()


@dataclass(slots=True)
class _RunContents:
    """What is known about a run when all of it was read: parts that are missing are named by it.

    Attributes:
        names: the tensors in each rank's parts, by rank and number.
        sites: those that some part has.
    """

    names: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)


class _Verifier:
    def __init__(self, path: Path, runs: list[DumpRun], bar: ProgressBar, live: bool) -> None:
        self.path, self.runs, self.bar, self.live = path, runs, bar, live
        self.out = Verification()
        self.complete = {stored.key for run in runs for stored in run.iterations if stored.complete}

    def run(self) -> Verification:
        self.out.complete = sorted({number for number, _ in self.complete})
        readable = [run for run in self.runs if not run.damage]
        for run in self.runs:
            path = run.folder / MANIFEST_NAME
            if run.damage:
                self._add("manifest", path, f"run {run.number}: {run.damage}")
            elif run.contradiction:
                self._add("contradiction", path, run.contradiction)
            if not run.damage:
                try:
                    check_same_dump(self.path, readable[0].manifest, run.manifest)
                except DumpError as error:
                    self._add("contradiction", path, str(error))
            self._check_run(run)
        self._beside()
        if self.out.good:
            self._read()
        return self.out

    def _read(self) -> None:
        """Read each array as a reader does, in blocks: what reading refuses is an error here, too."""
        try:
            with QuietDump(self.path, check="never") as dump:  # checksums were compared
                names = [*list_site_names(dump), *list_parameter_names(dump)]
                arrays = {name: get_named_array(dump, name) for name in names}
                for which in dump.iteration_keys:
                    for name, array in arrays.items():
                        self._read_iteration(name, array, which)
        except DumpError as error:
            self._add("reading", self.path, str(error))

    def _read_iteration(self, name: str, array: DumpArray, which: IterationKey) -> None:
        if which not in array.iteration_keys:
            return
        try:
            for block in read_blocks(array.at(which)):
                self.bar.advance(block.nbytes)
        except NoActivationError:
            return  # the files are undamaged; nothing reached the hook point in this iteration
        except DumpError as error:
            text = f"iteration {which[0]}: {error}"
            self._add("reading", self.path, text, iteration=which[0], sites=(name,))

    def _beside(self) -> None:
        """What belongs to no run: folders of renamed runs, iterations of which no part is left."""
        for one in renamed_runs(self.path):
            kind = "contradiction" if one.lost else "stray"
            self._add(kind, one.path, one.text, error=one.lost)
        if text := describe_gaps(self.runs):
            self._add("gap", self.path, text, error=False)

    def _add(self, kind: str, where: Path, text: str, **more: Any) -> None:
        self.out.findings.append(DumpFinding(kind, str(where.relative_to(self.path)), text, **more))

    # -- what is there ---------------------------------------------------------------------------------

    def _check_run(self, run: DumpRun) -> None:
        contents, unreadable = _RunContents(), []
        for stored in run.iterations:
            replicas = ReplicaChecksums(None if run.damage else run.manifest)
            for rank, number, file in stored.files():
                part = self._part(stored, rank, number, file)
                if part is None:
                    unreadable.append((file, rank, number))
                else:
                    names = tuple(e.name for e in part.index.entries)
                    contents.names.setdefault((rank, number), names)
                    contents.sites.update(e.site for e in part.index.entries)
                    replicas.add(rank, part)
                self.bar.advance(count_file_bytes([file]))
            self._replicas(stored, replicas)
            self._strays(stored.strays)
        self._strays(run.strays)
        for file, rank, number in unreadable:
            text, sites = self._lost(run, contents, rank, [number], rest=False)
            self._add_lost(file, text, sites)
        self._absent(run, contents)

    def _add_lost(self, file: Path, text: str, sites: tuple[str, ...]) -> None:
        """Add to the findings of an unreadable part what was in it, which the other parts of the run tell."""
        where = str(file.relative_to(self.path))
        for number, finding in enumerate(self.out.findings):
            if (finding.kind, finding.where) == ("header", where):
                text_with_lost = f"{finding.text}; lost: {text}"
                self.out.findings[number] = replace(finding, text=text_with_lost, sites=sites)

    def _part(self, stored: StoredIteration, rank: int, number: int, file: Path) -> StoredPart | None:
        about: dict[str, Any] = {"rank": rank, "iteration": stored.iteration}
        try:
            part = read_part(file)
        except DumpError as error:
            text = str(error).removeprefix(f"{file}: ")
            self._add("header", file, f"rank {rank}, iteration {stored.iteration}: {text}", **about)
            return None
        self.out.files += 1
        for text in _find_contradictions(stored, rank, number, part):
            self._add("contradiction", file, f"rank {rank}, iteration {stored.iteration}: {text}", **about)
        try:
            with file.open("rb") as handle:
                for entry in part.index.entries:
                    if entry.kind != REPLICA and (wrong := self._describe_wrong_blocks(handle, part, entry)):
                        text = (
                            f"rank {rank}, iteration {stored.iteration}: the checksum of "
                            f"{entry.name}"
                            f"{_format_entry_call(entry)} is wrong in {wrong}: its bytes are not those "
                            "that were written"
                        )
                        self._add("checksum", file, text, sites=(entry.name,), **about)
        except OSError as error:
            text = f"rank {rank}, iteration {stored.iteration}: cannot be read: {error.strerror or error}"
            self._add("header", file, text, **about)
            return None
        return part

    def _describe_wrong_blocks(self, handle: BinaryIO, part: StoredPart, entry: ShardEntry) -> str:
        """Which blocks of a tensor are not as they were written, in words; nothing if all are."""
        self.out.tensors += 1
        self.out.nbytes += part.where[entry.tensor][3]
        wrong = [str(number) for number in find_wrong_blocks(part, entry, handle)]
        return f"block {list_some(wrong, MAX_NAMES)} of {count_shard_blocks(part, entry)}" if wrong else ""

    def _replicas(self, stored: StoredIteration, replicas: ReplicaChecksums) -> None:
        self.out.replicas += replicas.compared
        for rank, owner, entry in replicas.differing():
            text = (
                f"iteration {stored.iteration}: rank {rank} held another "
                f"{entry.name}{_format_entry_call(entry)} than "
                f"rank {owner}, which wrote it: the replicas are out of step"
            )
            about: dict[str, Any] = {
                "rank": rank,
                "iteration": stored.iteration,
                "sites": (entry.name,),
            }
            self._add("replica", stored.folder, text, **about)

    def _strays(self, strays: Sequence[Path]) -> None:
        for path in strays:
            what = "a file that its writer did not finish" if is_draft(path) else "not of a dump"
            self._add("stray", path, f"{what}, {count_file_bytes([path])} bytes", error=False)

    # -- what is not -----------------------------------------------------------------------------------

    def _absent(self, run: DumpRun, contents: _RunContents) -> None:
        newest = run is self.runs[-1]
        for stored, rank, absent, stopped in list_missing_parts(run.iterations):
            if stopped and newest and self.live:
                continue
            in_another_run = stored.key in self.complete
            what, sites = self._lost(run, contents, rank, absent, rest=not stored.is_closed(rank))
            numbers = ", ".join(map(str, absent))
            if stopped:
                reason = f"rank {rank} stopped before its part {numbers}"
                text = f"iteration {stored.iteration} is incomplete: {reason}"
            else:
                text = f"iteration {stored.iteration}: part {numbers} of rank {rank} is missing"
            text += f"; lost: {what}" + ("; another run has it complete" if in_another_run else "")
            about: dict[str, Any] = {"rank": rank, "iteration": stored.iteration, "sites": sites}
            kind = "incomplete" if stopped else "missing"
            self._add(kind, stored.folder, text, error=not in_another_run, **about)
        if any(stored.complete for stored in run.iterations):
            for name in sorted(set(_map_stages(run)) - contents.sites):
                text = f"{name}: the manifest has it, and no part does: nothing was recorded there"
                self._add("contradiction", run.folder, text, error=False, sites=(name,))

    def _lost(
        self, run: DumpRun, contents: _RunContents, rank: int, numbers: Sequence[int], rest: bool
    ) -> tuple[str, tuple[str, ...]]:
        """What was in parts that are not there, from the same parts of other iterations."""
        last = numbers[-1]
        entry_names = [names for (r, n), names in sorted(contents.names.items())
                if r == rank and (n in numbers or (rest and n > last))]  # fmt: skip
        sites = tuple(dict.fromkeys(name for names in entry_names for name in names))
        if sites:
            return list_some(sites, MAX_NAMES), sites
        coords = {} if run.damage else dict(run.manifest.ranks).get(rank, {})
        stage = coords.get("pp", 0)
        sites = tuple(name for name, at in _map_stages(run).items() if at == stage)
        return (f"of {list_some(sites, MAX_NAMES)} what it wrote" if sites else "what it wrote"), sites


def _find_contradictions(stored: StoredIteration, rank: int, number: int, part: StoredPart) -> Iterator[str]:
    """Where a part, its name and the manifest disagree."""
    run, index = stored.run, part.index
    stated = index.rank, index.part, index.iteration, index.run_of
    if stated != (rank, number, *stored.key):
        yield "it says it is rank {}, part {}, iteration {}, run {} of it".format(*stated)
    for entry in index.entries:
        if not 0 <= entry.layout < len(index.layouts):
            yield f"{entry.name}: layout {entry.layout} of {len(index.layouts)}"
        elif len(list_dim_names(index.layouts[entry.layout])) != len(entry.shape):
            yield f"{entry.name}: a shape of {len(entry.shape)} dims, and a layout of others"
    if named := sorted(set(part.where) - {e.tensor for e in index.entries}):
        yield f"the tensor {named[0]!r} is not in its index"
    if run.damage:
        return
    coords = dict(run.manifest.ranks)
    if rank not in coords:
        yield f"the manifest has no rank {rank}"
    elif dict(index.coords) != dict(coords[rank]):
        yield f"coordinates {dict(index.coords)}; the manifest has {dict(coords[rank])}"
    known = _map_stages(run)
    of_sites = [e for e in index.entries if e.kind != ROUTING]  # which is of a layer, and not of a site
    for name in sorted({e.site.removesuffix(GRADIENT_SUFFIX) for e in of_sites} - set(known)):
        yield f"the manifest has no site or parameter {name!r}"
    stage = dict(index.coords).get("pp", 0)
    for name in sorted(
        {e.site for e in of_sites if e.kind in (VALUE, GRADIENT) and known.get(e.site, stage) != stage}
    ):
        yield f"{name} passed in stage {stage}, and the manifest has it in stage {known[name]}"


def _map_stages(run: DumpRun) -> dict[str, int]:
    """The stage of each site and parameter."""
    records = () if run.damage else (*run.manifest.sites, *run.manifest.parameters)
    return {record.name: record.stage for record in records}


def _format_entry_call(entry: ShardEntry) -> str:
    calls = f", call {entry.call}" if entry.call else ""
    return f" (microbatch {entry.microbatch}{calls})"
