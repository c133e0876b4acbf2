"""Statistics at work: what is measured of tensors on their way, and how ranks put it together."""

from megatron_flex.runtime.measuring.describing import make_header
from megatron_flex.runtime.measuring.measurer import StatisticsSink, StatisticsSelection
from megatron_flex.runtime.measuring.measuring import SessionStatistics

__all__ = ["StatisticsSink", "SessionStatistics", "StatisticsSelection", "make_header"]
