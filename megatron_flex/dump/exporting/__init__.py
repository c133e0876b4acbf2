"""Exports: whole tensors of a dump in common formats, block by block, whatever the size."""

from megatron_flex.dump.exporting.arrow import Rows
from megatron_flex.dump.exporting.export import FORMATS, Exported, Format, export

__all__ = ["FORMATS", "Exported", "Format", "Rows", "export"]
