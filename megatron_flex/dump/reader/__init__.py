"""Reading a dump: full tensors in the order of the global batch, without Megatron or process groups."""

from megatron_flex.dump.reader.damaged_dump import DamagedDump, open_damaged_dump
from megatron_flex.dump.reader.dump_array import DumpArray, MicrobatchArray
from megatron_flex.dump.reader.dump_reader import NoActivationError, OpenDump, open_dump
from megatron_flex.dump.reader.token_rows import ShuffledRows, TokenRows

__all__ = [
    "DamagedDump",
    "DumpArray",
    "MicrobatchArray",
    "NoActivationError",
    "OpenDump",
    "ShuffledRows",
    "TokenRows",
    "open_damaged_dump",
    "open_dump",
]
