"""Statistics of tensors while a model trains: what is wanted, the arithmetic, the files."""

from __future__ import annotations

from megatron_flex.statistics.header import StatisticsHeader, MeasuredSite
from megatron_flex.statistics.statistics_settings import Statistics
from megatron_flex.statistics.writing import StatisticsWriters, open_writers

__all__ = ["StatisticsHeader", "MeasuredSite", "Statistics", "StatisticsWriters", "open_writers"]
