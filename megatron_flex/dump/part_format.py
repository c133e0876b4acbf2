"""One file of a dump: safetensors, with an index of what its tensors are and checksums in the metadata.

docs/dump-format.md describes the file byte by byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checksums import (
    CHECKSUM_BLOCK,
    CHECKSUM_DIGITS,
    ZERO_CHECKSUM,
    combine_block_checksums,
    count_checksum_blocks,
    is_sealed,
    seal_json,
)
from megatron_flex.dump.json_form import MAX_DIMS, check_form, from_json, load_json, pick_known, to_json
from megatron_flex.dump.schema import (
    DUMP_FORMAT,
    DUMP_VERSION,
    FORMS,
    REPLICA,
    ROUTING,
    TENSOR_FORM,
    PartIndex,
    PartMetadata,
    ShardEntry,
    StoredTensorSpan,
    describe_version,
)
from megatron_flex.errors import DumpError

METADATA_KEY = "__metadata__"  # of a header, as safetensors has it
TENSOR_ALIGNMENT = 64  # bytes; each tensor begins at a multiple of it, counted from the first
PART_BYTES = 32 << 20  # about the bytes of one part by default: while it is written, the next one fills
MIN_FIRST_PART_BYTES = 8 << 20  # unless parts are smaller; less is copied before a thread has begun
MAX_HEADER_BYTES = 100 << 20  # bytes, as safetensors has it
MAX_TOKENS = 1 << 23  # of a tensor of which only some are written; nobody has more in a microbatch
MAX_CLAIMED = 1 << 24  # rows of all such tensors of a part, of each shape once; and CLAIMED for each byte
CLAIMED_PER_BYTE = 64
MAX_EMPTY_ROWS = 1 << 20  # rows of tensors without a value
DTYPE_NAMES = {  # safetensors' names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def compute_part_limit(part: int, part_bytes: int) -> int:
    """About the bytes of a part: half of `part_bytes` for the first one, so that writing begins early.

    Args:
        part: its number.
        part_bytes: as for `Dump`.
    """
    return part_bytes if part else min(part_bytes, max(part_bytes // 2, MIN_FIRST_PART_BYTES))


class PartHeader:
    """The bytes before a part's tensors. Their number is known before the checksums are.

    So a writer can compute the checksum of a block and write the block while the CPU's cache has it, and
    write the header last.

    Args:
        index: of the part; the checksums of its entries are left open.
        shapes: of the tensors of the entries that have one, in order.
        sizes: the bytes of each entry's tensor, those of replicas included.
    """

    def __init__(self, index: PartIndex, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
        pairs = list(zip(index.entries, sizes, strict=True))
        self._index = to_json(replace(index, entries=[_leave_checksums_open(e, n) for e, n in pairs]))
        self._tensors: dict[str, Any] = {}
        at = 0
        written = [(entry, size) for entry, size in pairs if entry.kind != REPLICA]
        for (entry, size), shape in zip(written, shapes, strict=True):
            self._tensors[entry.tensor] = to_json(StoredTensorSpan(entry.dtype, shape, (at, at + size)))
            at += size
        self.nbytes = len(self.encode())

    def set_checksums(self, number: int, blocks: str) -> None:
        """Set those of an entry by those of its blocks; of a replica only that of all of them is kept."""
        record = self._index["entries"][number]
        record["checksum"] = combine_block_checksums(blocks)
        if "blocks" in record:
            record["blocks"] = blocks

    def encode(self) -> bytes:
        """The header as it is in the file."""
        text = json.dumps(self._index, separators=(",", ":"))
        meta = PartMetadata(f"{DUMP_FORMAT}/{DUMP_VERSION}", ZERO_CHECKSUM.decode(), text)
        content = {METADATA_KEY: to_json(meta), **self._tensors}
        body = json.dumps(content, separators=(",", ":")).encode()
        body += b" " * (-(len(body) + 8) % TENSOR_ALIGNMENT)
        return struct.pack("<Q", len(body)) + seal_json(body)


def _leave_checksums_open(entry: ShardEntry, nbytes: int) -> ShardEntry:
    """An entry with zeros in the place of its checksums."""
    zeros = ZERO_CHECKSUM.decode()
    blocks = "" if entry.kind == REPLICA else zeros * count_checksum_blocks(nbytes)
    return replace(entry, checksum=zeros, blocks=blocks)


TensorSpans = Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as it was read: its index, and where its tensors are.

    Attributes:
        path: the file.
        index: the metadata of the part.
        where: for each tensor dtype, shape, first byte in the file, bytes.
    """

    path: Path
    index: PartIndex
    where: TensorSpans


def read_part(path: Path) -> StoredPart:
    """Read the header of a part.

    Raises:
        DumpError: it is not a part of a dump, or it is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            front = file.read(8)
            length = struct.unpack("<Q", front)[0] if len(front) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise DumpError(
                    f"{path}: a header of {length} bytes in a file of {size}: it is damaged", path=path
                )
            body = file.read(length)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
    try:
        return _parse_header(path, body, size - 8 - length, 8 + length)
    except DumpError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DumpError(
            f"{path}: its header is not a dump's: {str(error)[:200]}; it is damaged", path=path
        ) from error


def _parse_header(path: Path, body: bytes, room: int, start: int) -> StoredPart:
    content = load_json(body)
    check_form(content, "object")
    metadata = content.pop(METADATA_KEY)
    check_form(metadata, "object")
    _check_version(path, pick_known(PartMetadata, metadata).format)
    check_form(metadata, FORMS["META"])
    meta = from_json(PartMetadata, metadata)
    if not is_sealed(body):
        raise DumpError(f"{path}: the checksum of its header is wrong: it is damaged", path=path)
    where = _parse_spans(content, room, start)
    record = load_json(meta.index)
    check_form(record, FORMS["INDEX"])
    index = from_json(PartIndex, record)
    entries = index.entries
    for entry in entries:
        if entry.kind != REPLICA:
            _check_stored(entry, where)
    _check_claims(entries, where, room + start)
    return StoredPart(path, index, where)


def _check_version(path: Path, stated: Any) -> None:
    """Check the format and its version in a header.

    Raises:
        DumpError: it is another.
    """
    name, _, version = str(stated).partition("/")
    if name != DUMP_FORMAT:
        raise DumpError(f"{path}: format {str(stated)[:60]!r} is not {DUMP_FORMAT}/{DUMP_VERSION}", path=path)
    if version != str(DUMP_VERSION):
        raise DumpError(f"{path}: {describe_version(version)}", path=path)


def _parse_spans(tensors: dict[str, Any], room: int, start: int) -> TensorSpans:
    """Where the tensors are: contiguous, and nothing else in the file."""
    where, end = {}, 0
    for name, record in tensors.items():
        check_form(record, TENSOR_FORM, name[:80])
        span = from_json(StoredTensorSpan, record)
        dtype, shape = NAMED_DTYPES[span.dtype], span.shape
        first, last = span.data_offsets
        check_dims(shape)
        count = dtype.itemsize
        for n in shape:
            count *= n
        if min(shape, default=0) < 0 or first != end or last - first != count or last > room:
            raise ValueError(f"{name[:80]!r} does not lie in the file as it says")
        where[name] = dtype, shape, start + first, count
        end = last
    if end != room:
        raise ValueError(f"{room - end} bytes after its tensors")
    return where


def check_dims(shape: Sequence[int]) -> None:
    """Refuse what torch has no tensor of, before its dims cost anything.

    Raises:
        ValueError: more dims than there can be, or a negative one.
    """
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise ValueError(f"a shape of {len(shape)} dims, {str(shape)[:60]}")


def _check_claims(entries: Sequence[ShardEntry], where: TensorSpans, size: int) -> None:
    """Bound what takes no room in the file: rows that were not picked, and tensors without a value."""
    rows: dict[tuple[int, ...], int] = {}
    empty = 0
    for entry in entries:
        if entry.kind != REPLICA and entry.picked:
            width = max(prod(where[entry.tensor][1][1:]), 1)
            rows[entry.shape] = prod(max(n, 1) for n in entry.shape) // width
        elif entry.kind != REPLICA and 0 in entry.shape:
            empty += prod(max(n, 1) for n in entry.shape)
    if (
        sum(rows.values()) > MAX_CLAIMED + CLAIMED_PER_BYTE * size
        or empty > MAX_EMPTY_ROWS + CLAIMED_PER_BYTE * size
    ):
        raise ValueError(f"its tensors claim {sum(rows.values())} tokens, and {empty} rows of nothing")


def _check_stored(entry: ShardEntry, where: TensorSpans) -> None:
    """An entry's shape fits its tensor, or the selection or part of the tensor that was stored."""
    name, shape = entry.tensor, entry.shape
    if name not in where:
        raise ValueError(f"no tensor {name[:80]!r}, which its index has")
    check_dims(shape)
    _, stored, _, nbytes = where[name]
    if NAMED_DTYPES.get(entry.dtype) != where[name][0] or min(entry.microbatch, entry.call) < 0:
        raise ValueError(f"{name[:80]!r} is not what its index says")
    if len(entry.blocks) != count_checksum_blocks(nbytes) * CHECKSUM_DIGITS:
        raise ValueError(f"{name[:80]!r} of {nbytes} bytes lacks checksums of blocks of {CHECKSUM_BLOCK}")
    fits = True
    if entry.span is not None:
        first, last = entry.span
        fits = 0 <= first <= last <= prod(shape) and stored == (last - first,) and not entry.picked
    elif entry.picked:
        fits = bool(stored) and prod(max(n, 1) for n in shape) <= prod(stored[1:]) * MAX_TOKENS
    elif entry.kind != ROUTING:
        fits = stored == shape and (prod(shape) > 0 or prod(max(n, 1) for n in shape) <= MAX_TOKENS)
    if not fits:
        raise ValueError(f"{name[:80]!r} has shape {stored}, and its index says {shape}")
