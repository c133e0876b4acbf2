"""Experts: what each one gets and gives, by token, is the single-process run's wherever the experts are."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from tests.distributed.test_matrix import GPT, VERSION, check
from tests.support import gpt, oracle, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")


def of(name: str, **kwargs: Any) -> Case:
    return Case(name, **{"layers": 2, "experts": 4, **kwargs})


EVERYWHERE = [of("moe tp2 sp ep2", tp=2, sp=True, ep=2)]
CASES = [
    of("moe tp1, experts without tokens", experts=16),
    of("moe dp2 ep2, experts across data parallel ranks", dp=2, ep=2),
    of("moe tp2 sp etp2, shared experts", tp=2, sp=True, etp=2, shared_experts=True),
    of("moe tp2 sp ep2, allgather", tp=2, sp=True, ep=2, dispatcher="allgather"),
    of("moe pp2 dp2 ep2", pp=2, dp=2, ep=2, microbatches=2),
    of("moe tp2 sp ep2, experts recomputed", tp=2, sp=True, ep=2, recompute=("moe",)),
    of("moe tp2 sp ep2, all recomputed", tp=2, sp=True, ep=2, recompute=("full",)),
    of("moe cp2 ep2", cp=2, ep=2),
    of("moe pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=2),
    of("moe pp2 vpp2 dp2 ep2", pp=2, vpp=2, dp=2, ep=2, layers=4, microbatches=2),
    of("moe dp2 ep2, tokens dropped", dp=2, ep=2, extra={"moe_expert_capacity_factor": 0.75}),
]
GROUPED = [
    of("moe TE dp2 ep2, grouped experts", dp=2, ep=2, te=True, grouped=True),
    of(
        "moe TE tp2 sp dp2 ep2 etp2, grouped experts", tp=2, sp=True, ep=2, etp=2, dp=2, te=True, grouped=True
    ),
]
FOUR = [
    of("moe tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, shared_experts=True),
    of("moe tp2 sp dp2 ep2 etp2, allgather", tp=2, sp=True, dp=2, ep=2, etp=2, dispatcher="allgather"),
    of("moe tp2 sp cp2 ep4", tp=2, sp=True, cp=2, ep=4, experts=8),
    of("moe tp2 sp dp2 ep4", tp=2, sp=True, dp=2, ep=4, experts=8),
]


EXPERTS = [*GPT, *EVERYWHERE, *CASES]  # in the order in which the covering design looks at them
EIGHT = [of("moe tp2 sp cp2 pp2 ep4", tp=2, sp=True, cp=2, pp=2, ep=4, experts=8)]


@pytest.mark.versions
@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda c: c.name)
def test_experts_on_every_version(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=EXPERTS)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=EXPERTS)


@pytest.mark.skipif(VERSION < (0, 19), reason="a spec puts TEGroupedMLP together in another way before")
@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.name)
def test_grouped_experts(case: Case, cells: list[Any]) -> None:
    check(case, cells, None, [s for s in oracle.edits_of(case) if ".layers.1.mlp.experts" in s])


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.name)
def test_experts_on_four_ranks(case: Case, cells: list[Any]) -> None:
    """All values and gradients; edits inside the last layer's experts and of the router."""
    sites = oracle.sites_of(case)
    edits = [s for s in oracle.edits_of(case) if ".layers.1.mlp" in s]
    keep = (":logits", ":probs", ":weights", ":dispatched", "experts:output", "experts.2.linear_fc1:output")
    check(case, cells, sites, [s for s in edits if s.endswith((*keep, "experts.1.linear_fc2:output"))])


@pytest.mark.parametrize("case", EIGHT, ids=lambda c: c.name)
def test_experts_on_eight_ranks(case: Case, cells: list[Any]) -> None:
    edits = ["decoder.layers.1.mlp.experts:dispatched", "decoder.layers.1.mlp.router:logits"]
    check(case, cells, None, edits)


# -- what is left, what it costs, and what is refused ---------------------------------------------------


LAYER = "decoder.layers.0.mlp"
ROUTER = f"{LAYER}.router:logits"


def scaled(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * modules["scale"].weight


def freed(case: Case, kind: str) -> tuple[bool, bool]:
    """Whether a session, and the model, are freed once nobody has them."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    edits: dict[str, dict[str, Any]] = {
        "gradient": {"hook_type": "tensor"},
        "edited gradient": {"hook_type": "tensor", "editing_function": halved},
        "once": {"editing_function": halved, "run": "once"},
        "trained": {"editing_function": scaled},
    }
    flex = mf.FlexModel(chunks)
    if kind == "trained":
        flex.register_trainable_module("scale", torch.nn.Linear(1, 1, bias=False))
    flex.register_hook(mf.HookFunction(ROUTER, **edits[kind]))
    gpt.step(case, chunks, ranks.mine(chunks))
    flex.restore()
    found = [weakref.ref(flex.session), weakref.ref(chunks[0])]
    del flex, chunks, edits
    gc.collect()
    return found[0]() is None, found[1]() is None


@pytest.mark.parametrize("kind", ["gradient", "edited gradient", "once", "trained"])
def test_hooks_do_not_keep_a_model_of_experts(kind: str) -> None:
    """Its dispatcher keeps the router's tensors with their graph, whose hooks must keep nothing."""
    assert run(2, freed, of("moe tp2 ep2", tp=2, sp=True, ep=2, layers=1), kind) == [(True, True)] * 2


def halved(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * 0.5


def counted(case: Case, site: str, edit: bool) -> tuple[Counter[str], Counter[str]]:
    """All calls of one step, without hooks and with one."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with ranks.counting() as plain:
        gpt.step(case, chunks, ranks.mine(chunks))
    with mf.attach(chunks, [mf.HookFunction(site, editing_function=halved if edit else None, save=not edit)]):
        gpt.step(case, chunks, ranks.mine(chunks))  # the first one compares hooks
        with ranks.counting() as hooked:
            gpt.step(case, chunks, ranks.mine(chunks))
    return plain, hooked


@pytest.mark.parametrize(("edit", "exchanges"), [(False, 1), (True, 4)])
def test_collectives_of_a_hook(edit: bool, exchanges: int) -> None:
    """Reading sends each row home once; editing sends it home and away, and so its gradient."""
    case = of("moe dp2 ep2", dp=2, ep=2)
    for plain, hooked in run(2, counted, case, "decoder.layers.1.mlp.experts:dispatched", edit):
        more = hooked["all_to_all_single"] - plain["all_to_all_single"]
        assert more == exchanges * case.microbatches
        rows = hooked["all_gather_into_tensor"] - plain["all_gather_into_tensor"]
        assert rows == case.microbatches, "how many rows go where, once for each call of the layer"


def failing(case: Case) -> str:
    """Replicas that share experts call the model without a schedule; the edit fails on one of them only."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    mine, calls = ranks.mine(chunks), []

    def edit(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
        calls.append(mine)  # so that it is not tried before the step
        return inputs if mine else inputs[:1]

    hooks = [mf.HookFunction(f"{LAYER}.experts:output", editing_function=edit), mf.HookFunction("decoder")]
    flex = mf.attach(chunks, hooks)
    try:
        ranks.call(chunks)
    except mf.HookError as error:
        return str(error)
    finally:
        flex.session.close()
    return ""


def test_an_edit_that_fails_on_one_replica_raises_on_those_it_shares_experts_with() -> None:
    said = run(2, failing, of("moe dp2 ep2", dp=2, ep=2))
    assert said[0] == said[1]
    assert_names(said[0], "rank 0")


def refused(case: Case, settings: dict[str, Any], hook: dict[str, Any]) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    for name, value in settings.items():
        setattr(chunks[0].config, name, value)
    try:
        mf.attach(chunks, [mf.HookFunction(**hook)]).restore()
    except mf.HookError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "hook", "words"),
    [
        (
            {"moe_token_dispatcher_type": "flex"},
            {"module_name": f"{LAYER}.experts:dispatched"},
            "'allgather'",
        ),
        (
            {"moe_pad_expert_input_to_capacity": True},
            {"module_name": f"{LAYER}.experts.local_experts.1:input"},
            "moe_pad_expert_input_to_capacity=True",
        ),
        (
            {"moe_shared_expert_overlap": True},
            {"module_name": f"{LAYER}.shared_experts:output"},
            "--moe-shared-expert-overlap",
        ),
        ({}, {"module_name": f"{LAYER}.router:map", "editing_function": halved}, "router:logits"),
        ({}, {"module_name": f"{LAYER}.experts:indices", "hook_type": "tensor"}, f"{LAYER}.experts:indices"),
        (
            {},
            {"module_name": f"{LAYER}.experts.local_experts.1.linear_fc1.weight", "hook_type": "tensor"},
            "get_module_parameter",
        ),
    ],
)
def test_what_cannot_be_had_says_why(settings: dict[str, Any], hook: dict[str, Any], words: str) -> None:
    case = of("moe", shared_experts=True)
    assert words in run(1, refused, case, settings, hook)[0]
