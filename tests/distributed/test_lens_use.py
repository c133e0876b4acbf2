"""Caches, hook functions and traces beside other hooks, in training, and where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_lens import B, H, S, V, far, lens, tokens, truth_of
from tests.support import gpt, ranks, truths, wrapped
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASE = Case("tp2 pp2", tp=2, pp=2, layers=2)
CHUNKS = Case("pp2 vpp2", pp=2, vpp=2, layers=4)
MID = "blocks.1.hook_resid_mid"


def said(call: Callable[[], Any]) -> str:
    from megatron_flex import FlexError

    try:
        call()
    except FlexError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def flex_of(case: Case) -> Any:
    import megatron_flex as mf

    return mf.FlexModel(ranks.start(case))


# -- caches --------------------------------------------------------------------------------------------


def names_of(case: Case) -> list[list[str]]:
    flex, out = flex_of(case), []
    ours = "decoder.layers.*.mlp.linear_fc1"
    filters = (MID, [MID, "hook_embed"], lambda n: n.endswith("hook_z"), ours, "decoder.layers.0:mid", [])
    for wanted in filters:
        logits, cache = flex.interp.run_with_cache(tokens(), wanted)
        assert logits is not None
        assert logits.shape == (B, S, V)
        out.append(list(cache))
    _, cache = flex.interp.run_with_cache(
        tokens(), [ours, MID, "decoder.layers.0.self_attention.core_attention:probs"]
    )
    fc1 = cache["decoder.layers.0.mlp.linear_fc1"]
    assert fc1.shape == (B, S, 2 * gpt.FFN)
    assert cache["resid_mid", 1] is cache["resid_mid", -1] is cache[MID]
    assert cache["decoder.layers.0.self_attention.core_attention:probs"].shape == (B, gpt.HEADS, S, S)
    assert len(cache) == 4
    assert MID in cache
    assert ("resid_mid", 0) not in cache
    assert "resid_mid1" in cache
    assert repr(cache).startswith("ActivationCache with keys ['decoder.layers.0.mlp")
    assert cache.to("cpu") is cache
    assert_names(said(lambda: cache["resid_mid", 0]), 1)
    _, cache = flex.interp.run_with_cache(tokens()[:1], MID)
    assert cache.remove_batch_dim()[MID].shape == (S, H)
    flex.restore()
    return out


def test_names_choose_what_is_kept() -> None:
    for found in run(4, names_of, CASE):
        both = [f"decoder.layers.{n}.mlp.linear_fc1:output" for n in (0, 1)]
        zs = [f"blocks.{n}.attn.hook_z" for n in (0, 1)]
        assert found == [[MID], [MID, "hook_embed"], zs, both, ["decoder.layers.0:mid"], []]


def leader_only(case: Case) -> tuple[bool, int, bool, str]:
    flex = flex_of(case)
    logits, cache = flex.interp.run_with_cache(tokens(), everywhere=False)
    stack = cache.decompose_resid().sum(0) if flex.is_leader else None
    good = stack is None or far(stack, cache["resid_post", 1]) < 1e-5
    error = said(lambda: cache.logit_lens(torch.zeros(H)))
    flex.restore()
    return logits is not None, len(cache), good, error


def test_a_cache_for_the_leader_alone() -> None:
    (first, count, good, error), *others = run(4, leader_only, CASE)
    assert first
    assert count > 30
    assert good
    for arrived, count, _, also in others:
        assert (arrived, count, also) == (False, 0, error)
    assert_names(error, "FlexError", "run_with_cache(everywhere=True)")


def pieces(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[list[int], float, float]:
    """By microbatches of one sequence: what functions get, the cache, and another replica's tokens."""
    flex, got = lens(case, state), []
    given = tokens().roll(ranks.mine(list(flex.chunks)), 0)
    true = truth["logits"].roll(ranks.mine(list(flex.chunks)), 0)
    logits = flex.interp.run_with_hooks(
        given, [("hook_embed", lambda t, _: got.append(len(t)))], microbatch_size=1
    )
    _, cache = flex.interp.run_with_cache(given, "blocks.0.hook_resid_post", microbatch_size=1)
    kept = cache["resid_post", 0].roll(-ranks.mine(list(flex.chunks)), 0)
    flex.restore()
    return got, far(logits, true), far(kept, truth["blocks.0.hook_resid_post"])


@pytest.mark.parametrize("case", [CHUNKS, Case("dp2 tp2", dp=2, tp=2, layers=2)], ids=lambda c: c.name)
def test_microbatches_and_replicas(case: Case) -> None:
    state, truth = truths.once(truth_of, case)
    for got, logits, kept in run(case.world, pieces, case, state, truth):
        assert got in ([], [1, 1])
        assert logits < 1e-5
        assert kept < 1e-5


# -- beside other hooks --------------------------------------------------------------------------------


def beside(case: Case) -> None:
    """Other hooks stay, keep what they read, and are seen; scopes do not reach ours."""
    import megatron_flex as mf

    flex = flex_of(case)
    plain, before = flex.interp.run_with_cache(tokens(), [MID, "blocks.1.hook_resid_post"])

    def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return 2 * inputs

    flex.register_forward_hook(
        mf.HookFunction("decoder.layers.1:mid", editing_function=double, groups=["twice"])
    )
    flex.register_forward_hook(mf.HookFunction("decoder.layers.0"))
    flex.register_forward_hook(mf.HookFunction("loss", groups=["loss"]))
    logits, cache = flex.interp.run_with_cache(tokens(), [MID, "blocks.0.hook_resid_post"])
    assert torch.equal(cache[MID], 2 * before[MID])
    assert not torch.equal(logits, plain)
    with flex.hooks("-twice"):
        again, cache = flex.interp.run_with_cache(tokens(), MID)
    assert torch.equal(again, plain)
    assert torch.equal(cache[MID], before[MID])
    with flex.interp.hooks([(MID, lambda t, hook: t.zero_())]):
        _, cache = flex.interp.run_with_cache(tokens(), [MID, "blocks.1.hook_mlp_out"])
        assert not cache[MID].any()
        assert not cache["mlp_out", 1].any()
    read = flex.output_dict
    assert set(read) == ({"decoder.layers.1:mid", "decoder.layers.0:output"} if flex.is_leader else set())
    assert all(len(r) == (2 if "mid" in n else 3) for n, r in read.items()), read
    with flex.hooks("loss"):  # a group that ours are not in
        assert torch.equal(flex.interp.run_with_hooks(tokens()), plain)
    flex.restore()  # and not an error, since the loss has never had labels


def test_other_hooks_stay_as_they_are() -> None:
    for case in (CASE, CHUNKS):
        run(case.world, beside, case)


def untouched(chunks: Any) -> dict[str, Any]:
    found = ranks.fingerprint(chunks)  # without what Megatron's schedule notes in each layer
    return {name: value for name, value in found.items() if not name.endswith("/current_microbatch")}


def trained(case: Case, looked_at: bool) -> tuple[list[list[float]], dict[str, Tensor], bool]:
    """Three steps of training with dropout, with and without runs in between."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    model = wrapped.ddp(chunks) if case.dp > 1 else chunks
    flex, losses, same = mf.FlexModel(model), [], True
    for _ in range(3):
        if looked_at:
            before = untouched(chunks)
            flex.interp.run_with_cache(tokens())
            with flex.interp.trace(tokens()) as t:
                t["blocks.1.mlp"].output = lambda x: 0 * x
                _ = t["blocks.1"].output
            same = same and untouched(chunks) == before
        losses.append(gpt.step(case, model, ranks.mine(chunks)))
        for chunk in chunks:
            for parameter in chunk.parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    parameter.data.sub_(gradient, alpha=0.1)
    flex.restore()
    return losses, {n: p.detach().clone() for c in chunks for n, p in gpt.global_names(c)}, same


@pytest.mark.versions
@pytest.mark.parametrize("case", [CASE, CHUNKS], ids=lambda c: c.name)
def test_training_goes_on_as_if_nothing_had_been_run(case: Case) -> None:
    dropout = Case(**{**vars(case), "extra": {"hidden_dropout": 0.1, "attention_dropout": 0.1}})
    for without, seen in zip(
        run(4 if case is CASE else 2, trained, dropout, False),
        run(case.world, trained, dropout, True),
        strict=True,
    ):
        assert seen[2]
        assert without[0] == seen[0]
        assert all(torch.equal(seen[1][n], p) for n, p in without[1].items())


# -- traces --------------------------------------------------------------------------------------------


def traced(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    flex, out = lens(case, state), {}
    with flex.interp.trace(tokens()) as t:
        handles = {
            "blocks.0.hook_resid_post": t["blocks.0"].output,
            "blocks.1.hook_resid_pre": t["blocks.1"].input,
            "blocks.1.hook_attn_out": t["blocks.1.attn"].output,
            "blocks.1.hook_mlp_out": t["blocks.1.mlp"].output,
            "blocks.1.hook_resid_mid": t["decoder.layers.1:mid"].output,
            "blocks.0.attn.hook_pattern": t["blocks.0.attn.hook_pattern"].output,
            "hook_embed": t["embed"].output,
            "logits": t.logits,
        }
        entering = t["blocks.1.mlp"].input
        again = t["decoder.layers.1"].input  # a place under another name
        _, inner = flex.interp.run_with_cache(tokens(), "blocks.1.hook_resid_pre")  # counts for what it is
        assert_names(said(lambda: handles["logits"].value), "with flex.interp.trace()")
        shown = repr(entering)
    assert repr(entering) != shown, "which has a value now"
    assert_names(repr(entering), "decoder.layers.1.mlp:input", tuple(entering.value.shape))
    assert torch.equal(again.value, inner["resid_pre", 1])
    assert not flex.output_dict
    out = {name: far(handle.value, truth[name]) for name, handle in handles.items()}
    with flex.interp.trace(tokens()) as t:
        t["blocks.1.mlp"].output = lambda x: 0 * x
        t["blocks.0.mlp.linear_fc2"].output = torch.zeros(B, S, H)
        left, mid = t["blocks.1"].output, t["blocks.1.hook_resid_mid"].output
        first, gone = t["blocks.0"].output, t["blocks.1.mlp"].output
    assert torch.equal(left.value, mid.value)
    assert not gone.value.any()
    out["without"] = far(first.value, truth["blocks.0.hook_resid_mid"])
    with flex.interp.trace() as t:  # whatever runs inside, and who else reads it
        t["blocks.0.mlp"].output = lambda x: 2 * x
        twice = t["blocks.0.mlp"].output
        _, inner = flex.interp.run_with_cache(tokens(), "blocks.0.hook_mlp_out")
    assert torch.equal(twice.value, inner["mlp_out", 0])
    out["twice"] = far(twice.value / 2, truth["blocks.0.hook_mlp_out"])
    with flex.interp.trace() as t:  # around one's own step
        own, loss = t["blocks.0"].output, t["loss"].output
        losses = gpt.step(case, list(flex.chunks), 0)
    assert own.value.shape == (case.microbatches * B, S, H)
    assert loss.value.shape == (case.microbatches * B, S)
    assert not losses or abs(sum(losses) / len(losses) - float(loss.value.mean())) < 1e-5
    out["own step"] = far(own.value[:B], truth["blocks.0.hook_resid_post"])
    flex.restore()
    return out


@pytest.mark.versions
@pytest.mark.parametrize("case", [CASE, CHUNKS], ids=lambda c: c.name)
def test_a_trace_has_its_values_when_it_is_over(case: Case) -> None:
    state, truth = truths.once(truth_of, case)
    for found in run(case.world, traced, case, state, truth):
        assert {n: d for n, d in found.items() if not d <= 1e-5} == {}


# -- what is wrong -------------------------------------------------------------------------------------


def failures(case: Case) -> dict[str, str]:
    flex, given = flex_of(case), tokens()

    def run(name: Any, function: Any) -> Any:
        return partial(flex.interp.run_with_hooks, given, [(name, function)])

    def broken(tensor: Tensor, hook: Any) -> Tensor:
        raise KeyError("mine")

    def empty_trace() -> None:
        with flex.interp.trace() as t:
            _ = t["blocks.0"].output

    def late() -> None:
        with flex.interp.trace(given) as t:
            pass
        _ = t["blocks.0"].output

    def unknown() -> None:
        with flex.interp.trace(given) as t:
            _ = t["blocks.0.mpl"].output

    def several() -> None:
        with flex.interp.trace(given) as t:
            _ = t["decoder.layers.*.mlp"].output

    rank = torch.distributed.get_rank()
    calls: dict[str, Callable[[], Any]] = {
        "name": lambda: flex.interp.run_with_cache(given, "blocks.0.hook_resid_mit"),
        "filter": run(lambda n: "nothing" in n, broken),
        "raises": run(MID, broken),
        "shape": run(MID, lambda t, _: t[:, 1:]),
        "type": run(MID, lambda t, _: 3),
        "no function": run(MID, 3),
        "fixed": run("blocks.0.ln1.hook_scale", lambda t, _: t),
        "layer": run("hook_embed", lambda t, hook: t * hook.layer()),
        "silent": lambda: flex.interp.run_with_cache(given, "loss"),
        "length": lambda: flex.interp.run_with_cache(given[:, :5]),
        "kind": lambda: flex.interp.run_with_cache(given.float()),
        "vocabulary": lambda: flex.interp.run_with_cache(given + 60),
        "size": lambda: flex.interp.run_with_cache(torch.cat([given, given]), microbatch_size=3),
        "different": lambda: flex.interp.run_with_cache(given + (rank == 1)),
        "inside": run(MID, lambda t, _: flex.interp.run_with_cache(given)),
        "empty trace": empty_trace,
        "late": late,
        "unknown": unknown,
        "several": several,
    }
    out = {name: said(call) for name, call in calls.items()}
    logits, _ = flex.interp.run_with_cache(given, MID)
    assert logits is not None
    assert torch.isfinite(logits).all()
    assert not flex.session.registry.entries
    flex.restore()
    return out


@pytest.mark.versions
def test_errors_are_raised_on_all_ranks_and_leave_nothing() -> None:
    first, *others = run(4, failures, Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2))
    for other in others:
        assert {n: (first[n], e) for n, e in other.items() if e != first[n]} == {}
    for name, values in {
        "name": ("blocks.0.hook_resid_mit", "blocks.0.hook_resid_mid"),
        "filter": (47,),
        "raises": ("decoder.layers.1:mid", "'mine'", "test_lens_use.py"),
        "shape": (MID, (2, 16, 32), (2, 15, 32)),
        "type": (MID, (2, 16, 32), "int"),
        "no function": (f"'{MID}', 3", "fwd_hooks"),
        "fixed": ("blocks.0.ln1.hook_scale", "hook_normalized"),
        "layer": ("hook_embed", "hook.layer"),
        "silent": ("loss:output",),
        "length": (5, 2, 6),
        "kind": ("torch.float32", "[batch, sequence]"),
        "vocabulary": (60, 64),
        "size": ("microbatch_size=3", 4),
        "different": ((2, 16),),
        "inside": ("decoder.layers.1:mid",),
        "empty trace": ("decoder.layers.0:output",),
        "late": ("HookError",),
        "unknown": ("decoder.layers.0.mpl:output", "decoder.layers.0.mlp:output"),
        "several": ("decoder.layers.*.mlp", 2),
    }.items():
        assert_names(first[name], *values)
