"""Law 1: every site, in every composition, has the single-process tensor, gradient and edit."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.matrix import compare, judge
from tests.support import oracle, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])

LAST = "num_layers_in_last_pipeline_stage"
PLAIN = [
    Case("tp1"),
    Case("tp2", tp=2),
    Case("tp2 dp2", tp=2, dp=2),
    Case("tp4", tp=4),
    Case("tp4 sp", tp=4, sp=True),
    Case("pp2", pp=2, microbatches=3),
    Case("pp2 vpp2", pp=2, vpp=2, microbatches=4),
    Case("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, microbatches=2),
    Case("tp2 sp, all recomputed", tp=2, sp=True, recompute=("full",)),
    Case("tp2 pp2, attention and mlp recomputed", tp=2, pp=2, recompute=("core_attn", "mlp")),
    Case("tp2 sp, norms recomputed", tp=2, sp=True, recompute=("layernorm",)),
    Case(
        "tp2 sp, gelu, bias, layernorm, learned positions",
        tp=2,
        sp=True,
        gated=False,
        rms=False,
        rope=False,
        bias=True,
    ),
    Case("tp4 sp, q/k norm, as many groups as ranks", tp=4, sp=True, qk_norm=True, groups=4),
    Case("tp2, tied embeddings", tp=2, tied=True),
    Case("pp2 vpp2 dp2, all recomputed", pp=2, vpp=2, dp=2, recompute=("full",)),
]
CONTEXT = [
    Case("cp2", cp=2, layers=2),
    Case("cp2 pp2", cp=2, pp=2, layers=2),
    Case("cp2 dp2", cp=2, dp=2, layers=2),
    Case("cp4, learned positions", cp=4, layers=2, rope=False),
    Case("cp2 pp2 vpp2", cp=2, pp=2, vpp=2),
    Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=2, recompute=("full",)),
]
BOTH_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
UNEVEN = [
    Case("pp2, one layer first", pp=2, layers=3, split={"num_layers_in_first_pipeline_stage": 1}),
    Case("tp2 sp pp2, one layer last", tp=2, sp=True, pp=2, layers=3, split={LAST: 1}),
    Case("pp2, embedding counted", pp=2, layers=3, split={"account_for_embedding_in_pipeline_split": True}),
    Case("pp2 vpp2, both ends counted", pp=2, vpp=2, layers=6, split=BOTH_ENDS),
]
LAYOUT = [
    Case("pp2, layout", pp=2, layers=3, split={"pipeline_model_parallel_layout": "Et|t*2,L"}),
    Case(
        "pp2 vpp2, ends by themselves",
        pp=2,
        vpp=2,
        layers=3,
        split={"pipeline_model_parallel_layout": "E|t*2|t|L"},
    ),
]
EVERYWHERE = [
    Case("tp2 sp", tp=2, sp=True),
    Case("tp2 sp pp2", tp=2, sp=True, pp=2),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
]
HYBRID = [
    Case("hybrid tp2 sp", tp=2, sp=True, hybrid=True),
    Case("hybrid tp2 pp2", tp=2, pp=2, hybrid=True),
]
GPT = [EVERYWHERE[0], *PLAIN, *CONTEXT, *EVERYWHERE[1:]]  # in the order in which the design looks at them
EIGHT = [Case("tp2 sp pp2 dp2", tp=2, sp=True, pp=2, dp=2)]


def check(
    case: Case,
    cells: list[Any],
    sites: list[str] | None = None,
    edits: list[str] | None = None,
    among: Sequence[Case] = (),
) -> None:
    judge(compare(case, sites, edits, among), cells)


@pytest.mark.versions
@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda c: c.name)
def test_gpt_on_every_version(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=GPT)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_gpt(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=GPT)


@pytest.mark.parametrize("case", CONTEXT, ids=lambda c: c.name)
def test_context_parallel(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=GPT)


@pytest.mark.versions
@pytest.mark.parametrize("case", UNEVEN, ids=lambda c: c.name)
def test_uneven_pipelines(case: Case, cells: list[Any]) -> None:
    check(case, cells, edits=_ends(case))


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 14), reason="the layout of a pipeline came with megatron-core 0.14")
@pytest.mark.parametrize("case", LAYOUT, ids=lambda c: c.name)
def test_pipelines_by_layout(case: Case, cells: list[Any]) -> None:
    check(case, cells, edits=_ends(case))


STAGES = {  # of the layers in their order, and of the loss; by hand from the settings
    "pp2, one layer first": [0, 1, 1, 1],
    "tp2 sp pp2, one layer last": [0, 0, 1, 1],
    "pp2, embedding counted": [0, 1, 1, 1],
    "pp2 vpp2, both ends counted": [0, 1, 1, 0, 0, 1, 1],
    "pp2, layout": [0, 1, 1, 1],
    "pp2 vpp2, ends by themselves": [1, 1, 0, 1],
}


def _stages(case: Case) -> list[int]:
    import megatron_flex as mf

    flex = mf.FlexModel(ranks.start(case))
    names = [f"decoder.layers.{n}:output" for n in range(case.layers)]
    return [flex.sites(name)[0].stage for name in [*names, "loss:output"]]


@pytest.mark.versions
@pytest.mark.parametrize("case", [*UNEVEN, *LAYOUT], ids=lambda c: c.name)
def test_stages_of_uneven_pipelines(case: Case) -> None:
    """The settings above have arrived: without them the layers would be on other stages."""
    if case in LAYOUT and VERSION < (0, 14):
        pytest.skip("the layout of a pipeline came with megatron-core 0.14")
    assert run(case.world, _stages, case) == [STAGES[case.name]] * case.world


def _ends(case: Case) -> list[str]:
    """Edits on the stage of each layer: of what it hands on, and inside it."""
    layers = [f"decoder.layers.{n}{s}" for n in range(case.layers) for s in (":output", ".mlp:input")]
    return ["embedding:output", *layers, "output_layer:output"]


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
@pytest.mark.parametrize("case", HYBRID, ids=lambda c: c.name)
def test_hybrid(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *HYBRID])


@pytest.mark.parametrize("case", EIGHT, ids=lambda c: c.name)
def test_eight_ranks(case: Case, cells: list[Any]) -> None:
    """On two cores eight ranks are slow: all values and gradients, and a few edits on the last stage."""
    edits = ["decoder.layers.3.mlp.linear_fc1:output", "decoder.layers.3:mid", "output_layer:output"]
    check(case, cells, oracle.sites_of(case), edits)
