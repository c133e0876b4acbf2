"""Reported bugs of experts, their router, recomputation and pipeline stages."""

from __future__ import annotations

from tests.support.exam.row import Row

ROWS: list[Row] = []
