"""`FlexModel` wraps a model, `attach` registers hooks in one call, `Interp` and `Report` are namespaces."""

from megatron_flex.model.attachment import attach
from megatron_flex.model.flex_model import FlexModel
from megatron_flex.model.interp import Interp
from megatron_flex.model.report import Report

__all__ = ["FlexModel", "Interp", "Report", "attach"]
