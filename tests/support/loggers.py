"""Reads what W&B writes to a folder without a network."""

from __future__ import annotations

import struct
from importlib import import_module
from pathlib import Path


def history(path: Path) -> list[dict[str, str]]:
    """The rows of a W&B file: records of a log in blocks of 32 KiB, as LevelDB has it."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, out, whole = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found, whole = record.FromString(whole), b""
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                out.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
    return out
