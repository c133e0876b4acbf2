"""One file of a dump: safetensors, with an index of what its tensors are and checksums in the metadata.

Where files lie:

    PATH/run-0000/manifest.json                            what all ranks have in common, once for each run
    PATH/run-0000/0000000100/00003-000.safetensors         what rank 3 wrote of iteration 100, first part
    PATH/run-0000/0000000100/00003-001-of-002.safetensors  the second, which is the last

A part has its name only once it is whole. An iteration is there if each rank's last part is, whose name says
how many there are, and all before it.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.json_form import INDEX_FORM, META_FORM, TENSOR_FORM, check_form, load_json
from megatron_flex.errors import DumpError

DUMP_FORMAT, DUMP_VERSION = "megatron_flex.dump", 1
MANIFEST_NAME = "manifest.json"
TENSOR_ALIGNMENT = 64  # bytes; each tensor begins at a multiple of it, counted from the first
MOST_HEADER_BYTES = 100 << 20  # bytes, as safetensors has it
MOST_TOKENS = 1 << 26  # of a tensor of which only some are written; nobody has more in a microbatch
DTYPE_NAMES = {  # safetensors' names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ITERATION_FOLDER = re.compile(r"([0-9]{10,18})(?:\.([0-9]{1,9}))?")
PART_NAME = re.compile(r"([0-9]{5,12})-([0-9]{3,9})(?:-of-([0-9]{3,9}))?\.safetensors")

VALUE, GRADIENT, PARAMETER, PARAMETER_GRADIENT, ROUTING, REPLICA = (
    "value",
    "gradient",
    "parameter",
    "parameter_gradient",
    "routing",
    "replica",
)


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard in a part: of which tensor, and how it lies in the whole.

    Attributes:
        site: the name of the site or parameter.
        kind: `value`, `gradient`, `parameter`, `parameter_gradient`; `routing`, where experts' rows go;
            `replica`, of which only the checksum is there.
        microbatch: of this data parallel rank; 0 for parameters.
        call: the pass through the site within the microbatch.
        layout: index into the part's layouts: of the shard as it was before tokens and samples were picked.
        shape: of that shard.
        dtype: as safetensors names it; of what is written.
        picked: whether its tokens and samples were picked: `[kept, ...]` is written then.
        span: the entries, counted flat, that are written; None for all.
        crc: CRC-32 of its bytes.
        route: of experts' rows `{"of": the layer, "expert": its number or None}`; of a decision what beside
            its bits tells where rows go (dump/routing.py); None of every other tensor.
        turn: how many tensors passed on the rank before it in the iteration, also those that others write.
    """

    site: str
    kind: str
    microbatch: int
    call: int
    layout: int
    shape: tuple[int, ...]
    dtype: str
    picked: bool = False
    span: tuple[int, int] | None = None
    crc: int = 0
    route: dict[str, Any] | None = None
    turn: int = 0

    @property
    def tensor(self) -> str:
        """The tensor's name in the file."""
        end = "" if self.span is None else f"|{self.span[0]}"
        return f"{self.site}|{self.kind}|{self.microbatch}|{self.call}{end}"


@dataclass(frozen=True, slots=True)
class PartIndex:
    """What a part says of itself.

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
        entries: the shards, in the order in which they passed.
    """

    rank: int
    coords: Mapping[str, int]
    iteration: int
    run_of: int
    training: bool
    microbatches: int
    part: int
    parts: int
    layouts: Sequence[dict[str, Any]] = ()
    entries: Sequence[ShardEntry] = field(default=())


def format_run_folder(number: int) -> str:
    """The folder of a run."""
    return f"run-{number:04d}"


def format_iteration_folder(iteration: int, run_of: int = 0) -> str:
    """The folder of an iteration, or of a further run of the schedule in it."""
    return f"{iteration:010d}" + (f".{run_of}" if run_of else "")


def parse_iteration_folder(folder: str) -> tuple[int, int] | None:
    """The number of an iteration, and which run of the schedule, by the name of its folder."""
    found = _ITERATION_FOLDER.fullmatch(folder)
    if found is None:
        return None
    out = int(found[1]), int(found[2] or 0)
    return out if format_iteration_folder(*out) == folder else None


def format_part_name(rank: int, part: int, parts: int = 0) -> str:
    """The file of a part; the last of a rank's iteration has how many there are in its name."""
    end = f"-of-{parts:03d}" if parts else ""
    return f"{rank:05d}-{part:03d}{end}.safetensors"


def parse_part_name(name: str) -> tuple[int, int, int] | None:
    """Rank, part and parts (0 in all but the last) by the name of a file; None if it is no part's."""
    found = PART_NAME.fullmatch(name)
    if found is None:
        return None
    out = int(found[1]), int(found[2]), int(found[3] or 0)
    return out if format_part_name(*out) == name else None


def list_complete_parts(folder: Path, ranks: Sequence[int]) -> dict[int, list[Path]] | None:
    """Rank to its parts in order, of an iteration that all `ranks` have closed; None if they have not.

    By the files' names alone.

    Raises:
        OSError: the folder cannot be read.
    """
    present: dict[int, set[int]] = {rank: set() for rank in ranks}
    counts: dict[int, int] = {}
    for name in os.listdir(folder):
        if (found := parse_part_name(name)) is not None and found[0] in present:
            rank, part, parts = found
            present[rank].add(part)
            counts[rank] = max(counts.get(rank, 0), parts)
    for rank, numbers in present.items():
        if not counts.get(rank) or numbers != set(range(counts[rank])):
            return None
    return {
        rank: [folder / format_part_name(rank, n, count * (n == count - 1)) for n in range(count)]
        for rank, count in sorted(counts.items())
    }


def build_header(index: PartIndex, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[bytes, list[int]]:
    """The bytes in front of a part's tensors, and the offset of each behind them.

    Args:
        index: of the part.
        shapes: of the tensors of the entries that have one, in order.
        sizes: their bytes.
    """
    told: dict[str, Any] = {}
    at, offsets = 0, []
    written = [e for e in index.entries if e.kind != REPLICA]
    for entry, shape, size in zip(written, shapes, sizes, strict=True):
        told[entry.tensor] = {"dtype": entry.dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        offsets.append(at)
        at += size
    text = json.dumps(asdict(index), separators=(",", ":"))
    crc = zlib.crc32(json.dumps(told, separators=(",", ":")).encode() + text.encode())
    meta = {"format": f"{DUMP_FORMAT}/{DUMP_VERSION}", "index": text, "crc": str(crc)}
    body = json.dumps({"__metadata__": meta, **told}, separators=(",", ":")).encode()
    body += b" " * (-(len(body) + 8) % TENSOR_ALIGNMENT)
    return struct.pack("<Q", len(body)) + body, offsets


TensorSpans = Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as it was read: its index, and where its tensors are.

    Attributes:
        path: the file.
        index: what it says of itself.
        where: for each tensor dtype, shape, first byte in the file, bytes.
    """

    path: Path
    index: PartIndex
    where: TensorSpans


def read_part(path: Path) -> StoredPart:
    """Read the header of a part.

    Raises:
        DumpError: it is no part of a dump, or a damaged one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            front = file.read(8)
            length = struct.unpack("<Q", front)[0] if len(front) == 8 else -1
            if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
                raise DumpError(f"{path}: a header of {length} bytes in a file of {size}: it is damaged")
            body = file.read(length)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return _parse_header(path, body, size - 8 - length, 8 + length)
    except DumpError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DumpError(f"{path}: its header is no dump's: {str(error)[:200]}; it is damaged") from error


def _parse_header(path: Path, body: bytes, room: int, start: int) -> StoredPart:
    told = load_json(body)
    check_form(told, "object")
    meta = told.pop("__metadata__")
    check_form(meta, META_FORM)
    if meta["format"] != f"{DUMP_FORMAT}/{DUMP_VERSION}":
        raise DumpError(
            f"{path}: format {meta['format'][:60]!r}; this version reads {DUMP_FORMAT}/{DUMP_VERSION}: "
            "read it with the megatron_flex that wrote it, or a newer one"
        )
    text = meta["index"]
    if f"{zlib.crc32(json.dumps(told, separators=(',', ':')).encode() + text.encode())}" != meta["crc"]:
        raise DumpError(f"{path}: the checksum of its header is wrong: it is damaged")
    where = _parse_spans(told, room, start)
    found = load_json(text)
    check_form(found, INDEX_FORM)
    entries = tuple(_parse_entry(e) for e in found.pop("entries"))
    index = PartIndex(**{**found, "entries": entries})
    for entry in entries:
        if entry.kind != REPLICA:
            _check_stored(entry, where)
    return StoredPart(path, index, where)


def _parse_spans(told: dict[str, Any], room: int, start: int) -> TensorSpans:
    """Where the tensors lie: one behind the other, and nothing else."""
    where, end = {}, 0
    for name, one in told.items():
        check_form(one, TENSOR_FORM, name[:80])
        dtype, shape = NAMED_DTYPES[one["dtype"]], tuple(one["shape"])
        first, last = one["data_offsets"]
        count = dtype.itemsize
        for n in shape:
            count *= n
        if min(shape, default=0) < 0 or first != end or last - first != count or last > room:
            raise ValueError(f"{name[:80]!r} does not lie in the file as it says")
        where[name] = dtype, shape, start + first, count
        end = last
    if end != room:
        raise ValueError(f"{room - end} bytes behind its tensors")
    return where


def _parse_entry(told: dict[str, Any]) -> ShardEntry:
    span = told["span"]
    if span is not None:
        check_form(span, ["int"])
        first, last = span
        span = first, last
    return ShardEntry(**{**told, "shape": tuple(told["shape"]), "span": span})


def _check_stored(entry: ShardEntry, where: TensorSpans) -> None:
    """An entry's shape is as large as its tensor, or as what was picked or cut out of it can be."""
    name, shape = entry.tensor, entry.shape
    if name not in where:
        raise ValueError(f"no tensor {name[:80]!r}, which its index has")
    _, stored, _, _ = where[name]
    if NAMED_DTYPES.get(entry.dtype) != where[name][0] or min((*shape, entry.microbatch, entry.call)) < 0:
        raise ValueError(f"{name[:80]!r} is not what its index says")
    fits = True
    if entry.span is not None:
        first, last = entry.span
        fits = 0 <= first <= last <= prod(shape) and stored == (last - first,) and not entry.picked
    elif entry.picked:
        fits = bool(stored) and prod(max(n, 1) for n in shape) <= prod(stored[1:]) * MOST_TOKENS
    elif entry.kind != ROUTING:
        fits = stored == shape and (prod(shape) > 0 or prod(max(n, 1) for n in shape) <= MOST_TOKENS)
    if not fits:
        raise ValueError(f"{name[:80]!r} has shape {stored}, and its index says {shape}")
