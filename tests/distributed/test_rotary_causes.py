"""Another rotary base in real models, of usual and of latent attention: compare names the angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import any_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASES = [
    Case("usual attention", layers=2),
    Case("latent attention", layers=2, mla="mended", q_rank=8),
]


def state(case: Case) -> dict[str, Tensor]:
    """Weights of one process."""
    return gpt.randomize(ranks.start(case)[0])


def dumped(case: Case, weights: dict[str, Tensor], path: str, power: float) -> None:
    """A step that is dumped, of a model whose rotary base is to the power of its own."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, weights)
    rotary: list[Any] = [m for m in chunks[0].modules() if hasattr(m, "inv_freq")]
    assert rotary
    for module in rotary:
        module.inv_freq = module.inv_freq**power
    with mf.attach(chunks, dumps=mf.Dump(path, "**:*", gradients=True)):
        gpt.step(case, chunks, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_another_base(case: Case, tmp_path: Path) -> None:
    from megatron_flex.compare import compare

    weights = truths.once(state, case)
    for folder, power in (("one", 1.0), ("other", 1.2)):
        run(1, dumped, case, weights, str(tmp_path / folder), power)
    found = compare(tmp_path / "one", tmp_path / "other")
    assert found.first is not None
    assert found.first.name.endswith(".core_attention:q")
    assert found.causes == ["rotary angles"], str(found)
    assert any_names(found.hints, "base")
