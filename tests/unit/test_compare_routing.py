"""Tokens that a correct run routes to other experts are no divergence; those that a fault sends there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import Comparison, compare
from tests.support import dumps
from tests.support.dumps import Given
from tests.support.messages import any_names, assert_names

LAYER = "decoder.layers.0"
MLP, LOGITS, PROBS = f"{LAYER}.mlp:output", f"{LAYER}.mlp.router:logits", f"{LAYER}.mlp.router:probs"
SAMPLES, TOKENS, WIDTH, EXPERTS = 8, 16, 32, 4
MODEL = {"num_layers": 1, "hidden_size": WIDTH, "num_moe_experts": EXPERTS, "moe_router_topk": 2}
IN_BF16 = {**MODEL, "bf16": True}


def output(dtype: torch.dtype, others: int = 0) -> Tensor:
    """The experts' result of all tokens; the first ones in the last sample are of other experts."""
    value = dumps.random(1, SAMPLES, TOKENS, WIDTH)
    value[0, -1, :others] = dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=1)[0, -1, :others]
    return value.to(dtype)


def compared(tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor], model: Any) -> Comparison:
    for folder, values in (("a", a), ("b", b)):
        dumps.write(tmp_path / folder, {n: Given(v) for n, v in values.items()}, model=model)
    return compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("site", [MLP, f"{LAYER}:output"])
def test_few_tokens_of_a_model_with_experts_may_be_ties(tmp_path: Path, site: str) -> None:
    dtype = torch.bfloat16
    found = compared(tmp_path, {site: output(dtype)}, {site: output(dtype, others=2)}, IN_BF16)
    assert found.exit_status == 0, str(found)
    (note,) = (n for n in found.notes if any_names([n], f"{LAYER}.mlp.router"))
    assert_names(note, site, 0, "2 of 128")


@pytest.mark.parametrize(
    ("site", "others", "dtype", "model"),
    [
        (MLP, 16, torch.bfloat16, IN_BF16),
        (MLP, 2, torch.bfloat16, {**IN_BF16, "num_moe_experts": None}),
        (MLP, 2, torch.bfloat16, {**IN_BF16, "moe_router_topk": EXPERTS}),
        (MLP, 2, torch.float32, MODEL),
        (f"{LAYER}.self_attention:output", 2, torch.bfloat16, IN_BF16),
    ],
    ids=["too many tokens", "no experts", "all experts", "fp32", "before the router"],
)
def test_what_ties_do_not_explain_diverges(
    tmp_path: Path, site: str, others: int, dtype: torch.dtype, model: Any
) -> None:
    found = compared(tmp_path, {site: output(dtype)}, {site: output(dtype, others)}, model)
    assert found.exit_status == 1
    assert found.first is not None
    assert found.first.name == site


def test_the_other_tokens_are_held_to_their_bound(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    wrong = (output(dtype, others=2).float() * 1.3).to(dtype)
    assert compared(tmp_path, {MLP: output(dtype)}, {MLP: wrong}, IN_BF16).exit_status == 1


@pytest.mark.parametrize(("gap", "status"), [(1e-4, 0), (0.5, 1)], ids=["tied", "apart"])
def test_logits_decide_where_the_router_was_dumped(tmp_path: Path, gap: float, status: int) -> None:
    """One token's second and third expert are exchanged."""
    logits = torch.tensor([3.0, 2.0, 2.0 - gap, -1.0]).expand(1, SAMPLES, TOKENS, EXPERTS).clone()
    chosen = torch.tensor([0.7, 0.3, 0.0, 0.0]).expand(1, SAMPLES, TOKENS, EXPERTS).clone()
    other = chosen.clone()
    other[0, 0, 3] = torch.tensor([0.7, 0.0, 0.3, 0.0])
    right = {LOGITS: logits, PROBS: chosen, MLP: output(torch.bfloat16)}
    turned = {LOGITS: logits + 1e-3, PROBS: other, MLP: output(torch.bfloat16)}
    found = compared(tmp_path, right, turned, IN_BF16)
    assert found.exit_status == status, str(found)
    assert any_names(found.notes, "1 of 128") or status


SECOND = "decoder.layers.1:output"
LONG = {**MODEL, "num_layers": 2}


def routed(*exchanges: tuple[int, int, tuple[int, ...]]) -> Tensor:
    """Probabilities of experts 0 and 1 for all tokens, and of others for (sample, token, experts)."""
    probs = torch.tensor([0.7, 0.3, 0.0, 0.0]).expand(1, SAMPLES, TOKENS, EXPERTS).clone()
    for sample, token, experts in exchanges:
        probs[0, sample, token] = 0.0
        probs[0, sample, token, list(experts)] = 0.5
    return probs


def scores(gap: float = 1e-6) -> Tensor:
    """Logits in which experts 1, 2 and 3 are apart by `gap`."""
    return torch.tensor([3.0, 0.0, -gap, -2 * gap]).expand(1, SAMPLES, TOKENS, EXPERTS).clone()


def compared_routers(
    tmp_path: Path, two: Tensor, logits: Tensor | None = None, model: Any = LONG, **more: Tensor
) -> Comparison:
    """Routers whose logits differ in the last digit, with the choices `two` in B."""
    one = scores() if logits is None else logits
    noise = 1 + 2e-7 * dumps.random(*one.shape, seed=3).sign()
    values = {LOGITS: one, PROBS: routed()}, {LOGITS: one * noise, PROBS: two}
    for folder, known, key in zip("ab", values, ("a", "b"), strict=True):
        known = {**known, **({SECOND: more[key]} if more else {})}
        dumps.write(tmp_path / folder, {n: Given(v) for n, v in known.items()}, model=model)
    return compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("experts", "gap", "status"),
    [((0, 2), 1e-6, 0), ((0, 2), 1e-3, 1), ((0,), 1e-6, 1), ((0, 1, 2), 1e-6, 1), ((2, 3), 1e-6, 1)],
    ids=["a tie", "scores apart", "one less", "one more", "two exchanged"],
)
def test_a_tie_exchanges_one_expert_for_one_of_nearly_the_same_score(
    tmp_path: Path, experts: tuple[int, ...], gap: float, status: int
) -> None:
    found = compared_routers(tmp_path, routed((1, 4, experts)), scores(gap))
    assert found.exit_status == status, str(found)
    row = next(r for r in found.rows if r.name == PROBS)
    assert row.diverges is bool(status)
    assert row.rerouted == (0 if status else EXPERTS)
    if not status:
        assert any_names(found.summary(), 4, 512)
        assert found.to_json()["rows"][1]["rerouted"] == EXPERTS


def test_equal_logits_excuse_no_other_choice(tmp_path: Path) -> None:
    """With the same logits bit for bit another choice is a capacity, a bias, or another number of experts."""
    for folder, probs in (("a", routed()), ("b", routed((0, 3, (0, 2))))):
        dumps.write(tmp_path / folder, {LOGITS: Given(scores(1e-3)), PROBS: Given(probs)}, model=MODEL)
    first = compare(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert first.name == PROBS


@pytest.mark.parametrize("other", [0.0, 0.2], ids=["one bias", "another bias"])
def test_a_bias_of_the_router_is_one_for_all_tokens(tmp_path: Path, other: float) -> None:
    """Scores that a bias is added to are not close at the boundary; one bias must explain both choices."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, SAMPLES, TOKENS, EXPERTS, generator=generator)
    bias = torch.tensor([0.0, 0.1, -0.1, 0.05])
    noise = 2e-2 * torch.randn(logits.shape, generator=generator)
    model = {**IN_BF16, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    for folder, near, added in (
        ("a", logits, bias),
        ("b", logits + noise, bias + torch.tensor([0.0, other, 0, 0])),
    ):
        chosen = torch.zeros_like(near).scatter(-1, (near.sigmoid() + added).topk(2).indices, 0.5)
        dumps.write(tmp_path / folder, {LOGITS: Given(near), PROBS: Given(chosen)}, model=model)
    found = compare(tmp_path / "a", tmp_path / "b", tolerance={"*:logits": 0.5})
    row = next(r for r in found.rows if r.name == PROBS)
    assert not row.equal, "the noise turns some choices"
    assert row.diverges is bool(other), str(found)
    assert bool(row.rerouted) is not bool(other)


@pytest.mark.parametrize(
    ("sample", "token", "factor", "status"),
    [(1, 6, 1.3, 0), (1, 2, 1.3, 1), (5, 6, 1.3, 1), (1, 6, 40.0, 1)],
    ids=["after the tie", "before it", "another sample", "too far"],
)
def test_what_a_tie_reaches_is_bounded(
    tmp_path: Path, sample: int, token: int, factor: float, status: int
) -> None:
    """Attention carries a tie to the tokens that follow in its sample; all others are held to round-off."""
    value = dumps.random(1, SAMPLES, TOKENS, WIDTH)
    other = value.clone()
    other[0, sample, token] *= factor
    found = compared_routers(tmp_path, routed((1, 4, (0, 2))), a=value, b=other)
    assert found.exit_status == status, str(found)
    row = next(r for r in found.rows if r.name == SECOND)
    assert row.rerouted == (TOKENS - 4) * WIDTH
    assert row.diverges is bool(status)


FC2 = f"{LAYER}.mlp.experts.local_experts.2.linear_fc2.weight"


@pytest.mark.parametrize(
    ("weight", "error", "status"),
    [(FC2, 0.32, 0), (FC2, 0.45, 1), (f"{LAYER}.self_attention.linear_proj.weight", 0.32, 1)],
    ids=["an expert's", "an expert's, too far", "of all tokens"],
)
def test_a_tie_is_a_greater_part_of_the_tokens_of_one_expert(
    tmp_path: Path, weight: str, error: float, status: int
) -> None:
    """One token of 128 has another expert; an expert has half of all tokens."""
    value, gradient, change = (dumps.random(1, WIDTH, WIDTH, seed=n) for n in range(3))
    other = gradient + change * error * gradient.norm() / change.norm()
    logits, probs = scores(), (routed(), routed((1, 4, (0, 2))))
    noise = 1 + 2e-7 * dumps.random(*logits.shape, seed=3).sign()
    for folder, near, chosen, of_weight in (
        ("a", logits, probs[0], gradient),
        ("b", logits * noise, probs[1], other),
    ):
        sites = {LOGITS: Given(near), PROBS: Given(chosen)}
        parameters = {weight: Given(value, dumps.WEIGHT, of_weight)}
        dumps.write(tmp_path / folder, sites, parameters=parameters, model=MODEL)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_status == status, str(found)
