"""A cause is named where its evidence excludes the others: each planted symptom has its cause alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import Comparison, compare
from megatron_flex.compare.router_causes import compute_logits_gradient
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import dumps
from tests.support.dumps import Given
from tests.support.messages import any_names

SAMPLES, TOKENS, HEADS, SIZE, WIDTH, EXPERTS = 2, 16, 4, 8, 32, 4
HEAD = Layout((Dim("s"), Dim("b"), Dim("n", (Cut("tp"),)), Dim("d")))
SCORES = Layout((Dim("s"), Dim("b"), Dim("n", (Cut("tp"),)), Dim("t")))
ROUTED = Layout((Dim("s"), Dim("b"), Dim("e")))
MODEL = {"num_layers": 2, "hidden_size": WIDTH, "num_moe_experts": EXPERTS, "moe_router_topk": 2}
CORE, ROUTER = "decoder.layers.{}.self_attention.core_attention:{}", "decoder.layers.{}.mlp.router:{}"
FC2, LAYER = "decoder.layers.{}.mlp.linear_fc2:{}", "decoder.layers.{}:output"
Change = Callable[[Tensor], Tensor]


def build() -> dict[str, Given]:
    """Two layers with tensors of each kind, in the order of execution."""
    out: dict[str, Given] = {}
    for layer in range(2):
        seed, hidden = 10 * layer, dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=10 * layer + 1)
        scores = dumps.random(1, SAMPLES, TOKENS, HEADS, TOKENS, seed=seed + 2)
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool()[:, None], -10000.0)
        logits = dumps.random(1, SAMPLES, TOKENS, EXPERTS, seed=seed + 3)
        chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2).indices, 1).bool()
        probs = logits.masked_fill(~chosen, -math.inf).softmax(-1)
        grad = dumps.random(*probs.shape, seed=seed + 4) * chosen
        main = compute_logits_gradient(logits, probs, grad, MODEL)
        assert main is not None
        partial = dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=seed + 5)
        out |= {
            CORE.format(layer, "q"): Given(
                dumps.random(1, SAMPLES, TOKENS, HEADS, SIZE, seed=seed + 6), HEAD
            ),
            CORE.format(layer, "scores"): Given(scores, SCORES),
            CORE.format(layer, "probs"): Given(scores.softmax(-1), SCORES),
            ROUTER.format(layer, "logits"): Given(logits, ROUTED, main + auxiliary(logits)),
            ROUTER.format(layer, "probs"): Given(probs, ROUTED, grad),
            FC2.format(layer, "partial"): Given(partial, dumps.SUMMED),
            FC2.format(layer, "output"): Given(partial, dumps.REPLICATED),
            LAYER.format(layer): Given(hidden, dumps.REPLICATED),
        }
    return out


def auxiliary(logits: Tensor) -> Tensor:
    """What a balancing loss adds to the gradient of logits."""
    return 0.1 * logits.softmax(-1) * (torch.arange(EXPERTS) - 1.5)


def rotated(angle: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Rotate halves of each head by an angle of the position and the frequency's number."""

    def change(value: Tensor) -> Tensor:
        count = value.shape[-1] // 2
        angles = angle(torch.arange(TOKENS)[:, None], torch.arange(count)[None])[:, None]
        one, two = value.chunk(2, -1)
        return torch.cat(
            [one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1
        )

    return change


def entry(value: float, *at: Any) -> Change:
    """Set entries of the first samples."""

    def change(tensor: Tensor) -> Tensor:
        out = tensor.clone()
        out[(0, *at)] = value
        return out

    return change


def noisy(tensor: Tensor) -> Tensor:
    return tensor + 0.1 * dumps.random(*tensor.shape, seed=99)


def with_other_expert(tensor: Tensor) -> Tensor:
    """Every third token has its last expert in place of its first."""
    out = tensor.clone()
    out[0, :, ::3] = out[0, :, ::3].flip(-1)
    return out


def one_expert_less(tensor: Tensor) -> Tensor:
    """The second half of the tokens keeps its greatest expert only."""
    out, late = tensor.clone(), tensor[:, :, TOKENS // 2 :]
    out[:, :, TOKENS // 2 :] = late.where(late == late.amax(-1, keepdim=True), 0.0)
    return out


def dropped_probabilities(tensor: Tensor) -> Tensor:
    """Dropout of attention: other entries in each head."""
    return tensor * (dumps.random(*tensor.shape, seed=98) > -1) / 0.9


def compared(tmp_path: Path, sites: dict[str, Given], other: Any = MODEL) -> Comparison:
    for folder, known, model, mesh in (("a", build(), MODEL, None), ("b", sites, other, {"tp": 2})):
        dumps.write(tmp_path / folder, known, model=model, mesh=mesh)
    return compare(tmp_path / "a", tmp_path / "b")


def base_angle(t: Any, f: Any) -> Any:
    return 0.2 * t * f / SIZE


SYMPTOMS: dict[str, tuple[str, Change, set[str]]] = {
    "NaN in a router": (ROUTER.format(1, "probs"), entry(math.nan, 0, 3), {"not finite"}),
    "NaN of one rank's heads": (CORE.format(1, "q"), entry(math.nan, 0, slice(None), 2), {"not finite"}),
    "NaN in scores": (CORE.format(1, "scores"), entry(math.nan, 0, 5, 1), {"not finite"}),
    "NaN after a reduction": (FC2.format(1, "output"), entry(math.inf, 0, 2), {"not finite"}),
    "NaN in a layer": (LAYER.format(1), entry(math.nan, 1), {"not finite"}),
    "other experts": (ROUTER.format(1, "probs"), with_other_expert, {"router"}),
    "dropped experts": (ROUTER.format(1, "probs"), one_expert_less, {"router", "dropped tokens"}),
    "other weights of experts": (ROUTER.format(1, "probs"), lambda t: (t * t) / (t * t).sum(-1, True), set()),
    "a mask": (
        CORE.format(1, "scores"),
        entry(-10000.0, slice(None), slice(4, None), slice(None), 2),
        {"mask"},
    ),
    "attention dropout": (CORE.format(1, "probs"), dropped_probabilities, set()),
    "a scale of scores": (CORE.format(1, "probs"), lambda t: t * 1.1, {"constant factor"}),
    "a reduction": (FC2.format(1, "output"), noisy, {"reduction"}),
    "a doubled reduction": (FC2.format(1, "output"), lambda t: 2 * t, {"constant factor"}),
    "a bias after a reduction": (FC2.format(1, "output"), lambda t: t + torch.arange(WIDTH), {"same vector"}),
    "nothing after a reduction": (FC2.format(1, "output"), torch.zeros_like, {"zero"}),
    "tokens in another order": (FC2.format(1, "output"), lambda t: t.roll(1, 2), {"order"}),
    "a layer that adds nothing": (
        LAYER.format(1),
        lambda _: build()[LAYER.format(0)].value,
        {"layers or experts"},
    ),
    "another rotary base": (CORE.format(1, "q"), rotated(base_angle), {"rotary angles"}),
    "another rotary base of latent attention": (
        CORE.format(1, "q"),
        lambda t: torch.cat([t[..., : SIZE // 2], rotated(base_angle)(t[..., SIZE // 2 :])], -1),
        {"rotary angles"},
    ),
    "shifted positions": (
        CORE.format(1, "q"),
        rotated(lambda t, f: 0.3 / (f + 1) + 0 * t),
        {"rotary angles"},
    ),
    "heads in another order": (CORE.format(1, "q"), lambda t: t.roll(1, 3), {"order"}),
    "noise": (CORE.format(1, "q"), noisy, set()),
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_symptom_has_its_cause_and_no_other(tmp_path: Path, name: str) -> None:
    site, change, causes = SYMPTOMS[name]
    sites = build()
    given = sites[site]
    sites[site] = Given(change(given.value), given.layout, given.gradient)
    found = compared(tmp_path, sites)
    assert found.first is not None
    assert found.first.name == site
    assert set(found.causes) == causes, str(found)
    assert found.to_json()["causes"] == found.causes


@pytest.mark.parametrize(
    ("function", "cause"),
    [(auxiliary, "auxiliary loss"), (lambda x: 0.1 * x.cos(), None)],
    ids=["scaled", "other"],
)
def test_an_auxiliary_loss_of_another_scale(tmp_path: Path, function: Change, cause: str | None) -> None:
    """The gradient of probabilities agrees; that of logits differs by another multiple of the loss's part."""
    site, sites = ROUTER.format(1, "logits"), build()
    given = sites[site]
    assert given.gradient is not None
    sites[site] = Given(given.value, given.layout, given.gradient + function(given.value))
    found = compared(tmp_path, sites)
    assert found.first is not None
    assert found.first.name == f"{site}.grad"
    assert set(found.causes) == {"router", *([cause] if cause else [])}, str(found)
    assert any_names(found.hints, f"{ROUTER.format(1, 'probs')}.grad", f"{site}.grad")
    assert any_names(found.hints, f"{site}.grad", 2) is (cause is not None), "the factor is named"


@pytest.mark.parametrize("factor", [None, 1.5])
def test_tokens_that_a_capacity_drops(tmp_path: Path, factor: float | None) -> None:
    site, sites = ROUTER.format(0, "probs"), build()
    sites[site] = Given(one_expert_less(sites[site].value), ROUTED, sites[site].gradient)
    found = compared(tmp_path, sites, {**MODEL, "moe_expert_capacity_factor": factor})
    assert any_names(found.hints, "16 of 32", "B", 0, 8)
    assert any_names(found.hints, "moe_expert_capacity_factor", "None")
    assert ("configuration" in found.causes) is (factor is not None)
    assert any_names(found.hints, "moe_expert_capacity_factor", "1.5", "A", "B") is (factor is not None)


@pytest.mark.parametrize("share", [0.41, 0.75])
def test_a_gradient_without_the_summand_of_a_rank_is_not_a_factor(tmp_path: Path, share: float) -> None:
    """The two ranks' parts of the gradient of a norm are alike, and their sum is about a factor of one."""
    names = ["decoder.final_layernorm.bias", "decoder.final_layernorm.weight"]
    whole = {name: dumps.random(1, WIDTH, seed=seed) for seed, name in enumerate(names)}
    for folder, mesh in (("a", None), ("b", {"tp": 2})):
        parts = {n: share * w + 0.1 * dumps.random(1, WIDTH, seed=9) for n, w in whole.items()}
        gradients = whole if folder == "a" else parts
        parameters = {
            name: Given(torch.ones(1, WIDTH), dumps.NORM, gradient) for name, gradient in gradients.items()
        }
        other = "decoder.layers.0.mlp.linear_fc1.weight"
        parameters[other] = Given(dumps.random(1, 8, 4), dumps.WEIGHT, dumps.random(1, 8, 4))
        value = dumps.random(1, SAMPLES, TOKENS, WIDTH)
        sites = {LAYER.format(1): Given(value, dumps.REPLICATED, value)}
        dumps.write(tmp_path / folder, sites, parameters=parameters, mesh=mesh)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert found.first.name == f"{names[1]}.grad"
    assert found.causes == ["gradients of parameters"], str(found)
    assert any_names(found.hints, "2 of 3", "tp")


@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_of_which_nothing_else_was_dumped(tmp_path: Path, inside: bool) -> None:
    sites = {LAYER.format(n): Given(dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=n)) for n in range(2)}
    if inside:
        sites = {FC2.format(1, "output"): sites[LAYER.format(0)], **sites}
    dumps.write(tmp_path / "a", sites)
    site = LAYER.format(1)
    sites[site] = Given(noisy(sites[site].value))
    dumps.write(tmp_path / "b", sites, mesh={"tp": 2})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert found.first.name == site
    assert any_names(found.hints, "'decoder.layers.1**'") is not inside


@pytest.mark.parametrize("balancing", ["sinkhorn", "none"])
def test_experts_that_sinkhorn_chooses(tmp_path: Path, balancing: str) -> None:
    """It balances the tokens that a rank has: another layout chooses other experts by equal logits."""
    site, sites = ROUTER.format(0, "probs"), build()
    sites[site] = Given(with_other_expert(sites[site].value), ROUTED, sites[site].gradient)
    model = {**MODEL, "moe_router_load_balancing_type": balancing}
    for folder, known, mesh in (("a", build(), None), ("b", sites, {"tp": 2})):
        dumps.write(tmp_path / folder, known, model=model, mesh=mesh)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.causes == ["router"]
    named = any_names(found.hints, "moe_router_load_balancing_type=sinkhorn")
    assert named is (balancing == "sinkhorn"), found.hints


@pytest.mark.parametrize(("point", "named"), [("input", (1, 0)), ("output", (1,))])
def test_a_layer_that_is_passed_by(tmp_path: Path, point: str, named: tuple[int, ...]) -> None:
    """What layer 1 reads, or returns, is what layer 0 does: of an input, layer 0 may add nothing."""
    names = [f"decoder.layers.{n}:{point}" for n in range(2)]
    sites = {name: Given(dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=n)) for n, name in enumerate(names)}
    dumps.write(tmp_path / "a", sites)
    dumps.write(tmp_path / "b", sites | {names[1]: sites[names[0]]}, mesh={"tp": 2})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.causes == ["layers or experts"]
    said = next(h for h in found.hints if names[0] in h).rpartition("): ")[2]
    assert any_names([said], *named), said
    assert any_names([said], 0) is (point == "input"), said
