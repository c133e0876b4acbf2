"""What a dump has: its runs, and its tensors with shapes, types, iterations and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_flex.document import Document, Renderable
from megatron_flex.dump.part_format import read_part
from megatron_flex.dump.reader import DumpArray, OpenDump
from megatron_flex.dump.reader.missing_parts import describe_gaps
from megatron_flex.dump.run_folders import DumpRun, count_file_bytes, list_runs, renamed_runs
from megatron_flex.dump.schema import (
    GRADIENT,
    PARAMETER_GRADIENT,
    REPLICA,
    ROUTING,
    VALUE,
    ShardEntry,
    list_dim_names,
)
from megatron_flex.dump.tools.contents_table import describe_contents
from megatron_flex.errors import DumpError
from megatron_flex.progress import track
from megatron_flex.sites import GRADIENT_SUFFIX


@dataclass(slots=True)
class RunRow:
    """A run of a dump.

    Attributes:
        number: of the run.
        created: when, in UTC.
        framework: the adapter's name.
        mesh: axis name to size.
        ranks: how many write.
        whole: iterations that all of them have closed.
        incomplete: iterations that some have not.
        nbytes: of all its files.
        damage: why its manifest cannot be read.
    """

    number: int
    created: str = ""
    framework: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 0
    whole: list[int] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)
    nbytes: int = 0
    damage: str = ""


@dataclass(slots=True)
class TensorRow:
    """A tensor of a dump, over all complete iterations.

    Attributes:
        name: of the site or parameter; of a gradient with `.grad`.
        kind: `site` or `parameter`.
        dims: the names of the axes of the full tensor, without iterations.
        shape: likewise, in the first iteration; without one a name where it depends on the data.
        dtype: as it is stored.
        layout: how ranks held it.
        iterations: those that contain it.
        nbytes: on disk, over all ranks and runs.
        problem: why it cannot be read.
    """

    name: str
    kind: str
    dims: Sequence[str] = ()
    shape: Sequence[int | str] = ()
    dtype: str = ""
    layout: str = ""
    iterations: Sequence[int] = ()
    nbytes: int = 0
    problem: str = ""


@dataclass(slots=True)
class DumpContents(Renderable):
    """What a dump has.

    Attributes:
        runs: in order.
        tensors: sites in model order, then parameters.
        iterations: that some run has whole.
        nbytes: of all files.
        notes: what is not there though others suggest it, a line for each.
    """

    runs: list[RunRow]
    tensors: list[TensorRow]
    iterations: list[int]
    nbytes: int
    notes: list[str] = field(default_factory=list)

    def to_document(self, path: str = "", every: bool = True) -> Document:
        """Return runs, sites and parameters as tables.

        Args:
            path: of the dump.
            every: a row for each layer, even if layers are alike.
        """
        return describe_contents(self, path, every)

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


def list_dump_contents(path: Path) -> DumpContents:
    """What a dump has, by its manifests and the headers of its files; damage is listed, not raised.

    Raises:
        DumpError: the path has no dump.
    """
    runs = list_runs(path)
    rows = [_make_run_row(run) for run in runs]
    sizes = _sum_bytes(runs)
    tensors: list[TensorRow] = []
    replaced: list[str] = []
    iterations: list[int] = sorted({n for row in rows for n in row.whole})
    if any(not run.damage for run in runs):
        with QuietDump(path, check="never") as dump:
            replaced = dump.replaced
            tensors = [_make_tensor_row(dump, name, "site", sizes) for name in list_site_names(dump)]
            tensors += [
                _make_tensor_row(dump, name, "parameter", sizes) for name in list_parameter_names(dump)
            ]
    misnamed = [run for run in runs if not run.damage and run.contradiction]
    notes = [f"{run.folder.name}: {run.contradiction}" for run in misnamed]
    notes += [one.text for one in renamed_runs(path)]
    text = describe_gaps(runs)
    notes += [text] if text else []
    notes += replaced
    return DumpContents(rows, tensors, iterations, sum(row.nbytes for row in rows), notes)


class QuietDump(OpenDump):
    """A dump's runs whose manifests can be read, without warnings: who opens it lists what is incomplete."""

    _warns = False

    def _list_runs(self) -> list[DumpRun]:
        return [run for run in list_runs(self.path) if not run.damage]


def _make_run_row(run: DumpRun) -> RunRow:
    row = RunRow(run.number, ranks=len(run.writers), damage=run.damage)
    row.nbytes = sum(stored.count_bytes() for stored in run.iterations) + count_file_bytes(run.strays)
    for stored in run.iterations:
        numbers = row.whole if stored.complete else row.incomplete
        if stored.iteration not in numbers:
            numbers.append(stored.iteration)
    if not run.damage:
        row.created, row.framework, row.mesh = run.manifest.created, run.manifest.framework, run.sizes
    return row


def _sum_bytes(runs: Sequence[DumpRun]) -> Counter[str]:
    """Bytes on disk by name, of what can be read."""
    out: Counter[str] = Counter()
    files = [path for run in runs for stored in run.iterations for _, _, path in stored.files()]
    for path in track(files, "reading headers", unit="files"):
        try:
            part = read_part(path)
        except DumpError:
            continue  # `verify` is who tells
        for entry in part.index.entries:
            if entry.kind not in (REPLICA, ROUTING):
                size = part.where[entry.tensor][3]
                out[entry.name] += size
                out[f"{entry.name}#{entry.call}"] += size
    return out


def _make_tensor_row(dump: OpenDump, name: str, kind: str, sizes: Counter[str]) -> TensorRow:
    row = TensorRow(name, kind, nbytes=sizes[name])
    if not dump.iteration_keys:  # then only what was known before the run is
        record = dump.site_record(name)
        row.dims = list_dim_names(record.layout)
        row.shape = list(record.shape)
        return row
    try:
        array = get_named_array(dump, name)
        row.dims, row.shape = array.dims[1:], array.shape[1:]
        row.dtype = str(array.dtype).removeprefix("torch.")
        row.layout, row.iterations = array.layout, array.iterations
    except DumpError as error:
        row.problem = str(error)
    return row


def list_site_names(dump: OpenDump) -> list[str]:
    """The sites, and gradients as `NAME.grad`; of a site that is passed several times `NAME#0`, `NAME#1`."""
    out = []
    for name in dump.sites:
        calls = _list_calls(dump, name)
        out += [f"{name}#{call}" for call in calls] if len(calls) > 1 else [name]
    return out


def list_parameter_names(dump: OpenDump) -> list[str]:
    """The parameters, each followed by its gradient as `NAME.grad` if that was dumped."""
    out = []
    for name in dump.parameters:
        out.append(name)
        trained = [p for p in dump.iteration_keys if dump.has_gradients(p)][:1]
        if any(True for p in trained for _ in _iterate_entries(dump, p, name, PARAMETER_GRADIENT)):
            out.append(name + GRADIENT_SUFFIX)
    return out


def get_named_array(dump: OpenDump, name: str) -> DumpArray:
    """The array of a name from `list_site_names` or `list_parameter_names`.

    Raises:
        DumpError: there is none of that name.
    """
    site, _, call = name.rpartition("#")
    if site and call.isdigit():
        return dump[site, int(call)]
    if name not in dump and name.removesuffix(GRADIENT_SUFFIX) in dump.parameters:
        return dump.parameter(name.removesuffix(GRADIENT_SUFFIX), gradient=name.endswith(GRADIENT_SUFFIX))
    return dump[name]


def _list_calls(dump: OpenDump, name: str) -> list[int]:
    """The passes through a site in a microbatch, in the first iteration."""
    site, kind = (
        (name, VALUE) if name in dump.site_records else (name.removesuffix(GRADIENT_SUFFIX), GRADIENT)
    )
    first = [p for p in dump.iteration_keys if kind == VALUE or dump.has_gradients(p)][:1]
    return sorted({entry.call for p in first for entry in _iterate_entries(dump, p, site, kind)})


def _iterate_entries(dump: OpenDump, which: tuple[int, int], name: str, kind: str) -> Iterator[ShardEntry]:
    written, record = dump.stored_iteration(which), dump.site_record(name)
    for replica in written.run.replicas:
        for _, entry, _, _ in dump.entries(written, name, kind, record.stage, replica):
            yield entry
