"""Edits on ranks' parts in a real model: right gradients, nothing sent, and what is not local found out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix, test_edits
from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

MID, FC1 = "decoder.layers.0:mid", "decoder.layers.1.mlp.linear_fc2:input"
PIPED = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2)


def test_edits_on_parts_equal_their_formulas_on_one_process(cells: list[Any]) -> None:
    names = ["scale of positions", "zero", "clamp", "neurons", "heads of queries", "noise", "mean"]
    want = truths.once(test_edits.truth, PIPED.single(), names)
    answers = run(4, test_edits.sharded, PIPED, want["state"], names, "replicated", timeout=240)
    want |= {"losses": want["edited"][names[-1]][0], "parameters": want["edited"][names[-1]][1]}
    found = [c for c in matrix._effects(PIPED, names, want, answers) if c.site != "(none)"]
    assert len(found) == 2 * len(names)
    matrix.judge([replace(c, model="GPT, ready-made edits") for c in found], cells)


def squared(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * inputs.abs()


def in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.mul_(inputs.detach().abs())


def centred(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs - inputs.mean(0)


def counted(case: Case) -> list[tuple[Counter[str], bool]]:
    """Collectives of a step with no hook, one edit on parts, more of them, and with one on the whole."""
    import megatron_flex as mf

    chunks = ranks.start(case)

    def on(site: str, edit: Any, kind: Any = "forward") -> Any:
        return mf.HookFunction(site, editing_function=edit, save=False, hook_type=kind)

    sure = [on(MID, mf.edits.scale(1.5)), on(FC1, mf.edits.ablate_neurons([0, -1]), "tensor")]
    one = [on(MID, mf.local()(squared))]
    more = [
        *one,
        on(FC1, mf.edits.ablate_neurons([0, -1])),
        on(FC1, mf.local()(squared)),
        on("decoder.layers.0.self_attention:q", mf.edits.ablate_heads(1)),
        on("decoder.layers.1:mid", mf.edits.noise(0.1) | mf.edits.clamp(-3, 3)),
        on("decoder.layers.0.mlp.linear_fc2:input", mf.edits.scale(0.5), "tensor"),
        on("decoder.layers.*:mid", mf.local(dims="s b")(squared), "tensor"),
    ]
    out = []
    for hooks in ([], sure, one, more, [on(MID, squared)]):
        with mf.attach(chunks, hooks) as flex:
            gpt.step(case, chunks, 0)
            flex.debug()
            with ranks.counting() as counts:
                gpt.step(case, chunks, 0)
            seen = flex.session.tracer.last.values() if flex.session.tracer else ()
            out.append((counts, all(p.here and not p.moves and not p.back for p in seen)))
    return out


def test_nothing_is_sent_forward_or_backward() -> None:
    answers = run(4, counted, PIPED)
    for none, sure, one, more, _ in answers:
        asked = {n: c for n, c in (sure[0] - none[0]).items() if n != "gather_object"}  # of what was read
        assert set(asked) == {"all_reduce"}, "whether something went wrong, and nothing else"
        assert one[0] == more[0], "what is sent at a step's end does not grow with edits"
        moving = ("all_gather_into_tensor", "all_gather", "broadcast", "all_to_all", "reduce_scatter_tensor")
        assert all(more[0][name] == none[0][name] for name in moving)
        assert more[1]
    assert answers[0][4][0]["all_gather_into_tensor"] > answers[0][0][0]["all_gather_into_tensor"]
    assert not answers[0][4][1], "a function that nobody says is local has the whole"


def both(case: Case) -> dict[str, float]:
    """How far edits on parts are from the same on the whole: losses, and gradients of all parameters."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    kinds: dict[str, tuple[str, Any, str]] = {
        "forward": (MID, squared, "forward"),
        "in place": (FC1, in_place, "forward"),
        "gradient": (MID, squared, "tensor"),
        "gradient, in place": (FC1, in_place, "tensor"),
        "gradient of an input": ("decoder.layers.1.mlp.linear_fc1", squared, "full_backward"),
    }
    out: dict[str, float] = {}
    for name, (site, function, kind) in kinds.items():
        made = []
        for edit in (function, mf.local()(function)):
            hook = mf.HookFunction(site, editing_function=edit, hook_type=kind)  # type: ignore[arg-type]
            hook.captures_edited = True
            with mf.attach(chunks, [hook]) as flex:
                losses = gpt.step(case, chunks, 0)
                grads = {n: g.clone() for n, (_, g) in matrix._gradients(flex, chunks).items()}
                made.append((losses, grads, {k: list(v) for k, v in flex.output_dict.items()}))
        (losses, grads, read), (losses2, grads2, read2) = made
        assert losses == pytest.approx(losses2, rel=1e-6)
        assert grads.keys() == grads2.keys()
        assert read.keys() == read2.keys()
        far = [matrix.relative(grads2[n], grads[n]) for n in grads]
        far += [matrix.relative(b, a) for k in read for a, b in zip(read[k], read2[k], strict=True)]
        out[name] = max(far)
    return out


@pytest.mark.parametrize(
    "case",
    [PIPED, Case("tp2 sp, all recomputed", tp=2, sp=True, layers=2, recompute=("full",))],
    ids=lambda c: c.name,
)
def test_a_function_does_the_same_on_parts_and_on_the_whole(case: Case) -> None:
    for answer in run(case.world, both, case):
        assert max(answer.values()) < 1e-6, answer


def verified(case: Case) -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out = []
    right = [mf.HookFunction(MID, editing_function=mf.local()(squared))]
    right += [mf.HookFunction(FC1, editing_function=mf.edits.noise(0.1), hook_type="tensor")]
    right += [mf.HookFunction(MID, editing_function=mf.edits.mean())]

    @mf.local()
    def random(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs + torch.rand_like(inputs)

    wrong = [mf.HookFunction(MID, editing_function=mf.local()(centred))]
    gradients = [mf.HookFunction(MID, editing_function=random, hook_type="tensor")]
    for hooks in (right, wrong, gradients):
        with mf.attach(chunks, hooks) as flex:
            flex.verify()
            try:
                gpt.step(case, chunks, 0)
                out.append("")
            except mf.VerifyError as error:
                out.append(str(error))
            gpt.step(case, chunks, 0)
    return out


def test_a_function_that_is_not_local_is_found_out() -> None:
    answers = run(4, verified, PIPED)
    assert all(a == answers[0] for a in answers), "all ranks raise the same"
    fine, wrong, gradients = answers[0]
    assert fine == ""
    assert_names(wrong, MID, "microbatch 0", "centred")
    assert_names(gradients, f"{MID}.grad")


def skipped(case: Case) -> tuple[list[float], list[float], int, str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    first = torch.distributed.get_rank() == 0

    @mf.local()
    def fails(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        inputs.zero_()
        if first:
            raise RuntimeError("here only")
        return inputs

    plain = gpt.step(case, chunks, 0)
    hook = mf.HookFunction(MID, editing_function=fails, on_error="skip", save=False)
    flex = mf.attach(chunks, [hook])
    losses = gpt.step(case, chunks, 0)
    count = flex.skipped[hook].count
    flex.restore()
    flex = mf.attach(chunks, [mf.HookFunction(MID, editing_function=fails, save=False)])
    return plain, losses, count, ranks.step_says(case, chunks, flex)


@pytest.mark.filterwarnings("ignore")
def test_one_that_fails_on_one_rank_is_left_out_or_raised_on_all() -> None:
    case = Case("tp2 sp", tp=2, sp=True, layers=2)
    for plain, losses, count, said in run(2, skipped, case):
        assert losses == plain
        assert count == case.microbatches
        assert "here only" in said
