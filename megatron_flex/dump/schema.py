"""The schema of a dump: each document is a dataclass here, and its forms on disk are derived from the fields.

A new field is one line in its class. `stored` declares exceptions, such as a default that is left out. A
changed form needs another `DUMP_VERSION`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from megatron_flex.checksums import ZERO_CHECKSUM, is_sealed, seal_json
from megatron_flex.dump.file_names import DRAFT_SUFFIX, MANIFEST_NAME
from megatron_flex.dump.json_form import (
    CONTROL_CHARACTER,
    MAX_DIMS,
    Form,
    check_form,
    derive_form,
    from_json,
    load_json,
    pick_known,
    remove_fields,
    stored,
    stringify_nonfinite,
    to_json,
)
from megatron_flex.errors import DumpError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.sites import GRADIENT_SUFFIX

DUMP_FORMAT, DUMP_VERSION = "megatron_flex.dump", 3
VALUE, GRADIENT, PARAMETER, PARAMETER_GRADIENT, ROUTING, REPLICA = (
    "value",
    "gradient",
    "parameter",
    "parameter_gradient",
    "routing",
    "replica",
)


CUT_FORM, DIM_FORM, LAYOUT_FORM = (derive_form(kind, brief=True) for kind in (Cut, Dim, Layout))


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """A hook point, or a parameter, of the dump.

    Attributes:
        name: the global name.
        layout: the layout in plain JSON values.
        shape: of the full tensor; a name (`s`, `b`) for a dim whose length depends on the data.
        stage: the pipeline stage that owns the tensor.
        chunk: the virtual chunk of that stage.
        inferred: whether the layout was unknown before the run; then each part records the inferred one.
        axes: the meaning of the dims (`sequence`, `batch`, `hidden`), by their names in the layout.
    """

    name: str
    layout: dict[str, Any] = field(metadata=stored(form=LAYOUT_FORM))
    shape: Sequence[int | str]
    stage: int = 0
    chunk: int = 0
    inferred: bool = False
    axes: Mapping[str, str] = field(default_factory=dict, metadata=stored(optional=True))

    def __post_init__(self) -> None:
        if CONTROL_CHARACTER.search(self.name):
            raise DumpError(f"{self.name!r} cannot be dumped: it has a control character; rename the module")


MEGATRON = "megatron-core"  # the framework whose training loop counts from 1 in its log
ITERATION_NUMBERS = (
    "iterations count from 0: iteration N is N + 1 in Megatron's log, in TensorBoard and in W&B"
)


@dataclass(frozen=True, slots=True)
class ManifestFront:
    """The keys of a manifest before those of `Manifest`.

    Attributes:
        format: the name of the format.
        version: of the format.
        checksum: of the text of the manifest.
    """

    format: str
    version: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a run.

    Attributes:
        run: the number of the run.
        created: the time, in UTC, ISO 8601.
        versions: of the packages that wrote the run.
        framework: the adapter's name.
        axes: the mesh, name to size, from the outermost to the innermost.
        experts: the second division of the ranks, for layers of experts.
        ranks: each rank's number and coordinates.
        model: the framework's config of the model, restricted to plain values.
        identity: a digest of the names and full shapes of all parameters.
        sites: the dumped hook points, in model order.
        parameters: the dumped parameters, in model order.
        settings: of the Dump.
        skipped: iterations that a run of an earlier release left to the runs before it.
        layers: the kinds of the model's layers, as `layer_pattern` returns them; empty if the model has no
            decoder.
        left_out: parameters that patterns of the Dump match and no file has, with the reason.
    """

    run: int
    created: str
    versions: Mapping[str, str]
    framework: str
    axes: Mapping[str, int]
    experts: Mapping[str, int]
    ranks: Sequence[tuple[int, Mapping[str, int]]] = field(metadata=stored(form=["list"]))
    model: Mapping[str, Any]
    identity: str
    sites: Sequence[SiteRecord]
    parameters: Sequence[SiteRecord]
    settings: Mapping[str, Any]
    skipped: Sequence[str] = ()
    layers: str = field(default="", metadata=stored(omitted=True))
    left_out: Mapping[str, str] = field(default_factory=dict, metadata=stored(omitted=True))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of ranks by axis name."""
        return {**self.axes, **self.experts}

    @property
    def writers(self) -> dict[int, Mapping[str, int]]:
        """The ranks that write part files, with their coordinates."""
        return {rank: coords for rank, coords in self.ranks if self.writes(coords)}

    def writes(self, coords: Mapping[str, int]) -> bool:
        """Whether a rank at these coordinates writes part files: its pipeline stage has something recorded.

        With checksums of replicas all ranks do, as a stage may hold a copy of another stage's parameter.
        """
        stage = coords.get("pp", 0)
        recorded = any(place.stage == stage for place in (*self.sites, *self.parameters))
        return recorded or bool(self.settings.get("replicas"))

    def write(self, folder: Path) -> None:
        """Write the manifest atomically."""
        front = ManifestFront(DUMP_FORMAT, DUMP_VERSION, ZERO_CHECKSUM.decode())
        record = stringify_nonfinite({**to_json(front), **to_json(self)})
        path = folder / (MANIFEST_NAME + DRAFT_SUFFIX)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:  # and not through a link that somebody has put there
            file.write(seal_json(json.dumps(record, indent=1, allow_nan=False).encode()))
            file.flush()
            os.fsync(file.fileno())
        path.rename(folder / MANIFEST_NAME)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest in a run's folder.

        Raises:
            DumpError: the manifest is missing, damaged or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            text = path.read_bytes()
            record = load_json(text)
            front = pick_known(ManifestFront, record)
            if front.format != DUMP_FORMAT:
                raise DumpError(f"{path}: not a manifest of a dump", path=path)
            if front.version != DUMP_VERSION:
                raise DumpError(f"{path}: {describe_version(front.version)}", path=path)
            if not is_sealed(text):
                raise DumpError(
                    f"{path}: its checksum is wrong: it is damaged, or somebody changed it", path=path
                )
            check_form(record, FORMS["MANIFEST"])
            manifest = from_json(Manifest, remove_fields(record, ManifestFront))
            manifest = replace(manifest, ranks=tuple(_parse_rank(one) for one in manifest.ranks))
            _check_ranks(manifest)
            return manifest
        except DumpError:
            raise
        except OSError as error:
            raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DumpError(
                f"{path}: no manifest of a dump, or a damaged one: {error!r}", path=path
            ) from error


def describe_version(version: Any) -> str:
    """What is wrong with a version that is not read, and what to do."""
    return (
        f"version {str(version)[:20]} of the format; this megatron_flex reads version {DUMP_VERSION}: use "
        "the megatron_flex that wrote it, or dump again"
    )


def _parse_rank(record: Any) -> tuple[int, dict[str, int]]:
    check_form(record, "list")
    rank, coords = record
    check_form(rank, "int")
    check_form(coords, {"*": "int"})
    return rank, coords


def _check_ranks(manifest: Manifest) -> None:
    """Check that every rank has coordinates on the mesh, and that the mesh has no further coordinates."""
    ranks, sizes = manifest.ranks, manifest.sizes
    if len({rank for rank, _ in ranks}) != len(ranks) or any(rank < 0 for rank, _ in ranks) or not ranks:
        raise ValueError("a rank occurs twice, or there are no ranks")
    for axes in (manifest.axes, manifest.experts):
        if min(axes.values(), default=1) < 1 or prod(axes.values()) > len(ranks):
            raise ValueError(f"axes {dict(axes)} of {len(ranks)} ranks")
    for rank, coords in ranks:
        if any(not 0 <= at < sizes.get(axis, 0) for axis, at in coords.items()):
            raise ValueError(f"rank {rank} at {coords} of {dict(sizes)}")
    if len({tuple(coords.get(a, 0) for a in manifest.axes) for _, coords in ranks}) != len(ranks):
        raise ValueError("two ranks at one place")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard in a part: of which tensor, and which part of the full tensor.

    Attributes:
        site: the name of the site or parameter.
        kind: `value`, `gradient`, `parameter`, `parameter_gradient`; `routing`, where experts' rows go;
            `replica`, of which only the checksum is stored.
        microbatch: of this data parallel rank; 0 for parameters.
        call: the pass through the site within the microbatch.
        layout: index into the part's layouts: of the shard as it was before tokens and samples were picked.
        shape: of that shard.
        dtype: as safetensors names it; of what is written.
        picked: whether its tokens and samples were picked: `[kept, ...]` is written then.
        span: the entries, counted flat, that are written; None for all.
        checksum: of its bytes: that of the text of its blocks' checksums.
        blocks: the checksums of its blocks, one after the other; none of a replica.
        route: of experts' rows a `RowsRoute`; of a router's decision a `RouterRecord`; None of every other
            tensor.
        turn: how many tensors the rank captured before it in the iteration, those that others write included.
        request: the request that a server answered with it; None in training. One of a microbatch and call.
        axes: the meaning of its dims, by their names in the layout, where the manifest has none.
    """

    site: str
    kind: str
    microbatch: int
    call: int
    layout: int
    shape: tuple[int, ...]
    dtype: str
    picked: bool = field(default=False, metadata=stored(omitted=True))
    span: tuple[int, int] | None = field(default=None, metadata=stored(omitted=True))
    checksum: str = ""
    route: dict[str, Any] | None = field(default=None, metadata=stored(form="object", omitted=True))
    turn: int = 0
    blocks: str = field(default="", metadata=stored(omitted=True))
    request: str | None = field(default=None, metadata=stored(omitted=True))
    axes: Mapping[str, str] | None = field(default=None, metadata=stored(omitted=True))

    @property
    def tensor(self) -> str:
        """The name of the tensor in the file."""
        end = "" if self.span is None else f"|{self.span[0]}"
        return f"{self.site}|{self.kind}|{self.microbatch}|{self.call}{end}"

    @property
    def name(self) -> str:
        """The hook point or parameter; with `.grad` for its gradient."""
        return self.site + (GRADIENT_SUFFIX if self.kind in (GRADIENT, PARAMETER_GRADIENT) else "")


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The index of a part.

    Attributes:
        rank: who wrote it.
        coords: the rank's coordinates.
        iteration: the framework's number.
        run_of: which run of the schedule in that iteration, from 0.
        training: whether gradients were made.
        microbatches: how many the data parallel rank had; 0 if that is not known.
        part: its number.
        parts: how many there are, in the last of them; 0 in the others.
        layouts: in JSON's values.
        entries: the shards, in the order in which they were captured.
    """

    rank: int
    coords: Mapping[str, int]
    iteration: int
    run_of: int
    training: bool
    microbatches: int
    part: int
    parts: int
    layouts: Sequence[dict[str, Any]] = field(default=(), metadata=stored(form=[LAYOUT_FORM]))
    entries: Sequence[ShardEntry] = ()


@dataclass(frozen=True, slots=True)
class PartMetadata:
    """The metadata of a part, as safetensors has it: texts by name.

    Attributes:
        format: the name of the format, and its version.
        checksum: of the header.
        index: a `PartIndex` as JSON.
    """

    format: str
    checksum: str = ""
    index: str = ""


@dataclass(frozen=True, slots=True)
class StoredTensorSpan:
    """Where a tensor is in a part, as safetensors has it.

    Attributes:
        dtype: as safetensors names it.
        shape: of the tensor.
        data_offsets: of its first byte, and of the byte after its last one.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RowsRoute:
    """The `route` of an entry that has rows of experts.

    Attributes:
        of: the layer whose routers sent them.
        expert: its number, if all rows are of one expert.
    """

    of: str | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """The `route` of an entry that has the decision of a router, as bits.

    Attributes:
        experts: how many there are to choose from.
        shape: `(s, b)` of the tokens.
        slots: experts of a token, at most.
        stream: the layout of the tokens, a document of its own.
        etp_outer: whether the axis of expert tensor parallelism is outside that of experts.
    """

    experts: int
    shape: tuple[int, int]
    slots: int
    stream: dict[str, Any]
    etp_outer: bool


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """A selection of every n-th number: start, stop and step."""

    slice: list[int | None]


@dataclass(frozen=True, slots=True)
class RandomRecord:
    """A selection of positions at random.

    Attributes:
        sampled: the `count` of `RandomTokens`.
        seed: of `RandomTokens`.
        method: how positions were drawn.
    """

    sampled: int
    seed: int
    method: str = ""


FORMS: dict[str, Form] = {
    "META": derive_form(PartMetadata),
    "INDEX": derive_form(PartIndex),
    "MANIFEST": derive_form(ManifestFront) | derive_form(Manifest),
}
TENSOR_FORM = derive_form(StoredTensorSpan)

MAX_SEGMENTS = 4096  # of a dim: packed projections have a few, and as many as pieces at most
MAX_SEQUENCES = 1 << 16  # of a pack
DIM_MEANINGS = {
    "s": "sequence",
    "b": "batch",
    "h": "hidden",
    "n": "heads",
    "g": "query groups",
    "d": "head width",
    "v": "vocabulary",
    "k": "experts of a token",
    "t": "rows",
    "gate|up": "feed-forward, gate and up",
    "q|k|v": "queries, keys and values",
}


def describe_dims(layout: Layout) -> dict[str, str]:
    """Return the meaning of the dims of a layout, by name; unknown names are left out."""
    return {d.name: DIM_MEANINGS[d.name] for d in layout.dims if d.name in DIM_MEANINGS}


def list_dim_names(layout: Mapping[str, Any]) -> list[str]:
    """List the names of the dims of a layout's document, which may be damaged."""
    return [str(dim.get("name", "")) for dim in layout.get("dims", ())]


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Convert a layout to plain values; fields that have their default are left out."""
    return to_json(layout, brief=True)


def layout_from_json(record: Any) -> Layout:
    """Convert the result of `layout_to_json` back to a layout.

    Raises:
        LayoutError: no layout has these values.
        ValueError: the document does not describe a layout.
    """
    check_form(record, LAYOUT_FORM)
    layout = from_json(Layout, record)
    if len(layout.dims) > MAX_DIMS:
        raise ValueError(f"a layout of {len(layout.dims)} dims")
    for dim in layout.dims:
        _check_dim(dim)
    return layout


def _check_dim(dim: Dim) -> None:
    if len(dim.segments) > MAX_SEGMENTS or len(dim.cuts) > MAX_DIMS:
        raise ValueError(f"a dim of {len(dim.segments)} segments and {len(dim.cuts)} cuts")
    if min(dim.segments, default=0) < 1 or (dim.keep is not None and dim.keep < 0):
        raise ValueError(f"segments {dim.segments}, of which {dim.keep} are kept")
    ends = [0, *(n for span in dim.sequences for n in span)]
    if len(dim.sequences) > MAX_SEQUENCES or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"packed sequences {dim.sequences!s:.100} that are not one behind the other")
    for cut in dim.cuts:
        if len(cut.segments) > MAX_SEQUENCES or min(cut.segments, default=0) < 1:
            raise ValueError(f"a cut in segments {cut.segments!s:.100}, which must have a length each")
        if cut.order not in ("contiguous", "zigzag"):
            raise ValueError(f"order {cut.order!r} is not contiguous or zigzag")
        if cut.copies < 1:
            raise ValueError(f"{cut.copies} copies")
