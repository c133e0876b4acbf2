"""Reading a dump: whole tensors in the order of the global batch, without Megatron or process groups."""

from megatron_flex.dump.reading.array import DumpArray, MicrobatchArray
from megatron_flex.dump.reading.opened import NoActivationError, OpenDump, open_dump
from megatron_flex.dump.reader.damaged_dump import DamagedDump, open_damaged_dump
from megatron_flex.dump.reader.token_rows import ShuffledRows, TokenRows

__all__ = [
    "DumpArray",
    "NoActivationError",
    "OpenDump",
    "MicrobatchArray",
    "DamagedDump",
    "ShuffledRows",
    "TokenRows",
    "open_dump",
    "open_damaged_dump",
]
