"""Values that editing functions share, across pipeline stages, against one process that runs the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import matrix
from tests.support import design, gpt, ranks, sharing, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

ALL = list(sharing.SCENARIOS)
FORWARD = [n for n in ALL if n != "gradients"]
EVERYWHERE, ONCE = ["replicated"], ["once"]
MIXED, OTHERWISE = ["replicated", "once"], ["once", "replicated"]

CASES = [
    (Case("one rank"), ALL, [EVERYWHERE]),
    (Case("one rank, all recomputed", recompute=("full",)), FORWARD, [EVERYWHERE]),
    (Case("pp2", pp=2, microbatches=4), ALL, [EVERYWHERE]),
    (Case("pp4", pp=4, microbatches=4), ALL, [EVERYWHERE]),
    (Case("pp2 vpp2", pp=2, vpp=2, microbatches=4), ALL, [EVERYWHERE]),
    (Case("tp2 sp", tp=2, sp=True), ALL, [MIXED, OTHERWISE, ONCE]),
    (Case("tp2 sp pp2", tp=2, sp=True, pp=2), ALL, [EVERYWHERE, ONCE, MIXED, OTHERWISE]),
    (Case("cp2 pp2", cp=2, pp=2), [n for n in FORWARD if n != "attention"], [EVERYWHERE, ONCE]),
    (
        Case("tp2 sp pp2, all recomputed", tp=2, sp=True, pp=2, recompute=("full",)),
        FORWARD,
        [EVERYWHERE, ONCE, MIXED, OTHERWISE],
    ),
    (Case("pp2 vpp2, all recomputed", pp=2, vpp=2, recompute=("full",)), FORWARD, [EVERYWHERE]),
    (Case("pp2 dp2, attention recomputed", pp=2, dp=2, recompute=("core_attn",)), FORWARD, [EVERYWHERE]),
]

OLD = ("pp2 vpp2", "tp2 sp pp2, all recomputed")
Shared = tuple[str, tuple[str, ...]]  # a scenario, and where its edits run


def _offered(names: list[str], runs: list[list[str]]) -> list[Shared]:
    return [(name, tuple(where)) for name in names for where in runs]


def _elements(number: int, item: Shared) -> set[tuple[Any, ...]]:
    name, where = item
    axes = design.axes(CASES[number][0])
    return {(name, where)} | {(name, axis) for axis in axes} | {(where, axis) for axis in axes}


def sharded(case: Case, state: dict[str, Tensor], asked: list[Shared]) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    answer: dict[str, Any] = {"edited": {}}
    for name, where in asked:
        with mf.attach(chunks, sharing.hooks(name, list(where))) as flex:
            mesh = flex.session.mesh
            answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": dp}
            result = gpt.step(case, chunks, dp), matrix._gradients(flex, chunks)
            answer["edited"][f"{name}, {'/'.join(where)}"] = answer["plain"] = result
            if name != "gradients":
                assert gpt.step(case, chunks, dp, forward_only=True) == pytest.approx(result[0])
    return answer


@pytest.mark.parametrize(
    ("case", "number"),
    [
        pytest.param(c[0], n, id=c[0].name, marks=[pytest.mark.versions] if c[0].name in OLD else [])
        for n, c in enumerate(CASES)
    ],
)
def test_shared_values_are_those_of_one_process(case: Case, number: int, cells: list[Any]) -> None:
    asked = design.part([_offered(names, runs) for _, names, runs in CASES], number, _elements)
    names = list(dict.fromkeys(name for name, _ in asked))
    truth = {
        "state": truths.once(sharing.weights, case.single()),
        "edited": truths.each(sharing.truth, case.single(), names),
    }
    answers = run(case.world, sharded, case, truth["state"], asked, timeout=100)
    edits = list(answers[0]["edited"])
    truth["edited"] = {edit: truth["edited"][edit.rpartition(", ")[0]] for edit in edits}
    truth |= {"losses": truth["edited"][edits[-1]][0], "parameters": truth["edited"][edits[-1]][1]}
    found = [c for c in matrix._effects(case, edits, truth, answers) if c.site != "(none)"]
    assert len(found) == 2 * len(asked)
    matrix.judge([_filed(c) for c in found], cells)


def _filed(cell: matrix.Cell) -> matrix.Cell:
    """Under its scenario; where edits run, where not everywhere, belongs to the case."""
    scenario, _, where = cell.site.rpartition(", ")
    case = cell.case if where == "replicated" else f"{cell.case}, {where}"
    return replace(cell, case=case, site=scenario, model="GPT, values shared by edits")


# -- runs, what is kept, and what ends with the step ---------------------------------------------------


def steer(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """A counter of the run, one of the microbatch, and a coefficient that was set outside."""
    save_ctx.run.calls = getattr(save_ctx.run, "calls", 0) + 1
    save_ctx.run.seen = [*getattr(save_ctx.run, "seen", []), save_ctx.strength]
    save_ctx.calls = save_ctx.calls + 100
    save_ctx.mean = inputs.mean()
    save_ctx.keep("calls", "mean")
    return inputs * save_ctx.strength


def whole_run(case: Case) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out: dict[str, Any] = {}
    flex = mf.attach(chunks, [mf.HookFunction("decoder.layers.1", editing_function=steer, save=False)])
    flex.save_ctx.strength = 0.5
    gpt.step(case, chunks, 0)
    gpt.step(case, chunks, 0, forward_only=True)
    context = flex.save_ctx
    out["names"] = sorted(context)
    if "calls" in context.run:
        out["calls"], out["seen"] = context.calls, context.run.seen
        out["kept"] = {n: sorted(found) for n, found in context.kept.items()}
        out["last"], out["graph"] = context.kept["calls"], context.mean.requires_grad
        del context.run.calls
        out["fallen back"] = context.calls
        del context.calls
        out["deleted"] = "calls" in context, getattr(context, "calls", "nothing")
    flex.restore()
    out["restored"] = list(context), dict(vars(context)), repr(context)
    return out


@pytest.mark.parametrize(
    "case", [Case("tp2 sp pp2", tp=2, sp=True, pp=2), Case("recomputed", recompute=("full",))]
)
def test_what_stays_for_the_run_and_what_is_kept(case: Case) -> None:
    answers = run(case.world, whole_run, case)
    first = [a for a in answers if "calls" in a]
    assert len(first) == (2 if case.pp > 1 else 1), "it stays on the stage where it was written"
    for answer in first:
        assert answer["calls"] == 2 * case.microbatches, "a replay does not count again"
        assert answer["seen"] == [0.5] * 2 * case.microbatches
        assert answer["kept"] == {"calls": [0, 1], "mean": [0, 1]}
        assert answer["last"] == {0: 103, 1: 104}, "a microbatch's name starts from the run's"
        assert answer["fallen back"] == 104
        assert answer["graph"] is False
        assert answer["deleted"] == (False, "nothing")
    for answer in answers:
        assert "strength" in answer["names"]
        assert answer["restored"] == ([], {}, "Context()")


def hoard(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    for n in range(5):
        setattr(save_ctx, f"copy{n}", [inputs * n, {"x": inputs.detach()}])
    save_ctx.keep("copy0")
    return inputs


def live(case: Case) -> list[int]:
    """The number of tensors that are there after each of some steps."""
    import gc

    import megatron_flex as mf

    chunks = ranks.start(case)
    hooks = [
        mf.HookFunction(f"decoder.layers.{n}", editing_function=hoard, save=False, run=where)
        for n, where in ((0, "replicated"), (1, "once"), (3, "replicated"))
    ]
    counts = []
    with mf.attach(chunks, [*hooks, *sharing.hooks("skip", EVERYWHERE)]):
        for _ in range(9):
            gpt.step(case, chunks, 0)
            gc.collect()
            counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    return counts


@pytest.mark.parametrize(
    "case",
    [Case("tp2 sp pp2", tp=2, sp=True, pp=2), Case("pp2 vpp2, recomputed", pp=2, vpp=2, recompute=("full",))],
    ids=lambda c: c.name,
)
def test_nothing_is_left_of_a_step(case: Case) -> None:
    # Least counts: a thread of gloo's may let go of a message a moment after it was waited for.
    for counts in run(case.world, live, case):
        assert min(counts[5:]) <= min(counts[1:5]), counts


# -- errors --------------------------------------------------------------------------------------------


def misspelt(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + save_ctx.straem


def lambdas(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.function = lambda x: x
    return inputs


def in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.stream += 1
    return inputs


def own_name(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.kept = inputs
    return inputs


def fails_after_saving(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.stream = inputs
    raise RuntimeError("on purpose")


def wrong(case: Case) -> dict[str, str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out: dict[str, str] = {}
    late = mf.HookFunction("decoder.layers.3", editing_function=sharing.skip)
    for name, function, where in (
        ("misspelt", misspelt, "replicated"),
        ("misspelt on one rank", misspelt, "once"),
        ("lambdas", lambdas, "replicated"),
        ("lambdas on one rank", lambdas, "once"),
        ("in place", in_place, "replicated"),
        ("own name", own_name, "replicated"),
        ("fails", fails_after_saving, "replicated"),
    ):
        first = sharing.save if name != "fails" else sharing.nest
        hooks = [
            mf.HookFunction("decoder.layers.0", editing_function=first),
            mf.HookFunction("decoder.layers.1", editing_function=function, run=where),
            late,
        ]
        flex = mf.attach(chunks, hooks)
        out[name] = ranks.step_says(case, chunks, flex)
    with mf.attach(
        chunks, [mf.HookFunction("decoder.layers.0", editing_function=sharing.save), late]
    ) as flex:
        gpt.step(case, chunks, 0)
        try:
            out["outside"] = str(flex.save_ctx.stream)
        except AttributeError as error:
            out["outside"] = str(error)
    return out


WRONG: dict[str, tuple[str, ...]] = {
    "misspelt": ("AttributeError", "'straem'", "microbatch 0", "iteration 0", "stream", "ranks 0-1"),
    "misspelt on one rank": ("AttributeError", "'straem'", "stream", "rank 0"),
    "lambdas": ("save_ctx.function", "AttributeError", "lambdas", "rank 0"),
    "lambdas on one rank": ("save_ctx.function", "AttributeError", "lambdas", "decoder.layers.1:output"),
    "in place": ("save_ctx.stream = ...",),
    "own name": ("save_ctx.kept", "ranks 0-1"),
    "fails": ("RuntimeError: on purpose", "ranks 0-1", "'stream'", "microbatch 0", "all", "ranks 2-3"),
    "outside": ("save_ctx", "'stream'", "save_ctx.keep(name)"),
}


@pytest.mark.parametrize("recompute", [(), ("full",)], ids=["plain", "recomputed"])
def test_what_goes_wrong_is_raised_on_all_ranks(recompute: tuple[str, ...]) -> None:
    answers = run(4, wrong, Case("tp2 sp pp2", tp=2, sp=True, pp=2, recompute=recompute), timeout=60)
    for name, values in WRONG.items():
        assert len({a[name] for a in answers}) == 1, [a[name] for a in answers]
        if name == "in place" and not recompute:
            assert answers[0][name] == ""
            continue
        assert_names(answers[0][name], *values)
