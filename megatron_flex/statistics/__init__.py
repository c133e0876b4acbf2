"""Statistics of tensors while a model trains: what is wanted, the arithmetic, the files."""

from __future__ import annotations

from megatron_flex.statistics.header import Header, Place
from megatron_flex.statistics.settings import Statistics
from megatron_flex.statistics.writing import Writers, open_writers

__all__ = ["Header", "Place", "Statistics", "Writers", "open_writers"]
