"""Reading a dump: whole tensors in the order of the global batch, without Megatron or process groups."""

from megatron_flex.dump.reading.array import DumpArray, Piece
from megatron_flex.dump.reading.opened import NothingPassed, OpenDump, open_dump
from megatron_flex.dump.reading.remains import Remains, open_remains
from megatron_flex.dump.reading.rows import ShuffledRows, TokenRows

__all__ = [
    "DumpArray",
    "NothingPassed",
    "OpenDump",
    "Piece",
    "Remains",
    "ShuffledRows",
    "TokenRows",
    "open_dump",
    "open_remains",
]
