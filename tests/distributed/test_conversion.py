"""Weights of Transformers in Megatron, on four ranks: its places hold what those they came from compute."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.matrix import relative
from tests.support import gpt, theirs
from tests.support.conversion import FAMILIES, LAYERS, converted
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(
    find_spec("transformer_lens") is None or find_spec("transformers") is None,
    reason="needs transformer-lens and transformers: pip install --group peers",
)

BOUND = 1e-5  # of the greatest entry of the true tensor
EDITS = (
    "blocks.0.attn.hook_z",
    "blocks.0.hook_resid_post",
    "blocks.1.hook_resid_mid",
    "blocks.1.attn.hook_pattern",
)


def sites_of(family: str) -> dict[str, str]:
    """Where the tensors of TransformerLens' names pass in Megatron's model, as far as they pass as such."""
    points = {
        "hook_resid_pre": ":input",
        "hook_resid_mid": ":mid",
        "hook_resid_post": ":output",
        "attn.hook_q": ".self_attention:q",
        "attn.hook_k": ".self_attention:k",
        "attn.hook_v": ".self_attention:v",
        "attn.hook_pattern": ".self_attention.core_attention:probs",
        "attn.hook_z": ".self_attention.linear_proj:input",
        "mlp.hook_post": ".mlp.linear_fc2:input",
    }
    if family == "llama":  # where there are no biases, and rotary embeddings
        points |= {
            "attn.hook_rot_q": ".self_attention.core_attention:q",
            "attn.hook_rot_k": ".self_attention.core_attention:k",
            "mlp.hook_pre": ".mlp.linear_fc1:gate",
            "mlp.hook_pre_linear": ".mlp.linear_fc1:up",
            "hook_attn_out": ".self_attention.linear_proj:output",
            "hook_mlp_out": ".mlp.linear_fc2:output",
        }
    out = {
        f"blocks.{n}.{name}": f"decoder.layers.{n}{point}"
        for n in range(LAYERS)
        for name, point in points.items()
    }
    ends = {"hook_embed": "embedding.word_embeddings:output", "unembed.hook_out": "output_layer:output"}
    return out | ends | {"unembed.hook_in": "decoder.final_layernorm:output"}


def batch_first(name: str, tensor: Tensor) -> Tensor:
    """A tensor of Megatron with the dims of TransformerLens, or the other way round."""
    return tensor if name.endswith(("pattern", "hook_embed")) else tensor.transpose(0, 1)


def read(case: Case, family: str) -> dict[str, Tensor]:
    """What passes at each of these places, by TransformerLens' names; on the leader."""
    import megatron_flex as mf

    chunks = converted(case, family)
    sites = sites_of(family)
    with mf.attach(chunks, [mf.HookFunction(site) for site in sites.values()]) as flex:
        gpt.step(case, chunks, 0, forward_only=True)
        found = flex.output_dict
        return {n: batch_first(n, found[s][0]) for n, s in sites.items() if s in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_places_hold_what_both_have(family: str) -> None:
    true, case = theirs.known(family), FAMILIES[family]
    found, *others = run(case.world, read, case, family)
    assert true["agree"] < BOUND, "TransformerLens against Transformers"
    assert others == [{}, {}, {}]
    assert found.keys() == sites_of(family).keys()
    errors = {n: relative(t.reshape(true["cache"][n].shape), true["cache"][n]) for n, t in found.items()}
    assert max(errors.values()) < BOUND, errors
    stream = [found["blocks.0.hook_resid_pre"], found["blocks.0.hook_resid_post"], found["unembed.hook_in"]]
    for got, want in zip(stream, true["hidden"], strict=True):
        assert relative(got.contiguous(), want) < BOUND


def edit_batch_first(name: str, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    whole = batch_first(name, inputs)
    heads = whole.reshape(*whole.shape[:2], gpt.HEADS, -1) if "hook_z" in name else whole
    return batch_first(name, theirs.whole_edit(name, heads).reshape(whole.shape))


def edited(case: Case, family: str) -> dict[str, Tensor]:
    """Logits with one edit after the other; on the leader."""
    import megatron_flex as mf

    chunks = converted(case, family)
    sites, out = sites_of(family), {}
    for name in EDITS:
        edit = partial(edit_batch_first, name)
        hooks = [mf.HookFunction(sites[name], editing_function=edit, save=False)]
        with mf.attach(chunks, [*hooks, mf.HookFunction("output_layer")]) as flex:
            gpt.step(case, chunks, 0, forward_only=True)
            if flex.is_leader:
                out[name] = batch_first("", flex.output_dict["output_layer:output"][0]).contiguous()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_give_the_logits_of_transformer_lens(family: str) -> None:
    true, case = theirs.known(family), FAMILIES[family]
    found, *others = run(case.world, edited, case, family)
    assert others == [{}, {}, {}]
    for name in EDITS:
        want = true["edited"][name]
        assert relative(found[name], want) < BOUND, name
        assert relative(want, true["logits"]) > 100 * BOUND, "the edit does something"
