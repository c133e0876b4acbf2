"""The models of random weights in Transformers and in TransformerLens, and what these have to say of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.distributed.matrix import relative
from tests.support import gpt, truths
from tests.support.conversion import EPSILON, HEAD, LAYERS, transformers_model


def lens_sizes(layers: int, epsilon: float) -> dict[str, Any]:
    """What TransformerLens' configuration says of the sizes of the small models."""
    return {
        "n_layers": layers,
        "d_model": gpt.HIDDEN,
        "n_ctx": gpt.SEQUENCE,
        "d_head": HEAD,
        "n_heads": gpt.HEADS,
        "d_mlp": gpt.FFN,
        "d_vocab": gpt.VOCABULARY,
        "eps": epsilon,
        "use_attn_result": True,
        "device": "cpu",
    }


def lens_model(family: str, source: Any) -> Any:
    """The model in TransformerLens, by its own conversion; nothing folded, nothing centred."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights

    common = lens_sizes(LAYERS, EPSILON)
    if family == "gpt2":
        config = HookedTransformerConfig(
            **common, act_fn="gelu_new", normalization_type="LN", positional_embedding_type="standard"
        )
    else:
        config = HookedTransformerConfig(
            **common,
            act_fn="silu",
            normalization_type="RMS",
            positional_embedding_type="rotary",
            rotary_dim=HEAD,
            n_key_value_heads=gpt.GROUPS,
            gated_mlp=True,
            final_rms=True,
        )
    model = HookedTransformer(config)
    convert = convert_gpt2_weights if family == "gpt2" else convert_llama_weights
    found = {name: value.detach() for name, value in convert(source, config).items()}
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert all(name.endswith(("mask", "IGNORE", "rotary_sin", "rotary_cos", "b_U")) for name in missing)
    return model.eval()


def folded(model: Any) -> None:
    """Move the norms' weights into those behind them, as TransformerLens does with what it loads by name."""
    model.load_and_process_state_dict(
        model.state_dict(),
        fold_ln=True,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )


# -- what is asked of both sides -------------------------------------------------------------------------


def whole_edit(name: str, tensor: Tensor) -> Tensor:
    """An edit that treats every entry differently and mixes neighbours: no shard can do it alone."""
    places = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
    scaled = tensor * (1 + 0.2 * torch.cos(places))
    return scaled if "scores" in name else scaled + 0.1 * tensor.roll(1, -1).roll(1, 0)  # -inf there


def without_a_head(z: Tensor, hook: Any) -> None:
    """Takes one head away, in place: `[batch, pos, head, d_head]`."""
    z[..., 2, :] = 0


IN_PLACE = [("blocks.1.attn.hook_z", without_a_head)]
SEVERAL = ("blocks.0.attn.hook_v", "blocks.0.mlp.hook_post", "blocks.1.hook_resid_mid")


def of_one_sequence(cache: Any) -> list[Tensor]:
    """From a cache without a batch dim."""
    return [
        cache["resid_post", 1],
        cache.decompose_resid(apply_ln=True),
        cache.stack_head_results(incl_remainder=True),
        cache.accumulated_resid(apply_ln=True),
        cache.logit_attrs(cache.decompose_resid(), TOKENS[0], OTHERS[0], has_batch_dim=False),
    ]


def public(cache: Any) -> set[str]:
    """The names of what a cache has and can do."""
    return {name for name in dir(type(cache)) if not name.startswith("_")}


Method = Callable[[Any], Any]
TOKENS = gpt.data(1)[0]["tokens"]
OTHERS = gpt.data(1)[0]["labels"]
METHODS: dict[str, Method] = {
    "accumulated_resid": lambda c: c.accumulated_resid(return_labels=True),
    "accumulated_resid, middles": lambda c: c.accumulated_resid(incl_mid=True, return_labels=True),
    "accumulated_resid, final norm": lambda c: c.accumulated_resid(apply_ln=True, incl_mid=True),
    "accumulated_resid, of an MLP": lambda c: c.accumulated_resid(
        layer=1, mlp_input=True, apply_ln=True, pos_slice=(3, 9), return_labels=True
    ),
    "decompose_resid": lambda c: c.decompose_resid(return_labels=True),
    "decompose_resid, attention": lambda c: c.decompose_resid(mode="attn", incl_embeds=False),
    "decompose_resid, MLPs": lambda c: c.decompose_resid(layer=1, mode="mlp", return_labels=True),
    "decompose_resid, of an MLP": lambda c: c.decompose_resid(layer=1, mlp_input=True, apply_ln=True),
    "decompose_resid, one place": lambda c: c.decompose_resid(apply_ln=True, pos_slice=-1),
    "stack_head_results": lambda c: c.stack_head_results(return_labels=True, incl_remainder=True),
    "stack_head_results, scaled": lambda c: c.stack_head_results(layer=1, apply_ln=True, pos_slice=(2, 5)),
    "get_neuron_results": lambda c: c.get_neuron_results(1, neuron_slice=(0, 7), pos_slice=-1),
    "stack_neuron_results": lambda c: c.stack_neuron_results(
        1, neuron_slice=[3, 8, 40], return_labels=True, incl_remainder=True
    ),
    "stack_activation": lambda c: c.stack_activation("q"),
    "stack_activation of norms": lambda c: c.stack_activation("scale", sublayer_type="ln2"),
    "apply_ln_to_stack": lambda c: c.apply_ln_to_stack(c.decompose_resid(1), 1),
    "logit_attrs": lambda c: c.logit_attrs(c.decompose_resid(), TOKENS),
    "logit_attrs, difference": lambda c: c.logit_attrs(c.accumulated_resid(), TOKENS, OTHERS),
    "logit_attrs, one place": lambda c: c.logit_attrs(
        c.stack_head_results(pos_slice=-1), TOKENS[:, 0], OTHERS[:, 0], pos_slice=-1
    ),
    "logit_attrs, one token": lambda c: c.logit_attrs(c.decompose_resid(mode="mlp"), 5),
    "get_full_resid_decomposition": lambda c: c.get_full_resid_decomposition(return_labels=True),
    "get_full_resid_decomposition, by MLP": lambda c: c.get_full_resid_decomposition(
        1, mlp_input=True, expand_neurons=False, apply_ln=True, pos_slice=(1, 4), return_labels=True
    ),
    "apply_slice_to_batch_dim": lambda c: [
        of_one_sequence(c.apply_slice_to_batch_dim(1)),
        c.apply_slice_to_batch_dim((0, 1))["q", 1],
    ],
    "short names": lambda c: [
        c["resid_post", -1],
        c["resid_mid", 0],
        c["q", 1],
        c["k1"],
        c["pattern", 0],
        c["attn", 1],
        c["scale", 1, "ln1"],
        c["scale", 1, "ln2"],
        c["mlp_out", 0],
        c["post", 1],
        c["embed"],
        c["normalized"],
    ],
}


def truth(family: str) -> dict[str, Any]:
    """What Transformers and TransformerLens have to say, on one process."""
    source = transformers_model(family)
    model = lens_model(family, source)
    with torch.no_grad():
        theirs = source(TOKENS, output_hidden_states=True)
        logits, kept = model.run_with_cache(TOKENS)
        streams = kept.accumulated_resid(incl_mid=True)
        out = {
            "agree": relative(logits, theirs.logits),
            "hidden": list(theirs.hidden_states),  # the last one behind the final norm
            "logits": logits,
            "shorter": model(TOKENS[:1, :6]),
            "cache": dict(kept.items()),
            "public": public(kept),
            "names": list(model.hook_dict),
            "edited": _edited(model, list(kept)),
        }
        methods = {"logit_lens": model.unembed(model.ln_final(streams.flatten(0, 1))).unflatten(0, (-1, 2))}
        folded(model)
        methods |= {name: method(model.run_with_cache(TOKENS)[1]) for name, method in METHODS.items()}
        one = model.run_with_cache(TOKENS[:1], remove_batch_dim=True)[1]
        methods["one sequence"] = of_one_sequence(one)
    return {**out, "methods": methods}


def _edited(model: Any, names: list[str]) -> dict[str, Tensor]:
    """Logits with one edit after the other."""

    def edit(tensor: Tensor, hook: Any) -> Tensor:
        return whole_edit(hook.name, tensor)

    out = {name: model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)]) for name in names}
    out["in place"] = model.run_with_hooks(TOKENS, fwd_hooks=IN_PLACE)
    out["several"] = model.run_with_hooks(TOKENS, fwd_hooks=[(n, edit) for n in SEVERAL])
    return out


@cache
def known(family: str) -> dict[str, Any]:
    """The same, in a process of its own."""
    return truths.once(truth, family)
