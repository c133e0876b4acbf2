"""Gradients of a metric of the full logits at hook points, against autograd on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import BOUND
from tests.distributed.test_lens import far, lens, tokens
from tests.distributed.test_lens_use import said
from tests.distributed.test_prompts import padded, prompts
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

LAYERS = 4
ONE = Case("one", layers=LAYERS)
CASES = (
    Case("tp2 sp", tp=2, sp=True, layers=LAYERS),
    Case("pp2", pp=2, layers=LAYERS),
    Case("tp2 pp2", tp=2, pp=2, layers=LAYERS),
    Case("pp2 vpp2", pp=2, vpp=2, layers=LAYERS),
    Case("cp2", cp=2, layers=LAYERS),
)
SITES = {
    "hook_embed": "embedding.word_embeddings:output",
    "blocks.0.hook_resid_post": "decoder.layers.0:output",
    "blocks.0.attn.hook_q": "decoder.layers.0.self_attention.linear_qkv:q",
    "blocks.0.mlp.hook_post": "decoder.layers.0.mlp.linear_fc2:input",
    "blocks.1.attn.hook_pattern": "decoder.layers.1.self_attention.core_attention:probs",
    "blocks.1.hook_resid_mid": "decoder.layers.1:mid",
    "unembed.hook_in": "output_layer:input",
}


def metric(logits: Tensor) -> Tensor:
    """Ordinary code over all of the vocabulary and several positions."""
    scores = logits.log_softmax(-1)
    return scores[:, -1, 3].sum() - scores[0, 2, 60] + (logits[:, 1:] * logits[:, :-1]).mean()


def one_process(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and the metric's gradients by autograd in plain Megatron, batch first."""
    chunks = ranks.start(case.single())
    state, model = gpt.randomize(chunks[0]), chunks[0]
    seen: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        tensor.retain_grad()
        seen[name] = tensor
        return tensor

    for name, site in SITES.items():
        oracle.install(model, site, partial(keep, name))
    ids = tokens()
    metric(model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)).backward()
    gradients = {name: tensor.grad for name, tensor in seen.items()}
    first = ("hook_embed", "blocks.1.attn.hook_pattern")  # the batch dim is
    return state, {
        name: g if name in first else g.transpose(0, 1) for name, g in gradients.items() if g is not None
    }


def gradients(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """How far gradients are from one process, relative to the greatest."""
    flex, out = lens(case, state), {}
    parameters = [p for chunk in flex.chunks for p in chunk.parameters()]
    logits, cache = flex.interp.run_with_cache(tokens(), list(SITES), incl_bwd=True, metric=metric)
    plain, _ = flex.interp.run_with_cache(tokens(), [])
    assert torch.equal(logits, plain)
    for name, wanted in truth.items():
        out[name] = far(cache[f"{name}_grad"], wanted) / float(wanted.abs().max())
    everything = flex.interp.run_with_cache(tokens(), incl_bwd=True, metric=metric)[1]
    assert {f"{name}_grad" for name in SITES} < set(everything)
    assert "blocks.0.ln1.hook_scale_grad" not in everything
    # Of a metric that is a sum over sequences the microbatches' gradients are those of all at once.
    summed = {
        size: flex.interp.run_with_cache(
            tokens(), "hook_embed", incl_bwd=True, metric=lambda x: x.square().sum(), microbatch_size=size
        )[1]["hook_embed_grad"]
        for size in (1, None)
    }
    out["microbatches"] = far(summed[1], summed[None]) / float(summed[None].abs().max())
    assert all(
        p.grad is None and p.requires_grad and getattr(p, "main_grad", None) is None for p in parameters
    )
    assert not flex.session.registry.entries
    flex.restore()
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_of_a_metric_equal_one_process(case: Case) -> None:
    state, truth = truths.once(one_process, ONE)
    assert set(truth) == set(SITES)
    for distances in run(case.world, gradients, case, state, truth):
        assert max(distances.values()) <= BOUND, distances


def refused(case: Case, state: dict[str, Tensor]) -> dict[str, str]:
    flex, rank = lens(case, state), torch.distributed.get_rank()

    def broken(logits: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("mine")
        return logits.sum()

    metrics: dict[str, Callable[[Tensor], Any] | None] = {
        "shape": lambda logits: logits.sum(-1),
        "type": lambda logits: float(logits.sum()),
        "constant": lambda logits: torch.zeros((), requires_grad=True) * 2,
        "none": None,
        "one rank": broken,
        "ranks": lambda logits: (rank + 1) * logits.sum(),
    }
    call = partial(flex.interp.run_with_cache, tokens(), "hook_embed", incl_bwd=True)
    out = {name: said(partial(call, metric=function)) for name, function in metrics.items()}
    out["stop"] = said(partial(call, metric=metric, stop_at_layer=1))
    assert "hook_embed_grad" in call(metric=metric)[1]
    flex.restore()
    return out


def test_metrics_without_a_gradient_are_refused_on_all_ranks() -> None:
    case = CASES[1]
    first, second = run(case.world, refused, case, truths.once(one_process, ONE)[0])
    assert first == second
    assert_names(first["shape"], "FlexError", "metric", (2, 16))
    assert_names(first["type"], "FlexError", "metric", "float")
    assert_names(first["constant"], "FlexError", "metric")
    assert_names(first["none"], "FlexError", "metric=")
    assert_names(first["one rank"], "FlexError", "metric", "'mine'")
    assert_names(first["ranks"], "FlexError", "metric")
    assert_names(first["stop"], "FlexError", "stop_at_layer")


def test_gradients_of_ragged_prompts_equal_each_alone() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)).eval()
    alone: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        output.retain_grad()
        alone.append(output)

    handle = model.transformer.h[0].register_forward_hook(keep)
    for ids in prompts():
        model(ids[None]).logits[0, -1].log_softmax(-1)[3].backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    ids, mask = padded("left")
    last = mask.sum(1) - 1

    def at_the_last_token(logits: Tensor) -> Tensor:
        return logits[torch.arange(len(last)), last].log_softmax(-1)[:, 3].sum() + 0 * logits.sum()

    with mf.attach(model) as flex:
        arguments: dict[str, Any] = {"attention_mask": mask, "incl_bwd": True, "metric": at_the_last_token}
        _, cache = flex.interp.run_with_cache(ids, "transformer.h.0", **arguments)
    for row, wanted in zip(cache["transformer.h.0:output_grad"], alone, strict=True):
        assert wanted.grad is not None
        length = wanted.shape[1]
        assert far(row[:length], wanted.grad[0]) <= BOUND * float(wanted.grad.abs().max())
        assert not row[length:].any()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
