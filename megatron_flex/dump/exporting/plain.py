"""Export to one safetensors file, written from front to end without a whole tensor in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from megatron_flex.dump.exporting.blocks import ExportColumn, read_blocks
from megatron_flex.dump.part_format import DTYPE_NAMES
from megatron_flex.errors import DumpError
from megatron_flex.progress import ProgressBar

HEADER_ALIGNMENT = 8


def write_safetensors(path: Path, columns: list[ExportColumn], metadata: dict[str, str], bar: ProgressBar) -> None:
    """Write a file that safetensors reads; every dtype is kept.

    The tensors are by dtype, the widest first, so that each is aligned, and then in their order.
    """
    ordered = sorted(columns, key=lambda c: -c.array.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for column in ordered:
        array = column.array
        if array.dtype not in DTYPE_NAMES:
            raise DumpError(f"{column.name}: safetensors has no {array.dtype}")
        header[column.name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        for column in ordered:
            for _, block in read_blocks(column.array):
                flat = block.contiguous().reshape(-1).view(torch.uint8)
                file.write(memoryview(flat.numpy()))
                bar.advance(flat.numel())
