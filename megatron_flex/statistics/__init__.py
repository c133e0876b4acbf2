"""Statistics of tensors while a model trains: what is wanted, the arithmetic, the files."""

from __future__ import annotations

from megatron_flex.statistics.statistics_records import MeasuredSite, StatisticsHeader
from megatron_flex.statistics.statistics_settings import Statistics
from megatron_flex.statistics.statistics_writers import StatisticsWriters, open_writers

__all__ = ["MeasuredSite", "Statistics", "StatisticsHeader", "StatisticsWriters", "open_writers"]
