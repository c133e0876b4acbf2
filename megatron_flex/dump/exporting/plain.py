"""Export to one safetensors file, written from front to end without a whole tensor in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.exporting.blocks import Column, blocks
from megatron_flex.dump.files import NAMES
from megatron_flex.errors import DumpError
from megatron_flex.progress import Bar

ALIGN = 8


def write(path: Path, columns: list[Column], metadata: dict[str, str], bar: Bar) -> None:
    """Write a file that safetensors reads; every dtype is kept.

    The tensors are by dtype, the widest first, so that each is aligned, and then in their order.
    """
    ordered = sorted(columns, key=lambda c: -c.array.dtype.itemsize)
    told: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for column in ordered:
        array = column.array
        if array.dtype not in NAMES:
            raise DumpError(f"{column.name}: safetensors has no {array.dtype}")
        told[column.name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    body = json.dumps(told, separators=(",", ":")).encode()
    body += b" " * (-len(body) % ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        for column in ordered:
            for _, block in blocks(column.array):
                flat = block.contiguous().reshape(-1).view(torch.uint8)
                file.write(memoryview(flat.numpy()))
                bar.advance(flat.numel())
