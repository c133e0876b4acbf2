"""The samples of all data parallel ranks as one batch: equal to one process that has that batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.distributed.matrix import Cell, greatest
from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASES = [
    Case("dp2 tp2 sp", dp=2, tp=2, sp=True, layers=2),
    Case("dp2 cp2", dp=2, cp=2, layers=2),
    pytest.param(Case("dp2 pp2", dp=2, pp=2, layers=2), marks=pytest.mark.versions),
]
READ = (
    "embedding:output",
    "decoder.layers.0:mid",
    "decoder.layers.1.self_attention.core_attention:scores",
    "decoder.layers.1.self_attention.linear_proj:partial",
    "decoder.layers.1.mlp.linear_fc1:output",
    "output_layer:output",
    "loss:output",
)


def sharded(case: Case, state: dict[str, Tensor], runs: tuple[str, ...]) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    answer: dict[str, Any] = {"edited": {}, "dp": dp, "read": {}}
    for kind in ("forward", "tensor"):
        hooks = [mf.HookFunction(site, hook_type=kind) for site in READ]
        with mf.attach(chunks, hooks, gather_data_parallel=True) as flex:
            gpt.step(case, chunks, dp)
            answer["leader"] = flex.is_leader
            answer["read"].update({n: list(r) for n, r in flex.output_dict.items()})
    for how in runs:
        for site in READ[:-2]:
            hook = (
                mf.HookFunction(site, matrix._edit, expected_shape=(None,) * 3, run=how)
                if "scores" not in site
                else None
            )
            hook = hook or mf.HookFunction(site, editing_function=matrix._edit, run=how)
            with mf.attach(chunks, [hook], gather_data_parallel=True) as flex:
                mesh = flex.session.mesh
                answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes)}
                found = gpt.step(case, chunks, dp), matrix._gradients(flex, chunks)
                answer["edited"][how, site] = answer["plain"] = found
                answer["read"][how, site] = list(flex.output_dict.get(site, []))
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_samples_of_all_replicas_equal_one_process(case: Case, cells: list[Any]) -> None:
    whole = replace(case.single(), microbatches=case.microbatches, joint=case.dp)
    truth = truths.of(whole, list(READ), list(READ[:-2]))
    hows = ("replicated", "once")
    answers = run(case.world, sharded, case, truth["state"], hows, timeout=300)
    (leader,) = [a for a in answers if a["leader"]]
    assert not [n for a in answers if a is not leader for n, r in a["read"].items() if r]
    found = _readings(case, truth, leader)
    for how in hows:
        for site in READ[:-2]:
            found += _effects(case, how, site, truth["edited"][site], answers)
            assert len(leader["read"][how, site]) == case.microbatches
    matrix.judge([replace(c, model="GPT, data parallel samples together") for c in found], cells)


def _readings(case: Case, truth: dict[str, Any], leader: dict[str, Any]) -> list[Cell]:
    found = []
    for site in READ:
        for check, name, wanted, factor in (
            ("value", site, truth["values"][site], 1),
            # each replica's loss is the mean over its own samples; Megatron multiplies by the cp size
            ("gradient", f"{site}.grad", truth["gradients"][site], case.dp * case.cp),
        ):
            got = leader["read"][name]
            assert len(got) == case.microbatches
            errors = (matrix.relative(g, w * factor) for g, w in zip(got, wanted, strict=True))
            found.append(Cell(case.name, site, check, greatest(errors)))
    return found


def _effects(case: Case, how: str, site: str, wanted: Any, answers: list[dict[str, Any]]) -> list[Cell]:
    losses, parameters = wanted
    by_replica = [a["edited"][how, site][0] for a in _ends(answers, how, site)]
    mean = [sum(x) / case.dp for x in zip(*by_replica, strict=True)]
    loss = greatest(abs(g - w) / w for g, w in zip(mean, losses, strict=True))
    found = matrix.whole_gradients(answers, lambda a: a["edited"][how, site][1])
    assert set(found) == set(parameters)
    gradients = greatest(matrix.relative(found[n], parameters[n]) for n in parameters)
    name = case.name if how == "replicated" else f"{case.name}, edits on one rank"
    return [
        Cell(name, site, "edited loss", loss),
        Cell(name, site, "edited parameter gradients", gradients),
    ]


def _ends(answers: list[dict[str, Any]], how: str, site: str) -> list[dict[str, Any]]:
    """One rank of each replica's last stage."""
    found: dict[int, dict[str, Any]] = {}
    for answer in answers:
        if answer["edited"][how, site][0]:
            found.setdefault(answer["dp"], answer)
    return [found[dp] for dp in sorted(found)]


def uneven(case: Case) -> list[Any]:
    """Replica 1 has one sample more, in a call of the model outside a schedule."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    dp = ranks.mine(chunks)
    seen = []

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        seen.append(tuple(inputs.shape))
        return inputs.roll(1, dims=1)  # across the replicas' samples

    with mf.attach(
        chunks, [mf.HookFunction("embedding", editing_function=edit)], gather_data_parallel=True
    ) as flex:
        tokens = gpt.data(1)[0]["tokens"]
        mine = torch.cat([tokens, tokens + 1])[: 3 if dp else 1] % gpt.VOCABULARY
        positions = torch.arange(gpt.SEQUENCE).expand(len(mine), -1)
        mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
        chunks[0](mine, positions, mask, labels=mine)
        return [seen, list(flex.output_dict.get("embedding", []))]


@pytest.mark.versions
def test_replicas_may_have_different_numbers_of_samples() -> None:
    first, second = run(2, uneven, Case("dp2", dp=2, layers=2))
    assert first[0] == second[0] == [(gpt.SEQUENCE, 4, gpt.HIDDEN)]
    assert [tuple(t.shape) for t in first[1]] == [(gpt.SEQUENCE, 4, gpt.HIDDEN)]
    assert second[1] == []
