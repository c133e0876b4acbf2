"""The parts of fused tensors, alone and several at once, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import matrix
from tests.distributed.test_matrix import VERSION, check
from tests.support import gpt, oracle, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

POINTS = ("linear_qkv:", "linear_fc1:", "self_attention:", "word_embeddings:")
FEWER = [
    Case("tp4 sp, fewer groups than ranks", tp=4, sp=True, groups=2, layers=2),
    Case("tp4, one group, shards end within heads", tp=4, groups=1, layers=2),
]
GATED = [
    Case("tp2 pp2, output gate", tp=2, pp=2, layers=2, extra={"attention_output_gate": True}),
    Case("tp4, output gate, two groups", tp=4, groups=2, layers=2, extra={"attention_output_gate": True}),
]
TOGETHER = [  # in any order; FLOW has them as the data flow reaches them
    *(f"decoder.layers.1.self_attention.linear_qkv:{p}" for p in "vqk"),
    *(f"decoder.layers.0.mlp.linear_fc1:{p}" for p in ("up", "gate", "output")),
]
FLOW = [
    *(f"decoder.layers.0.mlp.linear_fc1:{p}" for p in ("output", "gate", "up")),
    *(f"decoder.layers.1.self_attention.linear_qkv:{p}" for p in "qkv"),
]


def _named(sites: list[str]) -> list[str]:
    return [s for s in sites if any(p in s for p in POINTS)]


@pytest.mark.skipif(VERSION < (0, 16), reason="fewer groups than ranks came with megatron-core 0.16")
@pytest.mark.versions
@pytest.mark.parametrize("case", FEWER, ids=lambda c: c.name)
def test_fewer_groups_than_ranks(case: Case, cells: list[Any]) -> None:
    check(case, cells, _named(oracle.sites_of(case)), _named(oracle.edits_of(case)))


@pytest.mark.skipif(VERSION < (0, 16), reason="the output gate came with megatron-core 0.16")
@pytest.mark.versions
@pytest.mark.parametrize("case", GATED, ids=lambda c: c.name)
def test_output_gate(case: Case, cells: list[Any]) -> None:
    if case.groups < case.tp and VERSION < (0, 19):
        pytest.skip(
            "megatron-core 0.16.1 itself fails there: it gives a rank the gates of other ranks' heads"
        )
    check(case, cells, _named(oracle.sites_of(case)), _named(oracle.edits_of(case)))


def one_process(case: Case) -> Any:
    """The state of a random model, and its losses and gradients with all edits of `TOGETHER` at once."""
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    chunks = gpt.build(case)
    state = gpt.randomize(chunks[0])
    assert set(FLOW) == set(TOGETHER)
    for site in FLOW:
        oracle.install(chunks[0], site, oracle.edit)
    losses = gpt.step(case, chunks, 0)
    return state, losses, {n: p.grad for n, p in gpt.global_names(chunks[0])}


def several_ranks(case: Case, state: Any) -> Any:
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    hooks = [mf.HookFunction(s, editing_function=matrix._edit, save=False) for s in TOGETHER]
    with mf.attach(chunks, hooks=hooks) as flex:
        losses = gpt.step(case, chunks, 0)
        found = matrix._gradients(flex, chunks)
        mesh = flex.session.mesh
    taken_out = [not m._forward_hooks for c in chunks for m in c.modules()]
    return {
        "dp": 0,
        "coords": dict(mesh.coords),
        "sizes": dict(mesh.sizes),
        "found": found,
        "losses": losses,
        "taken out": all(taken_out),
    }


@pytest.mark.versions
@pytest.mark.parametrize("groups", [4, 2], ids=["one group a rank", "two ranks a group"])
def test_edits_of_several_parts_at_once(groups: int) -> None:
    """Each edit sees what those before it in the data flow left, and the gradients pass all of them."""
    if groups == 2 and VERSION < (0, 16):
        pytest.skip("fewer groups than ranks came with megatron-core 0.16")
    case = Case("together", tp=4, sp=True, groups=groups, layers=2)
    state, losses, gradients = truths.once(one_process, case.single())
    answers = run(case.world, several_ranks, case, state)
    for got, want in zip(answers[0]["losses"], losses, strict=True):
        assert abs(got - want) <= matrix.BOUND * abs(want)
    whole = matrix.whole_gradients(answers, lambda a: a["found"])
    assert set(whole) == set(gradients)
    for name, want in gradients.items():
        assert matrix.relative(whole[name], want) <= matrix.BOUND, name
    assert all(a["taken out"] for a in answers)
