"""Exports: what a dump holds, whole, in files that know nothing of ranks. Block by block, whatever the size."""

from megatron_flex.dump.exporting.export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
