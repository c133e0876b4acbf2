"""Exports: whole tensors of a dump in common formats, block by block, whatever the size."""

from megatron_flex.dump.exporting.arrow import ExportRows
from megatron_flex.dump.exporting.writing import EXPORT_FORMATS, ExportResult, ExportFormat, check_export_target, export_arrays

__all__ = ["EXPORT_FORMATS", "ExportResult", "ExportFormat", "ExportRows", "check_export_target", "export_arrays"]
