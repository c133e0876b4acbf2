"""Exports: whole tensors of a dump in common formats, block by block, whatever the size."""

from megatron_flex.dump.exporting.arrow import Rows
from megatron_flex.dump.exporting.writing import FORMATS, Exported, Format, check_target, export

__all__ = ["FORMATS", "Exported", "Format", "Rows", "check_target", "export"]
