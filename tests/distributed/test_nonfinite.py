"""The first value of a step that is not finite: its hook point, ranks and entry, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import nonfinite, oracle, truths
from tests.support.gpt import Case
from tests.support.messages import any_names, assert_names
from tests.support.nonfinite import INF, Plant
from tests.support.pool import run

pytest.importorskip("megatron.core")

FC1, FC2 = "decoder.layers.2.mlp.linear_fc1", "decoder.layers.2.mlp.linear_fc2"
QKV = "decoder.layers.1.self_attention.linear_qkv"
WORDS = "embedding.word_embeddings"
TP = Case("tp2 sp", tp=2, sp=True)
PP = Case("tp2 pp2 vpp2", tp=2, pp=2, vpp=2, microbatches=4)
PLANTS = [
    (TP, Plant("an output that tp shards", FC1)),
    (TP, Plant("an output that sp shards", FC2, value=INF, last=False)),
    (PP, Plant("an output of a later chunk", "decoder.layers.3.mlp.linear_fc1", microbatch=2)),
    (PP, Plant("a gradient of an earlier chunk", QKV, "gradient", f"{QKV}:gemm_input.grad", INF)),
    (
        replace(TP, name="recomputed", recompute=("full",)),
        Plant("an output in a recomputed layer", FC1),
    ),
    (Case("cp2", cp=2), Plant("an output that cp shards", FC1, last=False)),
    (Case("cp2", cp=2), Plant("a gradient that cp shards", FC2, "gradient", f"{FC2}:partial.grad")),
    (TP, Plant("scores of a head", QKV, "scores", "decoder.layers.1.self_attention.core_attention:scores")),
    (TP, Plant("the embedding of a token", WORDS, "weight", f"{WORDS}:partial", last=False)),
    (PP, Plant("a loss", "", "loss", "loss:output.grad")),
]


@pytest.mark.parametrize(("case", "plant"), PLANTS, ids=[f"{c.name}, {p.name}" for c, p in PLANTS])
def test_the_first_tensor_is_named(case: Case, plant: Plant) -> None:
    state = truths.of(case.single(), oracle.sites_of(case.single()), [])["state"]
    answers = run(case.world, nonfinite.search, case, state, plant, timeout=300)
    errors = [a["error"] for a in answers]
    assert all(e == errors[0] for e in errors), "all ranks raise the same"
    (error,) = errors[:1]
    assert error["site"] == plant.expected
    planted = tuple(rank for rank, a in enumerate(answers) if a["has"])
    if plant.kind in ("output", "gradient", "scores"):
        assert error["ranks"] == planted
        assert error["microbatch"] == (0 if plant.kind == "scores" else plant.microbatch)
        assert len(error["indices"]) > 0
        assert error["inputs"], "the tensors before it are finite"
    if plant.kind == "output":
        (full,) = [a["full"] for a in answers if a["full"] is not None]
        assert [list(i) for i in error["indices"]] == full.tolist()
    if plant.kind == "weight":
        assert error["parameters"] == (f"{WORDS}.weight",)
    if plant.kind != "weight":
        assert error["parameters"] == ()


EXPERTS = Case("experts ep2 dp2", dp=2, ep=2, experts=4)
EXPERT = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1"


@pytest.mark.parametrize("number", [1, 2])
def test_one_rank_s_expert_is_named(number: int) -> None:
    name = EXPERT.format(number)
    plant = Plant("an expert", name, site=f"{name}:output", last=number >= 2)
    answers = run(EXPERTS.world, nonfinite.search, EXPERTS, None, plant, timeout=300)
    planted = tuple(rank for rank, a in enumerate(answers) if a["has"])
    assert len(planted) == 1
    for answer in answers:
        assert answer["error"]["site"] == plant.expected
        assert answer["error"]["ranks"] == planted
        assert answer["error"]["microbatch"] == plant.microbatch
        assert answer["error"]["indices"] == (), "the token of a row is not known on the rank of the expert"


def test_the_gradient_of_a_parameter_alone_is_named() -> None:
    case = Case("tp2 dp2", tp=2, dp=2)
    plant = Plant("a parameter", FC1, "weight gradient", f"{FC1}.weight.grad", INF)
    answers = run(case.world, nonfinite.search, case, None, plant, "stop", {}, timeout=300)
    for answer in answers:
        assert answer["error"]["site"] == plant.expected
        assert answer["error"]["microbatch"] is None
        assert answer["error"]["ranks"] == tuple(r for r, a in enumerate(answers) if a["coords"]["tp"] == 1)


HALF = replace(TP, name="tp2 fp16", extra={"fp16": True, "params_dtype": torch.float16})
SCALED = replace(HALF, extra={**HALF.extra, "grad_scale_func": nonfinite.scale_loss})


def test_an_overflow_that_the_scaler_skips_is_a_warning() -> None:
    plant = Plant("a gradient", FC2, "gradient", f"{FC2}:partial.grad", INF)
    scaled = run(SCALED.world, nonfinite.search, SCALED, None, plant, timeout=300)
    assert [a["error"] for a in scaled] == [None, None]
    assert len(scaled[0]["said"]) == 1
    assert scaled[1]["said"] == [], "only the first rank warns"
    assert_names(scaled[0]["said"][0], plant.expected, int(nonfinite.SCALE))
    plain = run(HALF.world, nonfinite.search, HALF, None, plant, timeout=300)
    assert [a["error"]["site"] for a in plain] == [plant.expected] * 2


def test_an_overflow_to_come_is_a_warning() -> None:
    plant = Plant("an output", FC1, value=2e4)
    answers = run(HALF.world, nonfinite.search, HALF, None, plant, timeout=300)
    assert [a["error"] for a in answers] == [None, None]
    assert any_names(answers[0]["said"], plant.expected, "2e+04", 65504)


def test_a_warning_names_the_same_and_the_run_goes_on() -> None:
    plant = Plant("an output", FC1)
    answers = run(TP.world, nonfinite.search, TP, None, plant, "warn", timeout=300)
    assert [a["error"] for a in answers] == [None, None]
    assert len(answers[0]["said"]) == 1
    assert_names(answers[0]["said"][0], plant.expected, plant.microbatch)


def test_a_finite_step_sends_one_message() -> None:
    for answer in run(TP.world, nonfinite.search, TP, None, None, timeout=300):
        assert answer["error"] is None
        assert answer["said"] == []
        assert answer["more"] == {"all_reduce": 1}


def test_the_neighbourhood_is_written_by_the_ranks_that_have_the_value(tmp_path: Path) -> None:
    plant = Plant("an output", FC1)
    answers = run(TP.world, nonfinite.search, TP, None, plant, "stop", None, tmp_path, timeout=300)
    (planted,) = (rank for rank, a in enumerate(answers) if a["has"])
    (file,) = sorted(tmp_path.rglob("*.pt"))
    assert file == tmp_path / "iteration-0" / f"rank-{planted}.pt"
    content = torch.load(file, weights_only=True)
    assert (content["microbatch"], content["coords"]) == (plant.microbatch, answers[planted]["coords"])
    before, shard = content["shards"].values()
    assert list(content["shards"])[1] == plant.expected
    assert before.isfinite().all()
    assert shard.isnan().sum() == 1
