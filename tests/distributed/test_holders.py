"""Modules that hold Megatron's models: names, heads of one's own, and what is refused."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.adapters import detect
from tests.distributed.matrix import BOUND, relative
from tests.support import families, gpt, oracle, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason=families.NEED)

CRITIC = Case("critic", tp=2, sp=True, layers=2, family=families.VALUE)
RADIO = Case(
    "radio", tp=2, layers=2, groups=gpt.HEADS, family=families.RADIO, gated=False, rms=False, bias=True
)
PLAIN = Case("plain", tp=2, layers=2)


def names_of(case: Case) -> list[str]:
    return [s.name for s in mf.FlexModel(ranks.start(case)).sites()]


@pytest.mark.parametrize("case", [CRITIC, RADIO], ids=lambda c: c.name)
def test_two_ranks_have_the_names_of_one_process_in_the_same_order(case: Case) -> None:
    (alone,) = run(1, names_of, case.single())
    assert run(2, names_of, case) == [alone, alone]
    assert sorted(alone) == sorted(oracle.sites_of(case))


def test_stages_have_the_order_of_one_process() -> None:
    case = Case("llava", pp=2, layers=2, family=families.LLAVA)
    (alone,) = run(1, names_of, case.single())
    assert run(2, names_of, case)[1] == alone


# -- a head whose parameters are not marked ----------------------------------------------------------------


def unmarked(case: Case) -> dict[str, Any]:
    chunks = ranks.start(case)
    state = one_state(case)
    for parameter in chunks[0].v_head.parameters():
        del parameter.sequence_parallel
    gpt.load(chunks, state)
    with mf.attach(chunks, [mf.HookFunction("v_head.0")]) as flex:
        gpt.step(case, chunks, 0)
        found = flex.named_full_parameters(gradients=True, everywhere=True, reduced=False)
        return {n: g.clone() for n, g in found if n.startswith("v_head")}


def one_state(case: Case) -> dict[str, Tensor]:
    """Weights for all ranks, whatever their shards: those of the head and the norms count."""
    generator = torch.Generator().manual_seed(5)
    sizes = {p.name: p.shape for p in detect(gpt.build(case)).parameters()}
    return {n: 0.2 * torch.randn(sizes[n], generator=generator) for n in sorted(sizes)}


def test_gradients_of_a_head_that_is_not_marked() -> None:
    (alone,) = run(1, unmarked, CRITIC.single())
    for answer in run(2, unmarked, CRITIC):
        assert answer.keys() == alone.keys()
        assert len(alone) == 4
        for name, gradient in alone.items():
            assert relative(answer[name], gradient) < BOUND, name


# -- classes derived from GPTModel, and wrappers that call their model `module` ---------------------------


PART_NAMES = (
    "embedding",
    "decoder",
    "decoder.layers.1",
    "decoder.layers.1.mlp",
    "decoder.final_layernorm",
    "output_layer",
)


def with_own_classes(case: Case, parts: tuple[str, ...]) -> dict[str, Any]:
    """The sites of a model with modules of classes derived from Megatron's, and what the model computes."""
    chunks = ranks.start(case)
    gpt.load(chunks, one_state(case))
    for part in parts:
        module = chunks[0].get_submodule(part)
        module.__class__ = type("Own", (type(module),), {"__module__": "somebody.models"})
    hooks = [mf.HookFunction(n) for n in ("embedding", "decoder.layers.*.mlp", "decoder", "output_layer")]
    with mf.attach(chunks, hooks) as flex:
        gpt.step(case, chunks, 0)
        gradients = flex.named_full_parameters(gradients=True, everywhere=True, reduced=False)
        return {
            "names": [s.name for s in flex.sites()],
            "hidden": [s.name for s in flex.sites() if s.hidden],
            "unknown": sorted(flex.session.adapter.without_layout()),
            "gradients": [(n, g.clone()) for n, g in gradients],
            "read": {n: [t.detach() for t in r] for n, r in flex.output_dict.items()},
        }


@pytest.mark.parametrize("part", [*PART_NAMES, "all"])
def test_a_class_derived_from_a_part_of_megatrons_is_that_part(part: str) -> None:
    parts = PART_NAMES if part == "all" else (part,)
    plain = run(2, with_own_classes, PLAIN, ())
    own = run(2, with_own_classes, PLAIN, parts)
    for a, b in zip(plain, own, strict=True):
        assert a["names"] == b["names"]
        assert (a["hidden"], a["unknown"]) == (b["hidden"], b["unknown"])
        assert [n for n, _ in a["gradients"]] == [n for n, _ in b["gradients"]]
        assert all(torch.equal(g, h) for (_, g), (_, h) in zip(a["gradients"], b["gradients"], strict=True))
        assert a["read"].keys() == b["read"].keys()
        for name, tensors in a["read"].items():
            assert all(torch.equal(t, u) for t, u in zip(tensors, b["read"][name], strict=True)), name
    assert plain[0]["read"].keys() >= {"embedding:output", "decoder:output", "output_layer:output"}


def derived(case: Case) -> dict[str, Any]:
    """What a class derived from GPTModel with a head of its own has, and the values that its head gives."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    class Rewarder(GPTModel):  # type: ignore[misc]  # megatron-core has no types
        def forward(self, *args: Any) -> Tensor:
            self.post_process = False
            try:
                return self.rm_head(super().forward(*args))
            finally:
                self.post_process = True

    (model,) = chunks = ranks.start(case)
    gpt.load(chunks, one_state(case))
    model.__class__ = Rewarder
    torch.manual_seed(2)
    model.rm_head = nn.Linear(gpt.HIDDEN, 1)
    places = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    with mf.attach(model, [mf.HookFunction("rm_head")]) as flex:
        model(gpt.data(1)[0]["tokens"], places, None)
        return {
            "names": [s.name for s in flex.sites("rm_head:*")],
            "last": flex.sites()[-1].name,
            "parameters": [
                n for n, _ in flex.named_full_parameters(everywhere=True) if n.startswith("rm_head")
            ],
            "unknown": sorted(flex.session.adapter.without_layout()),
            "read": [t.detach() for r in flex.output_dict.values() for t in r],
        }


def test_a_head_in_a_class_derived_from_gpt_model() -> None:
    (alone,) = run(1, derived, PLAIN.single())
    first, second = run(2, derived, PLAIN)
    for answer in (alone, first, second):
        assert answer["names"] == ["rm_head:input", "rm_head:output"]
        assert answer["last"] == "rm_head:output"
        assert answer["parameters"] == ["rm_head.weight", "rm_head.bias"]
        assert answer["unknown"] == []
    assert not second["read"]
    assert relative(first["read"][0], alone["read"][0]) < BOUND


class Scaled(nn.Module):
    """A wrapper whose model is called `module`, with a parameter beside it, or without one."""

    def __init__(self, model: nn.Module, scale: bool) -> None:
        super().__init__()
        self.module = model
        if scale:
            self.scale = nn.Parameter(torch.ones(1))


def wrapped(case: Case, scale: bool) -> tuple[list[str], list[str]]:
    (model,) = ranks.start(case)
    flex = mf.FlexModel(Scaled(model, scale))
    names = [s.name for s in flex.sites("**layers.0.mlp:output")]
    return names, [n for n, _ in flex.named_full_parameters(everywhere=True) if "scale" in n]


def test_a_wrapper_without_modules_of_its_own_adds_nothing_to_names() -> None:
    for answer in run(2, wrapped, PLAIN, False):
        assert answer == (["decoder.layers.0.mlp:output"], [])
    for answer in run(2, wrapped, PLAIN, True):
        assert answer == (["module.decoder.layers.0.mlp:output"], ["scale"])


# -- what is refused -----------------------------------------------------------------------------------------


def refusals(case: Case) -> dict[str, str]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_flex.conversion.weights import MegatronWeights

    def told(act: Any) -> str:
        try:
            act()
        except mf.FlexError as error:
            return str(error)
        return ""

    (critic,) = ranks.start(case)
    out = {"weights": told(lambda: MegatronWeights([critic]))}
    linear = ColumnParallelLinear(8, 8, config=critic.config, init_method=nn.init.zeros_)
    out["linear"] = told(lambda: mf.FlexModel(nn.Sequential(linear)))
    critic.policy.config.tensor_model_parallel_size = 4
    out["groups"] = told(lambda: mf.FlexModel(critic))
    return out


def test_refusals() -> None:
    for told in run(2, refusals, replace(CRITIC, sp=False)):
        assert_names(told["weights"], "Critic", "GPTModel", "policy")
        assert_names(told["linear"], "Sequential", "ColumnParallelLinear")
        assert_names(told["groups"], "tensor_model_parallel_size=4", "2")


class OnLogits(nn.Module):
    """A wrapper with a module that receives the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.temperature = model, nn.Identity()

    def forward(self, *args: Any) -> Tensor:
        return self.temperature(self.model(*args))


def on_logits(case: Case) -> tuple[str, tuple[int, ...]]:
    (model,) = ranks.start(case)
    holder = OnLogits(model)
    batch = gpt.data(1)[0]
    places = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    shape = (gpt.BATCH, gpt.SEQUENCE, gpt.VOCABULARY)
    told = ""
    try:
        with mf.attach(holder, [mf.HookFunction("temperature")]):
            holder(batch["tokens"], places, None)
    except mf.FlexError as error:
        told = str(error)
    with mf.attach(holder, [mf.HookFunction("temperature", expected_shape=shape)]) as flex:
        holder(batch["tokens"], places, None)
        (read,) = flex.output_dict.values() if flex.is_leader else ([torch.empty(shape)],)
        return told, tuple(read[0].shape)


def test_the_layout_of_logits_is_not_followed() -> None:
    for told, shape in run(2, on_logits, PLAIN):
        assert_names(told, "temperature:output")
        assert shape == (gpt.BATCH, gpt.SEQUENCE, gpt.VOCABULARY)
