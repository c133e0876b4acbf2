"""What docs/arguments.md says of arguments that change logits, embeddings, norms or the softmax.

With each of them two tensor parallel ranks have the hook points of one process with the same values, and the
quantities of `flex.interp` are the model's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.support import argument_table, gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
from tests.distributed.test_matrix import VERSION

pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="some arguments came with megatron-core 0.19")
MUP = {"use_mup": True, "mup_base_hidden_size": 8, "mup_embedding_mult": 3.0}
LEARNED: dict[str, Any] = {"rms": False, "rope": False, "gated": False, "bias": True, "tied": True}
CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by flag: the configuration, and the model
    "use-mup": (MUP, {}),
    "mup-embedding-mult": (MUP | {"mup_base_head_dim": 4.0}, LEARNED),
    "mup-output-mult": (MUP | {"mup_output_mult": 0.5, "mup_attn_scale_power": 0.5}, {"tied": True}),
    "softmax-type": ({"softmax_type": "learnable"}, {}),
    "softmax-type off-by-one": ({"softmax_type": "off-by-one"}, {}),
    "apply-query-key-layer-scaling": ({"apply_query_key_layer_scaling": True}, {}),
    "apply-layernorm-1p": ({"layernorm_zero_centered_gamma": True}, LEARNED),
    "norm-epsilon": ({"layernorm_epsilon": 0.1}, {}),
    "attention-softmax-in-fp32": ({"attention_softmax_in_fp32": False}, {}),
    "cross-entropy-loss-fusion": ({"cross_entropy_loss_fusion": True}, {}),
    "fp16-lm-cross-entropy": ({"fp16_lm_cross_entropy": True}, {}),
    "rotary-interleaved": ({"rotary_interleaved": True}, {}),
    "window-size": ({"window_size": (4, 0)}, {}),
    "qk-clip": ({"qk_clip": True}, {}),
    "fp32-residual-connection": ({"fp32_residual_connection": True}, {}),
    "apply-residual-connection-post-layernorm": ({"apply_residual_connection_post_layernorm": True}, {}),
    "qk-l2-norm": ({"qk_l2_norm": True}, {}),
    "attention-output-gate": ({"attention_output_gate": True}, {}),
}


def case_of(claim: str) -> Case:
    extra, model = CLAIMS[claim]
    return Case(claim, layers=2, microbatches=1, extra=extra, **model)


def tokens() -> Tensor:
    return gpt.data(1)[0]["tokens"]


def own_logits(model: nn.Module) -> Tensor:
    """The logits that a model of one process returns."""
    positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        return model(tokens(), positions, mask)


def lens(flex: mf.FlexModel) -> dict[str, Tensor]:
    """What should be the logits, and what should be the residual stream before the last norm."""
    logits, cache = flex.interp.run_with_cache(tokens())
    assert logits is not None
    with flex.interp.trace(tokens()) as trace:
        traced = trace.logits
    doubled = flex.interp.run_with_hooks(tokens(), [("unembed.hook_out", lambda seen, _: 2 * seen)])
    parts = cache.decompose_resid()
    heads = cache.get_full_resid_decomposition(expand_neurons=False)
    attributions = torch.stack([cache.logit_attrs(parts, t).sum(0) for t in range(gpt.VOCABULARY)], -1)
    return {
        "logits": logits,
        "logit_lens": cache.logit_lens(cache.accumulated_resid())[-1],
        "logit_attrs": attributions,
        "trace": traced.value,
        "half of an edit": doubled / 2,
        "run_with_hooks": flex.interp.run_with_hooks(tokens(), []),
        "stream": cache["blocks.1.hook_resid_post"],
        "decompose_resid": parts.sum(0),
        "get_full_resid_decomposition": heads.sum(0),
    }


def alone(claim: str) -> dict[str, Any]:
    """One process: its weights, the logits that it returns, and what hooks read."""
    case = case_of(claim)
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    return {"state": state, "own": own_logits(chunks[0]), **read(case, chunks)}


def spread(claim: str, state: dict[str, Tensor]) -> dict[str, Any]:
    case = replace(case_of(claim), tp=2, sp=True)
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    return read(case, chunks)


def read(case: Case, chunks: list[nn.Module]) -> dict[str, Any]:
    with mf.attach(chunks, []) as flex:
        quantities = lens(flex)
        hidden = {site.name for site in flex.sites() if site.hidden}
    with mf.attach(chunks, [mf.HookFunction(lambda site: not site.hidden)]) as flex:
        losses = gpt.step(case, chunks, 0)
        sites = {name: tensors[0] for name, tensors in flex.output_dict.items()}
    return {"quantities": quantities, "losses": losses, "sites": sites, "hidden": hidden}


def close(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors differ by round-off alone, seen by the greatest entry."""
    got, want = got.double(), want.double()
    return got.shape == want.shape and float((got - want).abs().max()) <= 2e-5 * float(
        want.abs().max() + 1e-6
    )


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_argument_has_the_effect_that_the_page_says(claim: str) -> None:
    (want,) = run(1, alone, claim)
    first, other = run(2, spread, claim, want["state"])
    assert first["hidden"] == want["hidden"]
    assert first["sites"].keys() == want["sites"].keys()
    assert len(first["sites"]) > 40
    for name, tensor in want["sites"].items():
        assert close(first["sites"][name], tensor), name
    assert first["losses"] == pytest.approx(want["losses"], rel=1e-5)
    for answer in (want, first, other):
        quantities = answer["quantities"]
        for name in ("logits", "trace", "run_with_hooks", "half of an edit", "logit_lens"):
            assert close(quantities[name], want["own"]), name
        if not CLAIMS[claim][1]:  # attributions leave out what a LayerNorm's bias adds
            assert close(quantities["logit_attrs"], want["own"])
        for name in ("decompose_resid", "get_full_resid_decomposition"):
            assert close(quantities[name], quantities["stream"]), name


def test_every_claim_is_of_an_argument_in_the_table() -> None:
    flags = {flag for group in argument_table.read()["group"] for flag in group["flags"].split()}
    assert {claim.partition(" ")[0] for claim in CLAIMS} <= flags


# -- heads that do more than multiply --------------------------------------------------------------------


def capped(case: Case, where: str) -> dict[str, str]:
    """The errors of methods that need the output layer's weight alone, with a soft cap of the logits."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class CappedLinear(ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, bias = super().forward(*args, **kwargs)
            return 3 * torch.tanh(out / 3), bias

    class CappedModel(GPTModel):
        def _scale_logits(self, logits: Tensor) -> Tensor:
            return 3 * torch.tanh(super()._scale_logits(logits) / 3)

    chunks, out = ranks.start(case), {}
    if where == "model":
        chunks[0].__class__ = CappedModel
    elif (layer := getattr(chunks[0], "output_layer", None)) is not None:
        layer.__class__ = CappedLinear
    with mf.attach(chunks, []) as flex:
        logits, cache = flex.interp.run_with_cache(tokens())
        assert logits is not None
        if case.world == 1:
            assert torch.equal(logits, own_logits(chunks[0]))
        stack = cache.decompose_resid()
        for name, call in (
            ("logit_lens", lambda: cache.logit_lens(stack)),
            ("logit_attrs", lambda: cache.logit_attrs(stack, 5)),
        ):
            with raises(mf.FlexError, "run_with_cache()") as raised:
                call()
            out[name] = str(raised.value)
    return out


@pytest.mark.parametrize(("where", "named"), [("layer", "CappedLinear"), ("model", "CappedModel")])
def test_a_head_that_does_more_than_multiply_is_refused_on_all_ranks(where: str, named: str) -> None:
    for case in (Case("one", layers=2), Case("pp2", pp=2, layers=2)):
        for told in run(case.world, capped, case, where):
            assert all(named in text for text in told.values()), told


# -- a dump ------------------------------------------------------------------------------------------


def test_the_lens_of_a_dump_has_the_scale_of_the_logits(tmp_path: Path) -> None:
    (answer,) = run(1, dumped, str(tmp_path / "dump"))
    probabilities, logits = answer
    assert torch.allclose(probabilities, logits, rtol=1e-4)


def dumped(path: str) -> tuple[Tensor, Tensor]:
    """The likeliest token's probability after the last layer, by the dump and by the model's own logits."""
    case = case_of("use-mup")
    chunks = ranks.start(case)
    gpt.randomize(chunks[0])
    parameters = ["decoder.final_layernorm.weight", "output_layer.weight"]
    with mf.attach(chunks, dumps=mf.Dump(path, ["decoder.layers.*"], parameters=parameters)):
        gpt.step(case, chunks, 0)
    from megatron_flex import figures

    found = figures.logit_lens(path, top=1)
    return torch.tensor(found.probabilities[-1, :, 0]), own_logits(chunks[0])[0].softmax(-1).amax(-1)
