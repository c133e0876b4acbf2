"""Statistics at work: what is measured of tensors on their way, and how ranks put it together."""

from megatron_flex.runtime.measuring.describing import header_of
from megatron_flex.runtime.measuring.measurer import Measurer, Wanted
from megatron_flex.runtime.measuring.measuring import Measuring

__all__ = ["Measurer", "Measuring", "Wanted", "header_of"]
