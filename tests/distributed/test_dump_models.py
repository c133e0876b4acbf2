"""Dumps of models beyond the dense GPT: several calls in a microbatch, other layers, other attention."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.matrix import judge
from tests.distributed.test_matrix import VERSION
from tests.distributed.test_models import ENCODERS, HYBRID, MAMBA, PREDICTING, repeated
from tests.support import oracle
from tests.support.dump_cells import compare
from tests.support.gpt import Case

pytest.importorskip("megatron.core")

CASES = [
    PREDICTING[1],
    ENCODERS[0],
    Case("mla tp2 sp, low-rank queries", tp=2, sp=True, mla="mended", q_rank=8, layers=2),
    Case("TE, tp2 pp2", tp=2, pp=2, te=True, layers=2),
]
PATTERNS = [MAMBA[0], *(c for c in HYBRID if c.name.startswith(("E|*E", "G-", "M|-/*M")))]


@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_models(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
@pytest.mark.parametrize("case", PATTERNS, ids=lambda c: c.name)
def test_layers_without_attention(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="mtp_use_repeated_layer came later")
def test_one_layer_for_two_depths(cells: list[Any]) -> None:
    """Sites that are passed twice in a microbatch: each call by itself."""
    case = repeated()
    names = [s for s in oracle.sites_of(case) if s.startswith("mtp") and "mtp.layers.1" not in s]
    judge(compare(case, names), cells)
