"""Edits that one rank runs for all: equal to one process, side effects once, gradients right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASES = [
    Case("tp2 sp pp2, edits on one rank", tp=2, sp=True, pp=2, layers=2),
    Case("tp2 sp cp2, edits on one rank", tp=2, sp=True, cp=2, layers=2),
    Case("tp4 of 2 groups, edits on one rank", tp=4, groups=2, layers=2),
    Case("tp2 sp, all recomputed, edits on one rank", tp=2, sp=True, layers=2, recompute=("full",)),
    Case("moe tp2 sp dp2 ep2, edits on one rank", tp=2, sp=True, dp=2, ep=2, experts=4, layers=2),
]
PLACES = (
    "decoder.layers.1:mid",
    "decoder.layers.1.self_attention:k",
    "decoder.layers.1.self_attention.linear_proj:partial",
    "decoder.layers.1.self_attention.core_attention:scores",
    "decoder.layers.1.mlp.linear_fc1:output",
    "decoder.layers.1.mlp.experts:dispatched",
    "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1:output",
    "output_layer:output",
    "embedding:output",
)


def sharded(case: Case, state: dict[str, Tensor], sites: list[str]) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    called: list[int] = []

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        called.append(1)
        return oracle.edit(inputs)

    answer: dict[str, Any] = {"edited": {}, "called": {}}
    for site in sites:
        called.clear()
        with mf.attach(
            chunks, [mf.HookFunction(site, editing_function=edit, run="once", save=False)]
        ) as flex:
            mesh = flex.session.mesh
            answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": dp}
            answer["edited"][site] = gpt.step(case, chunks, dp), matrix._gradients(flex, chunks)
            answer["plain"] = answer["edited"][site]
        answer["called"][site] = len(called)
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_edits_on_one_rank_equal_those_of_one_process(case: Case, cells: list[Any]) -> None:
    sites = [s for s in PLACES if s in oracle.sites_of(case)]
    truth = truths.of(case.single(), [], sites)
    answers = run(case.world, sharded, case, truth["state"], sites, timeout=300)
    truth |= {"losses": truth["edited"][sites[-1]][0], "parameters": truth["edited"][sites[-1]][1]}
    found = [c for c in matrix._effects(case, sites, truth, answers) if c.site != "(none)"]
    cells += [replace(c, model=case.model) for c in found]
    assert len(found) == 2 * len(sites)
    assert not [c for c in found if not c.good], [c for c in found if not c.good]
    for site in sites:
        calls = [a["called"][site] for a in answers]
        replays = 2 if case.recompute and ".layers." in site else 1
        assert sum(calls) == case.microbatches * case.dp * replays, "once for each microbatch of each replica"
        assert sum(n > 0 for n in calls) == case.dp


def noisy(case: Case, run_on: str) -> tuple[list[float], list[Tensor], int]:
    """An edit with a generator and a state of its own, which would differ from rank to rank."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    generator = np.random.default_rng(torch.distributed.get_rank())
    kept: list[Tensor] = []

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        kept.append(inputs.detach())
        noise = torch.from_numpy(generator.standard_normal(inputs.shape)).to(inputs.dtype)
        return inputs + 0.1 * len(kept) * noise

    hooks = [
        mf.HookFunction("decoder.layers.0", editing_function=edit, run=run_on, save=False),
        mf.HookFunction("decoder.layers.1", hook_type="forward_pre"),
    ]
    with mf.attach(chunks, hooks) as flex:
        flex.verify()
        losses = gpt.step(case, chunks, ranks.mine(chunks))
        return losses, list(flex.output_dict["decoder.layers.1:input"]) if flex.is_leader else [], len(kept)


def test_an_edit_that_would_differ_between_ranks() -> None:
    """Without sequence parallelism ranks hold copies; verify() sees whether they are still equal."""
    case = Case("tp2", tp=2, layers=2)
    (losses, read, first), (others, _, second) = run(2, noisy, case, "once")
    assert losses == others
    assert len(read) == case.microbatches
    assert (first, second) == (case.microbatches, 0)
    with pytest.raises(Exception, match=r"decoder\.layers\.0:output, microbatch 0: "):
        run(2, noisy, case, "replicated")


def failing(case: Case) -> str:
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.shape = inputs.shape
        return inputs[:1]

    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction("decoder.layers.0", editing_function=edit, run="once")])
    return ranks.step_says(case, chunks, flex)


def test_what_goes_wrong_on_one_rank_is_raised_on_all_ranks() -> None:
    said = run(4, failing, Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2))
    assert len(set(said)) == 1
    assert_names(said[0], "rank 0")


def constant(case: Case) -> list[float]:
    """What the edit returns does not depend on what it got, nor does it need a gradient."""
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return torch.ones_like(inputs)

    chunks = ranks.start(case)
    with mf.attach(chunks, [mf.HookFunction("decoder.layers.0", editing_function=edit, run="once")]):
        gpt.step(case, chunks, 0)
    first = chunks[0].decoder.layers[0].mlp.linear_fc2.weight.grad
    last = chunks[0].decoder.layers[1].mlp.linear_fc2.weight.grad
    return [float(first.abs().sum()), float(last.abs().sum())]


def test_an_edit_that_forgets_its_input_stops_the_gradient() -> None:
    for before, behind in run(2, constant, Case("tp2 sp", tp=2, sp=True, layers=2)):
        assert before == 0.0
        assert behind > 0.0


def test_where_an_edit_runs_is_one_of_two() -> None:
    import megatron_flex as mf

    make = partial(mf.HookFunction, "decoder", run="everywhere")
    with raises(mf.HookError, "everywhere"):
        make()
