"""Adapters around Megatron's linears: hook points, layouts and gradients, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.matrix import compare, judge
from tests.support import gpt, lora, oracle, ranks, wrapped
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

BRIDGE, MCORE = "decoder.layers.0.mlp.linear_fc{}.adapter", "decoder.layers.0.mlp.linear_fc{}.lora_{}.default"
CASES = [
    Case("LoRA, tp2", tp=2, layers=1, adapters="bridge", gated=False, bias=True),
    Case("LoRA, tp2 sp", tp=2, sp=True, layers=1, adapters="bridge"),
    Case("LoRA, TE, tp2", tp=2, layers=1, adapters="mcore", te=True),
    Case("LoRA, TE, tp2 sp", tp=2, sp=True, layers=1, adapters="mcore", te=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_hook_point_against_one_process(case: Case, cells: list[Any]) -> None:
    inside = BRIDGE.format(1) + ".linear_in" if case.adapters == "bridge" else MCORE.format(1, "A")
    after = BRIDGE.format(2) + ".linear_out" if case.adapters == "bridge" else MCORE.format(2, "B")
    edits = [f"{inside}:output", f"{after}:input", "decoder.layers.0.mlp.linear_fc1:gate"][: 2 + case.gated]
    judge(compare(case, oracle.sites_of(case), edits), cells)


ADAPTERS = ("*.layers.*.mlp.**.adapter.**", "*.layers.*.self_attention.**.adapter.**")
DUMPED = [
    Case("LoRA of a frozen model, tp2 sp", tp=2, sp=True, layers=2, microbatches=1, adapters="bridge"),
    Case("LoRA of a frozen model, pp2", pp=2, layers=2, microbatches=1, adapters="bridge"),
]


def start(case: Case) -> list[Any]:
    chunks = ranks.start(case)
    for chunk in chunks:
        lora.freeze_all_else(chunk)
    return chunks


def weights(case: Case) -> dict[str, Tensor]:
    return gpt.randomize(start(case)[0])


def dumped(case: Case, folder: Path, state: dict[str, Tensor]) -> None:
    import megatron_flex as mf

    chunks = start(case)
    gpt.load(chunks, state)
    chunks = wrapped.ddp(chunks)
    with mf.attach(chunks, dumps=mf.Dump(folder, ["**"], gradients=True, parameters=list(ADAPTERS))):
        gpt.step(case, chunks, 0)


@pytest.mark.parametrize("case", DUMPED, ids=lambda c: c.name)
def test_dumps_of_a_frozen_model_are_compared(case: Case, tmp_path: Path) -> None:
    from megatron_flex.compare import compare as compare_dumps

    (state,) = run(1, weights, case.single())
    run(1, dumped, case.single(), tmp_path / "one", state)
    run(case.world, dumped, case, tmp_path / "several", state)
    found = compare_dumps(tmp_path / "one", tmp_path / "several")
    assert found.missing == ()
    assert found.exit_status == 0, found.first
    linear_in = "decoder.layers.1.mlp.linear_fc2.adapter.linear_in"
    wanted = {
        f"{linear_in}.weight",
        f"{linear_in}.weight.grad",
        f"{linear_in}:output",
        f"{linear_in}:output.grad",
    }
    assert wanted <= {row.name for row in found.rows}
