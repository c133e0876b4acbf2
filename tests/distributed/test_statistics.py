"""Statistics while training are those of the whole tensors that one process has, and change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support import gpt, oracle, truths
from tests.support import measuring as measured
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

REAL = 45  # of 64 tokens; the rest of the vocabulary is padding
STREAM = ["decoder.layers.*", "decoder.layers.*:mid", "decoder.layers.*.mlp.linear_fc?", "output_layer"]
ALL = "**:*"
CASES = [
    pytest.param(
        Case("tp4 sp, fewer groups than ranks", tp=4, sp=True, layers=1), ALL, {"real": REAL}, id="tp4 sp"
    ),
    pytest.param(
        Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=1, recompute=("full",)),
        ALL,
        {},
        id="cp2 tp2 sp recomputed",
    ),
    pytest.param(Case("tp2 pp2 vpp2", tp=2, pp=2, vpp=2), STREAM, {}, id="tp2 pp2 vpp2"),
    pytest.param(
        Case("tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, shared_experts=True, layers=1),
        ALL,
        {"ddp": {"use_distributed_optimizer": True}},
        id="experts tp2 sp dp2 ep2",
    ),
]


@pytest.mark.parametrize(("case", "sites", "more"), CASES)
def test_statistics_are_those_of_one_process(case: Case, sites: Any, more: dict[str, Any]) -> None:
    every = oracle.sites_of(case)
    truth = truths.of(case.single(), every, [])
    answers = run(case.world, measured.measuring, case, truth["state"], sites, more, timeout=300)
    total = case.single().microbatches
    # In the first step of a site that is named exactly ranks ask each other whether it can be measured.
    flags = sum(size > 1 for size in (case.tp, case.pp, case.cp, case.dp)) if sites == STREAM else 0
    for answer in answers:
        assert answer["same"], "training's own results are bitwise what they were"
        assert answer["more"] == {"all_reduce": 1 + flags}, "one collective in a step"
        assert answer["order"] == [0, 1, 3], "evaluation is not measured, and the last step has come"
        assert answer["closed"] == 1
        assert answer["rows"] == answers[0]["rows"], "every rank gets the same numbers"
    rows = {r.site: r for r in answers[0]["rows"][1]}
    assert [r.order for r in rows.values()] == sorted(r.order for r in rows.values())
    want = measured.expected(truth, rows, total, more.get("real"))
    if sites == ALL:
        assert want.keys() == rows.keys() - {f"{n}.grad" for n in truth["parameters"]}
        left = {n for n in truth["values"] if n not in rows}
        assert all(n.endswith(":partial") for n in left), "only summands are left out"
    if "ddp" in more:
        want |= {f"{n}.grad": g for n, g in truth["parameters"].items()}
    assert len(want) > 10
    wrong = [w for n, v in want.items() for w in measured.differences(rows[n], measured.numbers(v), total)]
    assert not wrong, "\n".join(wrong)
    again = [r.norm for r in answers[0]["rows"][3]]
    assert again == pytest.approx([r.norm for r in rows.values()], rel=1e-6)


def troubles(case: Case) -> dict[str, Any]:
    """What goes wrong, or rests, around steps that are measured."""
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics
    from tests.support import ranks

    chunks = ranks.start(case)
    gpt.randomize(chunks[0])
    rank, kept, out = ranks.mine(chunks), measured.Kept(), {}
    gpt.step(case, chunks, rank)  # the first step sets attributes of modules
    with mf.attach(chunks) as flex:
        bare = ranks.fingerprint(chunks)

        def says(name: str, sites: Any, **settings: Any) -> None:
            try:
                flex.register_statistics(Statistics("nowhere", sites, **settings), measured.Kept())
            except mf.FlexError as error:
                out[name] = str(error)

        says("partial", "decoder.layers.0.mlp.linear_fc2:partial")
        says("gradient", "decoder.layers.0.mlp.linear_fc1:gemm_input", gradients=True)
        says("site", "decoder.layers.7")
        other = "decoder.layers.0" if torch.distributed.get_rank() == 0 else "decoder.layers.1"
        says("other", other)
        mine = Statistics("nowhere", STREAM[0], every=2, groups=["stats"])
        flex.register_statistics(mine, kept)
        says("twice", STREAM[0])
        with ranks.counting() as before:
            gpt.step(case, chunks, rank)
        out["tapped"] = [ranks.fingerprint(chunks) != bare]
        with ranks.counting() as resting:
            gpt.step(case, chunks, rank)
        out["tapped"].append(ranks.fingerprint(chunks) != bare)
        out["rests"] = before["all_reduce"] - resting["all_reduce"]
        with pytest.raises(RuntimeError, match="on purpose"):
            fails(case, chunks, rank)
        gpt.step(case, chunks, rank)
        gpt.step(case, chunks, rank)
        with flex.hooks("-stats"):
            gpt.step(case, chunks, rank)
            gpt.step(case, chunks, rank)
        gpt.step(case, chunks, rank)
        gpt.step(case, chunks, rank)
        flex.remove_statistics(mine)
        gpt.step(case, chunks, rank)
        gpt.step(case, chunks, rank)
        says("gone", STREAM[0])
    out["order"] = kept.order
    return out


def fails(case: Case, chunks: Any, rank: int) -> None:
    """A step that raises on all ranks once all layers were passed."""
    handle = chunks[0].output_layer.register_forward_hook(broken)
    try:
        gpt.step(case, chunks, rank)
    finally:
        handle.remove()


def broken(*_: Any) -> None:
    raise RuntimeError("on purpose")


def test_errors_resting_and_steps_that_fail() -> None:
    for answer in run(2, troubles, Case("tp2 sp", tp=2, sp=True, layers=2, microbatches=1)):
        assert "linear_fc2:partial" in answer["partial"]
        assert "linear_fc1:gemm_input" in answer["gradient"]
        assert "decoder.layers.7" in answer["site"]
        assert_names(answer["other"], "rank 0", "rank 1")
        assert_names(answer["twice"], "nowhere", "Statistics")
        assert answer["tapped"] == [True, False], "no tap stands in a step that is not measured"
        assert answer["rests"] == 1
        assert answer["order"] == [0, 4, 8]
        assert "gone" not in answer


def many(case: Case, state: Any) -> Any:
    """Maxima that go by themselves, as of more ranks than have places."""
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics, moments
    from tests.support import ranks

    changes.setattr(moments, "MAX_SEPARATE_RANKS", 1)
    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, state)
    kept = measured.Kept()
    with ranks.counting() as plain:
        gpt.step(case, chunks, 0)
    with mf.attach(chunks) as flex:
        flex.register_statistics(Statistics("nowhere", STREAM), kept)
        with ranks.counting() as counts:
            gpt.step(case, chunks, 0)
    return kept.rows[0], counts["all_reduce"] - plain["all_reduce"], state


def test_of_many_ranks_maxima_go_by_themselves() -> None:
    case = Case("tp2", tp=2, layers=1)
    ((alone, _, state),) = run(1, many, case.single(), None)
    for rows, more, _ in run(2, many, case, state):
        assert more == 3, "maxima and sums, and the flags of the first step of a place that is named"
        assert [r.site for r in rows] == [r.site for r in alone]
        assert all(math.isclose(a.absmax, b.absmax, rel_tol=1e-4) for a, b in zip(rows, alone, strict=True))


def error_of(case: Case, site: str) -> str:
    """The error of a step in which a site of experts is measured; empty if there is none."""
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics
    from tests.support import ranks

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex:
        flex.register_statistics(Statistics("nowhere", site), measured.Kept())
        try:
            gpt.step(case, chunks, ranks.mine(chunks))
        except mf.HookError as error:
            return str(error)
    return ""


def test_partial_sums_of_an_expert_are_an_error_where_the_site_is_named() -> None:
    """Every rank raises; the statistics do not leave the row out."""
    case = Case("tp2 sp etp2", tp=2, sp=True, etp=2, experts=4, layers=1)
    expert = "decoder.layers.0.mlp.experts.local_experts.1"
    for message in run(2, error_of, case, f"{expert}:output"):
        assert_names(message, f"{expert}:output")
    assert run(2, error_of, case, f"{expert}.linear_fc2:input") == ["", ""]
