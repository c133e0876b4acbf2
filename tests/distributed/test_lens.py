"""Runs over whole tokens: caches, hooks and traces, against plain Megatron on one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.distributed.matrix import BOUND, Cell, greatest
from tests.distributed.test_matrix import VERSION
from tests.support import gpt, oracle, ranks, ssm, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

LAYERS = 2
ONE = Case("one", layers=LAYERS)
CASES = (
    Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=LAYERS),
    Case("pp2 vpp2", pp=2, vpp=2, layers=4),
    Case("cp2", cp=2, layers=LAYERS),
)
LAYER_NORM = Case(
    "tp2 sp, layernorm",
    tp=2,
    sp=True,
    layers=LAYERS,
    rms=False,
    bias=True,
    gated=False,
    rope=False,
    tied=True,
)

B, S, H, N, D, F, V = (
    gpt.BATCH,
    gpt.SEQUENCE,
    gpt.HIDDEN,
    gpt.HEADS,
    gpt.HIDDEN // gpt.HEADS,
    gpt.FFN,
    gpt.VOCABULARY,
)


Truth = tuple[dict[str, Tensor], dict[str, Tensor]]  # weights; tensors by name


def tokens() -> Tensor:
    return gpt.data(1)[0]["tokens"]


# what TransformerLens' names stand for, in terms of what plain hooks see on one process


def truth_of(case: Case) -> Truth:
    """TransformerLens' tensors by plain hooks and plain arithmetic on the one-process model."""
    chunks = ranks.start(case.single())
    state = gpt.randomize(chunks[0])
    model, seen = chunks[0], {}
    weights = dict(gpt.global_names(model))

    def keep(name: str, tensor: Tensor) -> Tensor:
        seen[name] = tensor.detach().clone()
        return tensor

    sites = [s for s in oracle.sites_of(case) if not s.startswith("loss")]
    for site in sites:
        oracle.install(model, site, partial(keep, site))
    ids = tokens()
    with torch.no_grad():
        logits = model(ids, torch.arange(S).expand(B, -1), None)
    return state, {**theirs(case, seen, weights), "logits": logits}


def theirs(case: Case, seen: dict[str, Tensor], weights: dict[str, Any]) -> dict[str, Tensor]:
    out = {"hook_embed": seen["embedding.word_embeddings:output"]}
    if not case.rope:
        out["hook_pos_embed"] = weights["embedding.position_embeddings.weight"][:S].detach().expand(B, S, H)

    def first(name: str, bias: str = "") -> Tensor:
        return seen[name].transpose(0, 1) + (weights[bias].detach() if bias in weights else 0)

    def norm(theirs: str, ours: str) -> None:
        x = first(f"{ours}:input")
        x = x if case.rms else x - x.mean(-1, keepdim=True)
        out[f"{theirs}.hook_scale"] = (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        out[f"{theirs}.hook_normalized"] = x / out[f"{theirs}.hook_scale"]

    for layer in range(case.layers):
        block, ours = f"blocks.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
        for name, site in (("pre", "input"), ("mid", "mid"), ("post", "output")):
            out[f"{block}.hook_resid_{name}"] = first(f"{ours}:{site}")
        norm(f"{block}.ln1", f"{ours}.input_layernorm")
        norm(f"{block}.ln2", f"{ours}.pre_mlp_layernorm")
        for part in "qkv":
            out[f"{block}.attn.hook_{part}"] = first(f"{attention}.linear_qkv:{part}")
        for part in "qk" if case.rope else "":
            out[f"{block}.attn.hook_rot_{part}"] = first(f"{attention}.core_attention:{part}")
        later = torch.ones(S, S).triu(1).bool()
        scores = seen[f"{attention}.core_attention:scores"]
        out[f"{block}.attn.hook_attn_scores"] = scores.masked_fill(later, -torch.inf)
        out[f"{block}.attn.hook_pattern"] = out[f"{block}.attn.hook_attn_scores"].softmax(-1)
        z = first(f"{attention}.core_attention:output").reshape(B, S, N, D)
        out[f"{block}.attn.hook_z"] = z
        output = weights[f"{attention}.linear_proj.weight"].detach().reshape(H, N, D)
        out[f"{block}.attn.hook_result"] = torch.einsum("bsnd,hnd->bsnh", z, output)
        out[f"{block}.hook_attn_out"] = out[f"{block}.hook_resid_mid"] - out[f"{block}.hook_resid_pre"]
        out[f"{block}.hook_mlp_out"] = out[f"{block}.hook_resid_post"] - out[f"{block}.hook_resid_mid"]
        if case.gated:
            out[f"{block}.mlp.hook_pre"], out[f"{block}.mlp.hook_pre_linear"] = first(
                f"{mlp}.linear_fc1:output"
            ).chunk(2, -1)
        else:
            out[f"{block}.mlp.hook_pre"] = first(f"{mlp}.linear_fc1:output", f"{mlp}.linear_fc1.bias")
        out[f"{block}.mlp.hook_post"] = first(f"{mlp}.linear_fc2:input")
    norm("ln_final", "decoder.final_layernorm")
    out["unembed.hook_in"], out["unembed.hook_out"] = (
        first("output_layer:input"),
        first("output_layer:output"),
    )
    return out


def lens(case: Case, state: dict[str, Tensor]) -> Any:
    """A FlexModel of a case with the weights of the one-process model."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    return mf.FlexModel(chunks)


def far(ours: Tensor, truth: Tensor) -> float:
    """The greatest difference relative to the greatest entry, of tensors with the same infinities."""
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    assert torch.equal(ours.isinf(), truth.isinf())
    ours, truth = (t.masked_fill(t.isinf(), 0.0) for t in (ours, truth))
    return float((ours - truth).abs().max() / truth.abs().max())


def judge(
    case: Case,
    check: str,
    answers: list[dict[str, float]],
    names: list[str],
    cells: list[Any],
    model: str = "GPT, by TransformerLens' names",
) -> None:
    """Of each name the greatest difference on any rank."""
    errors = {n: greatest(a[n] for a in answers) for n in names}
    matrix.judge([Cell(case.name, n, check, e, model=model) for n, e in errors.items()], cells)


def differences(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    flex = lens(case, state)
    logits, cache = flex.interp.run_with_cache(tokens())
    _, results = flex.interp.run_with_cache(tokens(), lambda name: name.endswith("hook_result"))
    assert not flex.output_dict
    found = {**cache, **results, "logits": logits}
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    flex.restore()
    return {name: far(found[name], truth[name]) for name in truth}


@pytest.mark.versions
@pytest.mark.parametrize("case", [ONE, *CASES, LAYER_NORM], ids=lambda c: c.name)
def test_a_cache_has_what_one_process_has(case: Case, cells: list[Any]) -> None:
    state, truth = truths.once(truth_of, case)
    answers = run(case.world, differences, case, state, truth)
    judge(case, "value", answers, list(truth), cells)


# -- what a cache computes -----------------------------------------------------------------------------


def sums(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Each decomposition put together again, against one process; by what it is of."""
    flex, out, last = lens(case, state), {}, case.layers - 1
    _, cache = flex.interp.run_with_cache(tokens())
    stream = truth[f"blocks.{last}.hook_resid_post"]
    parts, labels = cache.decompose_resid(return_labels=True)
    embeddings = ["embed"] if case.rope else ["embed", "pos_embed"]
    sublayers = [f"{n}_{kind}_out" for n in range(case.layers) for kind in ("attn", "mlp")]
    assert labels == embeddings + sublayers
    out["stream"] = far(parts.sum(0), stream)
    mid = cache.decompose_resid(last, mlp_input=True).sum(0)
    out["mid"] = far(mid, truth[f"blocks.{last}.hook_resid_mid"])
    bias = state.get(f"decoder.layers.{last}.self_attention.linear_proj.bias", torch.zeros(H))
    heads, labels = cache.stack_head_results(return_labels=True)
    assert labels == [f"L{n}H{m}" for n in range(case.layers) for m in range(N)]
    out["heads"] = far(heads[-N:].sum(0) + bias, truth[f"blocks.{last}.hook_attn_out"])
    out["remainder"] = far(cache.stack_head_results(incl_remainder=True).sum(0), stream)
    neurons = cache.stack_neuron_results(case.layers, pos_slice=-1)
    bias = state.get(f"decoder.layers.{last}.mlp.linear_fc2.bias", torch.zeros(H))
    out["neurons"] = far(neurons[-F:].sum(0) + bias, truth[f"blocks.{last}.hook_mlp_out"][:, -1])
    streams, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == [*(f"{n}_{at}" for n in range(case.layers) for at in ("pre", "mid")), "final_post"]
    out["lens"] = far(cache.logit_lens(streams)[-1], truth["logits"])
    assert torch.equal(streams[1], cache["resid_mid", 0])
    assert torch.equal(streams[-1], cache["resid_post", -1])
    normed = cache.accumulated_resid(1, apply_ln=True)[-1]
    out["scaled"] = far(normed, truth["blocks.1.ln1.hook_normalized"])
    out |= attributions(cache, parts, state, truth["logits"])
    flex.restore()
    return out


def attributions(cache: Any, parts: Tensor, state: dict[str, Tensor], logits: Tensor) -> dict[str, float]:
    chosen, others = tokens(), tokens().roll(1, 0)
    words = state.get("output_layer.weight", state["embedding.word_embeddings.weight"])
    constant = words @ state.get("decoder.final_layernorm.bias", torch.zeros(H))  # which no component adds
    true = (logits - constant).gather(-1, chosen[..., None]).squeeze(-1)
    less = (logits - constant).gather(-1, others[..., None]).squeeze(-1)
    one = (logits - constant)[:, -1].gather(-1, chosen[:, -1:]).squeeze(-1)
    of_one = cache.logit_attrs(parts[:, :, -1], chosen[:, -1], pos_slice=-1)
    assert of_one.shape == (len(parts), B)
    return {
        "logit": far(cache.logit_attrs(parts, chosen).sum(0), true),
        "difference of logits": far(cache.logit_attrs(parts, chosen, others).sum(0), true - less),
        "last logit": far(of_one.sum(0), one),
        "logit of one token": far(cache.logit_attrs(parts, 5).sum(0), (logits - constant)[..., 5]),
    }


@pytest.mark.versions
@pytest.mark.parametrize("case", [CASES[0], LAYER_NORM], ids=lambda c: c.name)
def test_decompositions_sum_to_what_one_process_has(case: Case, cells: list[Any]) -> None:
    state, truth = truths.once(truth_of, case)
    answers = run(case.world, sums, case, state, truth)
    judge(case, "computed value", answers, list(answers[0]), cells)


# -- hook functions ------------------------------------------------------------------------------------


def edit(tensor: Tensor) -> Tensor:
    """Treats every entry differently."""
    places = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
    return tensor * (1 + 0.1 * torch.cos(places)) + torch.where(tensor.isinf(), 0.0, 0.05)


def edited_plainly(case: Case, state: dict[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """Names, and the site and plain visit that amount to `edit` there."""
    attention, mlp = "decoder.layers.1.self_attention", "decoder.layers.1.mlp"

    def first(tensor: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return (edit(tensor.transpose(0, 1) + bias) - bias).transpose(0, 1)

    def heads(tensor: Tensor) -> Tensor:
        return edit(tensor.transpose(0, 1).reshape(B, S, N, D)).reshape(B, S, H).transpose(0, 1)

    def norm(name: str, tensor: Tensor) -> Tensor:
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias", 0.0)
        return edit((tensor.transpose(0, 1) - bias) / weight).mul(weight).add(bias).transpose(0, 1)

    def scores(tensor: Tensor) -> Tensor:
        return edit(tensor)

    out = {
        "blocks.0.hook_resid_post": ("decoder.layers.0:output", first),
        "blocks.1.hook_resid_mid": ("decoder.layers.1:mid", first),
        "blocks.1.attn.hook_k": (f"{attention}.linear_qkv:k", first),
        "blocks.1.attn.hook_attn_scores": (f"{attention}.core_attention:scores", scores),
        "blocks.1.attn.hook_pattern": (f"{attention}.core_attention:probs", edit),
        "blocks.1.attn.hook_z": (f"{attention}.linear_proj:input", heads),
        "blocks.1.hook_mlp_out": (
            f"{mlp}:output",
            partial(first, bias=state.get(f"{mlp}.linear_fc2.bias", 0.0)),
        ),
        "blocks.1.mlp.hook_post": (f"{mlp}.linear_fc2:input", first),
        "blocks.1.ln2.hook_normalized": (
            "decoder.layers.1.pre_mlp_layernorm:output",
            partial(norm, "decoder.layers.1.pre_mlp_layernorm"),
        ),
        "hook_embed": ("embedding.word_embeddings:output", edit),
    }
    if not case.gated:
        bias = state[f"{mlp}.linear_fc1.bias"]
        out["blocks.1.mlp.hook_pre"] = (f"{mlp}.linear_fc1:output", partial(first, bias=bias))
    if not case.rope:
        table = state["embedding.position_embeddings.weight"][:S]
        moved = (edit(table.expand(B, S, H)) - table).transpose(0, 1)
        out["hook_pos_embed"] = ("embedding:output", lambda tensor: tensor + moved)
    return out


def edited_truth(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and the logits of one process under each edit."""
    state, out = gpt.randomize(ranks.start(case.single())[0]), {}
    for name, (site, visit) in edited_plainly(case, state).items():
        (model,) = gpt.build(case.single())
        gpt.load([model], state)
        oracle.install(model, site, visit)
        with torch.no_grad():
            out[name] = model(tokens(), torch.arange(S).expand(B, -1), None)
    return state, out


def edited_differences(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    flex, out = lens(case, state), {}
    plain = flex.interp.run_with_hooks(tokens())
    for name, logits in truth.items():
        told = []

        def change(tensor: Tensor, hook: Any, told: list[str] = told) -> Tensor:
            told.append(hook.name)
            return edit(tensor)

        found = flex.interp.run_with_hooks(tokens(), [(name, change)])
        assert told in ([], [name]), "a function runs once, on ranks that have the place"
        out[name] = far(found, logits)
        assert far(plain, logits) > 100 * BOUND, name
    assert torch.equal(plain, flex.interp.run_with_hooks(tokens())), "nothing is left behind"
    flex.restore()
    return out


@pytest.mark.versions
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2], LAYER_NORM], ids=lambda c: c.name)
def test_hook_functions_do_what_they_do_on_one_process(case: Case, cells: list[Any]) -> None:
    state, truth = truths.once(edited_truth, case)
    answers = run(case.world, edited_differences, case, state, truth)
    judge(case, "edited logits", answers, list(truth), cells)


# -- other models --------------------------------------------------------------------------------------

PREDICTING = Case("prediction tp2 pp2", tp=2, pp=2, layers=2, extra={"mtp_num_layers": 1})
OTHERS = (
    Case("hybrid tp2 sp pp2", tp=2, sp=True, pp=2, hybrid=True, layers=2),
    Case("M*-E tp2 sp ep2", tp=2, sp=True, ep=2, pattern="M*-E", experts=4, extra=ssm.MAMBA),
    Case("experts tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, layers=2),
    Case("latent attention tp2 sp", tp=2, sp=True, mla="mended", q_rank=16, qk_norm=True, layers=2),
    Case("q/k norm tp4", tp=4, qk_norm=True, layers=2),
    PREDICTING,
    Case("te tp2 sp", tp=2, sp=True, te=True, layers=2),
    Case("scaled by layer", layers=2, extra={"apply_query_key_layer_scaling": True}),
)
SINCE = {
    **dict.fromkeys([c.name for c in OTHERS[:2]], ((0, 19), "HybridModel came with megatron-core 0.19")),
    PREDICTING.name: ((0, 19), "it is refused: Megatron itself wants labels"),
    "q/k norm tp4": ((0, 16), "fewer groups than ranks came with megatron-core 0.16"),
}


def plain_logits(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    chunks = ranks.start(case.single())
    state = gpt.randomize(chunks[0])
    with torch.no_grad():
        return state, chunks[0](tokens(), torch.arange(S).expand(B, -1), None)


def wholeness(case: Case, state: dict[str, Tensor], logits: Tensor) -> dict[str, float]:
    """How far the decomposition of any model is from its stream, and its logits from one process."""
    flex = lens(case, state)
    found, cache = flex.interp.run_with_cache(tokens())
    parts = cache.decompose_resid()
    out = {"logits": far(found, logits), "stream": far(parts.sum(0), cache["resid_post", -1])}
    for expand in (False, True):
        whole = cache.get_full_resid_decomposition(expand_neurons=expand)
        out[f"heads, neurons {expand} and the rest"] = far(whole.sum(0), cache["resid_post", -1])
    for name in (
        n for n in cache if n.endswith("hook_normalized") and "blocks" in n
    ):  # captured in the model
        layer, of_mlp = int(name.split(".")[1]), ".ln2." in name
        parts = cache.decompose_resid(layer, of_mlp, apply_ln=True)
        out[f"components before {name}"] = far(parts.sum(0), cache[name])
        whole = cache.get_full_resid_decomposition(layer, of_mlp, apply_ln=True)
        out[f"all components before {name}"] = far(whole.sum(0), cache[name])
        stream = cache.accumulated_resid(layer, True, True, mlp_input=of_mlp)[-1]
        out[f"stream before {name}"] = far(stream, cache[name])
    out["lens"] = far(cache.logit_lens(cache["resid_post", -1]), logits)
    patterns = [n for n in cache if n.endswith("hook_pattern")]
    for name in patterns:
        scores = cache[name.replace("pattern", "attn_scores")]
        out[name] = far(scores.softmax(-1), cache[name])
    if patterns:
        name = patterns[-1].replace("attn.hook_pattern", "hook_attn_out")
        heads = cache.stack_head_results()[-N:].sum(0)
        out["heads"] = far(heads, cache[name])
    flex.restore()
    return out


@pytest.mark.parametrize("case", OTHERS, ids=lambda c: c.name)
def test_other_models_decompose_too(case: Case, cells: list[Any]) -> None:
    first, why = SINCE.get(case.name, (VERSION, ""))
    if first > VERSION:
        pytest.skip(why)
    state, logits = truths.once(plain_logits, case)
    answers = run(case.world, wholeness, case, state, logits)
    for found in answers:
        assert {n: d for n, d in found.items() if not d <= BOUND} == {}
    for check, name in (("value", "logits"), ("computed value", "lens")):  # the rest is compared with itself
        judge(case, check, answers, [name], cells, "Other models, by TransformerLens' names")


def stacks_of_parts(case: Case, state: dict[str, Tensor]) -> tuple[list[bool], list[str], str]:
    import megatron_flex as mf

    flex = lens(case, state)
    _, cache = flex.interp.run_with_cache(tokens())
    attention, mlps = [n for n in cache if n.endswith("hook_z")], [n for n in cache if n.endswith("mlp_out")]
    same = [
        torch.equal(cache.stack_activation("z"), torch.stack([cache[n] for n in attention])),
        torch.equal(cache.stack_activation("mlp_out"), torch.stack([cache[n] for n in mlps])),
    ]
    _, labels = cache.stack_neuron_results(-1, neuron_slice=[5], return_labels=True)
    with pytest.raises(mf.FlexError) as error:
        cache.decompose_resid(0, mlp_input=True)
    flex.restore()
    return same, labels, str(error.value)


def test_stacks_of_a_hybrid_model_have_the_layers_that_have_the_part() -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    case = OTHERS[0]
    state, _ = truths.once(plain_logits, case)
    for same, labels, message in run(case.world, stacks_of_parts, case, state):
        assert same == [True, True]
        assert labels == ["L1N5", "L3N5"], "the MLPs of *-*-"
        assert_names(message, "mlp_input=True", "layer 0", "1, 3")


def without_labels(case: Case) -> tuple[str, tuple[int, ...]]:
    import megatron_flex as mf

    chunks, told = ranks.start(case), ""
    flex = mf.FlexModel(chunks)
    try:
        flex.interp.run_with_cache(tokens())
    except mf.FlexError as error:
        told = str(error)
    with flex.interp.trace() as t:
        stream = t["decoder.layers.1:mid"].output
        gpt.step(case, chunks, 0)
    return told, tuple(stream.value.shape)


@pytest.mark.versions
@pytest.mark.skipif(VERSION >= (0, 19), reason="Megatron runs it without labels since")
@pytest.mark.skipif(VERSION < (0, 16), reason="multi-token prediction is checked from megatron-core 0.16 on")
def test_a_model_that_needs_labels_is_refused_on_all_ranks() -> None:
    case = Case("prediction pp2", pp=2, layers=2, microbatches=1, extra=PREDICTING.extra)
    for told, shape in run(2, without_labels, case):
        assert_names(told, "mtp_num_layers=1")
        assert "flex.interp.trace()" in told
        assert shape == (B, S, H), "a step of one's own has them"
