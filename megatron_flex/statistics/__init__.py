"""Statistics of tensors while a model trains: what is wanted, the arithmetic, the files."""

from __future__ import annotations

from megatron_flex.statistics.settings import Statistics

__all__ = ["Statistics"]
