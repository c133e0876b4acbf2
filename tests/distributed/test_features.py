"""Hidden states of layers on other pipeline stages, against captures, one process, and gradients by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import matrix
from tests.support import featured, sharing, truths
from tests.support.featured import LAYERS, Asked, Groups
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

ONE = Case("one rank")
PP = Case("pp2", pp=2, microbatches=4)
VPP = Case("pp2 vpp2", pp=2, vpp=2, microbatches=4)
TP = Case("tp2 sp pp2", tp=2, sp=True, pp=2)
CP = Case("cp2 pp2", cp=2, pp=2)
DP = Case("pp2 dp2", pp=2, dp=2)
RECOMPUTED = [
    Case("one rank, recomputed", recompute=("full",)),
    Case("pp2 vpp2, recomputed", pp=2, vpp=2, recompute=("full",)),
    Case("tp2 sp pp2, recomputed", tp=2, sp=True, pp=2, recompute=("full",)),
]
CASES = [ONE, PP, VPP, TP, CP, DP, *RECOMPUTED]
EXACT = ("one rank", "pp2", "pp2 vpp2", "pp2 dp2", "one rank, recomputed", "pp2 vpp2, recomputed")


def _ask(case: Case, asked: Asked) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    single = case.single()
    state = truths.once(sharing.weights, single)
    truth = truths.once(featured.by_hand, single, state, asked.loss)
    return truth, run(case.world, featured.spread, case, state, asked, timeout=200)


@pytest.mark.parametrize("gradients", [False, True], ids=["detached", "with gradients"])
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_features_are_the_hidden_states_of_one_process(case: Case, gradients: bool) -> None:
    truth, answers = _ask(case, Asked(gradients=gradients, loss=gradients))
    assert [a["receives"] for a in answers] == [a["coords"]["pp"] == case.pp - 1 for a in answers]
    for answer in answers:
        assert (answer["left"], answer["sent"]) == (0, 0)
        if not answer["receives"]:
            assert (answer["read"], answer["arrived"]) == ([], [])
            continue
        leader = next(a for a in answers if a["captures"] and a["dp"] == answer["dp"])
        first = answer["dp"] * case.microbatches
        assert [m for m, _ in answer["arrived"]] == list(range(case.microbatches))
        for number, read in enumerate(answer["read"]):
            assert list(read) == list(LAYERS)
            for layer, tensor in read.items():
                assert torch.equal(tensor, answer["arrived"][number][1][layer])
                assert torch.equal(tensor, leader["captures"][layer][number])
                want = truth["outputs"][first + number][layer]
                if case.name in EXACT:
                    assert torch.equal(tensor, want)
                assert matrix.relative(tensor, want) < matrix.BOUND
    want, got = truth["gradients"], matrix.whole_gradients(answers, lambda a: a["gradients"])
    assert got.keys() == want.keys()
    assert max(matrix.relative(got[name], want[name]) for name in want) < matrix.BOUND


@pytest.mark.parametrize(
    ("case", "sent"), [(ONE, ()), (PP, (0, 1)), (VPP, (0, 1))], ids=[c.name for c in (ONE, PP, VPP)]
)
def test_gradients_are_those_of_sends_by_hand_bit_for_bit(case: Case, sent: tuple[int, ...]) -> None:
    single = case.single()
    state = truths.once(sharing.weights, single)
    truth = truths.once(featured.by_hand, single, state, True, sent)
    answers = run(case.world, featured.spread, case, state, Asked(gradients=True, loss=True), timeout=200)
    got = matrix.whole_gradients(answers, lambda a: a["gradients"])
    assert [name for name, want in truth["gradients"].items() if not torch.equal(got[name], want)] == []


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("to", ["all", "leader", (0,), "last_stage"], ids=str)
@pytest.mark.parametrize("case", [VPP, TP], ids=[c.name for c in (VPP, TP)])
def test_each_receiver_has_each_microbatch(case: Case, to: Any, forward_only: bool) -> None:
    truth, answers = _ask(case, Asked(to, forward_only=forward_only))
    for answer in answers:
        first, last = answer["coords"]["pp"] == 0, answer["coords"]["pp"] == case.pp - 1
        receives = {"all": True, "leader": first and answer["coords"]["tp"] == 0, "last_stage": last}
        assert answer["receives"] == receives.get(to, first)
        assert (answer["left"], answer["sent"]) == (0, 0)
        numbers = list(range(case.microbatches)) if answer["receives"] else []
        assert [m for m, _ in answer["arrived"]] == numbers
        for microbatch, features in answer["arrived"]:
            for layer in LAYERS:
                want = truth["outputs"][microbatch][layer]
                assert matrix.relative(features[layer], want) < matrix.BOUND


@pytest.mark.parametrize("full", [True, False], ids=["full", "shards"])
@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (TP, Groups(((3,),))),
        (TP, Groups(((0, 3),))),
        (VPP, Groups(((0, 1),))),
        (DP, Groups(((2,), (1, 3)))),  # one group in each replica
        (DP, Groups(((3,),))),  # a replica without receivers
    ],
    ids=lambda v: v.name if isinstance(v, Case) else str(v.ranks),
)
def test_the_ranks_of_a_group_receive(case: Case, groups: Groups, full: bool) -> None:
    truth, answers = _ask(case, Asked(groups, full=full))
    for answer in answers:
        receives = any(answer["rank"] in ranks for ranks in groups.ranks)
        assert answer["receives"] == receives
        assert (answer["left"], answer["sent"]) == (0, 0)
        assert [m for m, _ in answer["arrived"]] == (list(range(case.microbatches)) if receives else [])
        for microbatch, features in answer["arrived"]:
            for layer in LAYERS:
                want = truth["outputs"][answer["dp"] * case.microbatches + microbatch][layer]
                if not full and case.sp:
                    want = want.chunk(case.tp)[answer["coords"]["tp"]]
                assert matrix.relative(features[layer], want) < matrix.BOUND


def test_gradients_to_a_group_of_the_last_stage_are_those_to_the_last_stage() -> None:
    _, stage = _ask(TP, Asked(gradients=True, loss=True))
    _, group = _ask(TP, Asked(Groups(((2, 3),)), gradients=True, loss=True))
    for want, got in zip(stage, group, strict=True):
        assert want["gradients"].keys() == got["gradients"].keys()
        for name, (_, tensor) in want["gradients"].items():
            assert torch.equal(got["gradients"][name][1], tensor), name


@pytest.mark.parametrize(
    ("case", "groups", "gradients", "but", "values"),
    [
        (DP, Groups(((2, 3),)), False, (), ([2, 3], [3], [0, 2])),  # stage 1 of two replicas
        (TP, Groups(((2, 3),)), False, (2, 3), ("torch.distributed.new_group",)),
        (TP, Groups(((2, 3),)), False, (3,), ("rank 2", "rank 3", [2, 3])),
        (TP, Groups(((3,),)), True, (), ("ranks 3", "last_stage")),
        (TP, Groups(((0, 1, 2, 3),)), True, (), ("ranks 0, 1, 2, 3", "last_stage")),
    ],
    ids=["two replicas", "nobody's", "not given", "gradients to one rank", "gradients to two stages"],
)
def test_bad_groups_are_refused_on_all_ranks(
    case: Case, groups: Groups, gradients: bool, but: tuple[int, ...], values: tuple[Any, ...]
) -> None:
    for text in run(case.world, featured.refuse_group, case, groups, gradients, but):
        assert_names(text, *values)


@pytest.mark.parametrize("case", [TP, CP, DP], ids=[c.name for c in (TP, CP, DP)])
def test_a_draft_head_trains_beside_a_frozen_model(case: Case) -> None:
    single = case.single()
    state = truths.once(sharing.weights, single)
    want, _ = truths.once(featured.train_head, single, state)
    for grad, trained in run(case.world, featured.train_head, case, state, timeout=200):
        assert matrix.relative(grad, want) < matrix.BOUND
        assert trained == []


def test_shards_are_those_of_the_layers() -> None:
    _, answers = _ask(TP, Asked(full=False))
    leader = next(a for a in answers if a["captures"])
    for answer in (a for a in answers if a["receives"]):
        tp = answer["coords"]["tp"]
        for number, read in enumerate(answer["read"]):
            for layer, tensor in read.items():
                assert torch.equal(tensor, leader["captures"][layer][number].chunk(2)[tp])


def test_nothing_is_copied_where_the_receiver_has_the_layer() -> None:
    assert run(1, featured.compare_memory, ONE) == [[True] * len(LAYERS)]
    assert run(2, featured.compare_memory, PP) == [[], [False, False, True]]


@pytest.mark.parametrize("name", list(featured.REFUSED))
def test_bad_requests_are_refused_before_a_step(name: str) -> None:
    for kind, text in run(2, featured.refuse, PP, name):
        assert kind == featured.REFUSED[name].error
        assert_names(text, *featured.REFUSED[name].values)


def test_ranks_that_ask_for_different_layers_all_raise() -> None:
    for kind, text in run(2, featured.refuse, PP, "differs"):
        assert kind == "HookError"
        assert_names(text, "decoder.layers.0:output", "decoder.layers.1:output")


@pytest.mark.parametrize("name", list(featured.FAILURES))
def test_a_failure_on_one_rank_is_raised_on_all(name: str) -> None:
    for failed, later in run(2, featured.fail, PP, name, timeout=200):
        assert_names(failed, *featured.FAILURES[name])
        assert later == PP.microbatches, "the next step is complete"
