"""Law 1 where nobody chose the case: models, layouts, hooks, edits and schedules drawn at random."""

from __future__ import annotations

import importlib.metadata
import itertools
from typing import Any

import pytest
from torch import Tensor

from tests.support.random_cases import Draw, drawn
from tests.support.random_proof import prove

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="some of the models drawn came with 0.19")

SEED, COUNT = 0, 40
CASES = sorted(itertools.islice(drawn(SEED), COUNT), key=lambda d: (d.world, d.layout))


@pytest.mark.parametrize("draw", CASES, ids=lambda d: d.layout)
def test_a_random_case(draw: Draw) -> None:
    verdict = prove(draw)
    again = f"scripts/fuzz_layouts --case '{draw.text()}'"
    assert verdict.good, f"{verdict.told()}\nmade smaller by: {again}"
    assert verdict.unjudged <= len(verdict.cells)


# -- faults are found --------------------------------------------------------------------------------


def faulty(draw: Draw, state: dict[str, Tensor], shapes: Any, folder: str) -> dict[str, Any]:
    """Ranks on which the gather of column-parallel outputs puts the shards in the wrong order."""
