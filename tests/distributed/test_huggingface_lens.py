"""TransformerLens' names on Hugging Face models, compared with TransformerLens, and two ranks with one."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import BOUND, relative
from tests.distributed.test_transformer_lens import COMPUTED, error
from tests.support import theirs
from tests.support.lens_families import COPIES, FAMILIES, INSIDE, LAYERS
from tests.support.messages import raises
from tests.support.pool import run_alone

pytestmark = pytest.mark.skipif(
    find_spec("transformer_lens") is None or find_spec("transformers") is None,
    reason="needs transformer-lens and transformers: pip install --group peers",
)
TOKENS = theirs.TOKENS
LENS_FAMILIES = [name for name, family in FAMILIES.items() if family.convert]
FULL = "get_full_resid_decomposition"
# Methods that scale by the norm in front of a layer, which OLMo-2 lacks, and those of dense MLPs.
SCALED = {
    name for name in theirs.METHODS if "of an MLP" in name or "by MLP" in name or name.endswith(", scaled")
}
SCALED |= {"apply_ln_to_stack"}
NEURONS = {"get_neuron_results", "stack_neuron_results", "short names", FULL}
# With norms after attention and MLP, TransformerLens' heads and neurons do not sum to the stream; here they
# are not components then.
NOT_A_SUM = {FULL, f"{FULL}, by MLP"}
LEFT_OUT: dict[str, set[str]] = {
    "gemma2": NOT_A_SUM,
    "gemma3": NOT_A_SUM,
    "olmo2": SCALED | NOT_A_SUM,
    "mixtral": NEURONS,
    "phi": {n for n in theirs.METHODS if n.endswith((" MLP", "middles", "final norm", "short names"))},
}


@cache
def models(name: str) -> tuple[Any, Any]:
    """The model in transformers and in TransformerLens."""
    source = FAMILIES[name].model()
    return source, FAMILIES[name].lens_model(source)


def missing(lens: Any) -> set[str]:
    """The names of TransformerLens that are not here: copies of the stream, and what is inside of modules."""
    inside = {n for n in lens.hook_dict if ".experts." in n or "_expert_" in n}
    return {n for n in lens.hook_dict if n.endswith((*COPIES, *INSIDE))} | inside


def fold_final_norm(lens: Any) -> None:
    """Fold the weight of the final norm alone: a norm after a sublayer cannot be folded."""
    with torch.no_grad():
        lens.unembed.W_U.mul_(lens.ln_final.w[:, None])
        lens.ln_final.w.fill_(1.0)


def agree(name: str, what: str, errors: dict[str, float]) -> None:
    worst = max(errors, key=lambda n: errors[n])
    print(f"{name}, {what}: {len(errors)} compared, greatest difference {errors[worst]:.1e} {worst}")
    assert errors[worst] <= BOUND, {n: e for n, e in errors.items() if e > BOUND}


@pytest.mark.parametrize("name", LENS_FAMILIES)
def test_the_cache_is_transformer_lens_cache(name: str) -> None:
    source, lens = models(name)
    with torch.no_grad():
        logits, kept = lens.run_with_cache(TOKENS)
    with mf.FlexModel(source) as flex:
        ours, cache = flex.interp.run_with_cache(TOKENS, lambda name: True)
    assert set(cache) == set(lens.hook_dict) - missing(lens)
    errors = {n: error(tensor, kept[n]) for n, tensor in cache.items()}
    agree(name, "cache", {**errors, "logits": error(ours, logits)})


@pytest.mark.parametrize("name", LENS_FAMILIES)
def test_sizes_and_embeddings_are_the_same(name: str) -> None:
    source, lens = models(name)
    with mf.FlexModel(source) as flex:
        for size, value in asdict(flex.interp.cfg).items():
            assert value == getattr(lens.cfg, size), size
        errors = {"W_E": error(flex.interp.W_E, lens.W_E), "W_U": error(flex.interp.W_U, lens.W_U)}
    agree(name, "weights", errors)


@pytest.mark.parametrize("name", LENS_FAMILIES)
def test_what_is_computed_from_the_cache_is_the_same(name: str) -> None:
    source, lens = models(name)
    methods = {m: call for m, call in theirs.METHODS.items() if m not in LEFT_OUT.get(name, set())}
    folded = FAMILIES[name].lens_model(source)
    (fold_final_norm if name == "olmo2" else theirs.folded)(folded)
    with torch.no_grad(), mf.FlexModel(source) as flex:
        _, cache = flex.interp.run_with_cache(TOKENS)
        streams = cache.accumulated_resid(incl_mid=True)
        logits = lens.unembed(lens.ln_final(streams.flatten(0, 1))).unflatten(0, (-1, 2))
        cap = lens.cfg.output_logits_soft_cap
        logits = cap * torch.tanh(logits / cap) if cap > 0 else logits
        errors = {"logit_lens": error(cache.logit_lens(streams), logits)}
        _, kept = folded.run_with_cache(TOKENS)
        errors |= {method: error(call(cache), call(kept)) for method, call in methods.items()}
        for expand in (True, False):
            parts = cache.get_full_resid_decomposition(expand_neurons=expand)
            errors[f"sum of parts, {expand}"] = relative(parts.sum(0), cache["resid_post", -1])
        if name == "olmo2":
            for method in SCALED:
                with pytest.raises(mf.FlexError):
                    theirs.METHODS[method](cache)
    agree(name, "methods", errors)


@pytest.mark.parametrize("name", LENS_FAMILIES)
def test_an_edit_at_each_name_does_the_same(name: str) -> None:
    source, lens = models(name)

    def edit(tensor: Tensor, hook: Any) -> Tensor:
        return theirs.whole_edit(hook.name, tensor)

    errors = {}
    with torch.no_grad(), mf.FlexModel(source) as flex:
        plain = lens(TOKENS)
        for hook in flex.interp.names.aliases:
            if hook.endswith(COMPUTED):
                with pytest.raises(mf.HookError):
                    flex.interp.run_with_hooks(TOKENS, [(hook, edit)])
                continue
            want = lens.run_with_hooks(TOKENS, fwd_hooks=[(hook, edit)])
            assert relative(want, plain) > 100 * BOUND, f"the edit of {hook} does something"
            errors[hook] = relative(flex.interp.run_with_hooks(TOKENS, [(hook, edit)]), want)
    agree(name, "edits", errors)


PARALLEL = [name for name, family in FAMILIES.items() if family.tensor_parallel]


def answers(model: Any, name: str) -> dict[str, Any]:
    """What a model says, on one process or on each rank."""
    out: dict[str, Any] = {}
    left_out = LEFT_OUT.get(name, set()) | (NEURONS if name == "qwen3_moe" else set())

    def edit(tensor: Tensor, hook: Any) -> Tensor:
        return theirs.whole_edit(hook.name, tensor)

    with mf.FlexModel(model) as flex:
        logits, cache = flex.interp.run_with_cache(TOKENS, lambda _: True)
        out |= {"logits": logits, **cache}
        out |= {m: call(cache) for m, call in theirs.METHODS.items() if m not in left_out}
        out["logit_lens"] = cache.logit_lens(cache.accumulated_resid())
        out |= {"W_E": flex.interp.W_E, "W_U": flex.interp.W_U}
        names = [n for n in flex.interp.names.aliases if "blocks.1" not in n and not n.endswith(COMPUTED)]
        out["edited"] = flex.interp.run_with_hooks(TOKENS, [(names, edit)])  # at all of them in one run
    return out


def parallel_answers(folders: dict[str, str]) -> dict[str, Any]:
    """The same of each family on this rank's shards."""
    import transformers

    options = {"tp_plan": "auto", "attn_implementation": "eager"}
    return {
        name: answers(transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval(), name)
        for name, folder in folders.items()
    }


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    folders, wanted = {}, {}
    for name in PARALLEL:
        model, folders[name] = FAMILIES[name].model(), str(tmp_path / name)
        model.save_pretrained(folders[name])
        wanted[name] = answers(model, name)
    for got in run_alone(2, parallel_answers, folders):
        for name, want in wanted.items():
            assert got[name].keys() == want.keys()
            errors = {n: error(got[name][n], tensor) for n, tensor in want.items()}
            agree(name, "two ranks", errors | {"last": error(want["logit_lens"][-1], want["logits"])})


def test_experts_are_those_of_plain_hooks() -> None:
    """TransformerLens lacks Qwen3-MoE: its own outputs and torch's hooks are the truth."""
    model = FAMILIES["qwen3_moe"].model()
    kept: dict[str, Tensor] = {}

    def keep(module: Any, _: Any, output: Any) -> None:
        kept[keys[module]] = output if isinstance(output, Tensor) else output[0]

    keys: dict[Any, str] = {}
    for n, layer in enumerate(model.model.layers):
        keys[layer.self_attn] = f"blocks.{n}.hook_attn_out"
        keys[layer.mlp] = f"blocks.{n}.hook_mlp_out"
    handles = [module.register_forward_hook(keep) for module in keys]
    with torch.no_grad():
        true = model(TOKENS, output_hidden_states=True, output_attentions=True)
    for handle in handles:
        handle.remove()
    with mf.FlexModel(model) as flex:
        names = set(flex.interp.names.aliases)
        _, cache = flex.interp.run_with_cache(TOKENS)
    for n in range(LAYERS):
        kept[f"blocks.{n}.hook_resid_pre"] = true.hidden_states[n]
        kept[f"blocks.{n}.attn.hook_pattern"] = true.attentions[n]
    errors = {name: error(cache[name], want) for name, want in kept.items()}
    errors["sum"] = error(cache.decompose_resid().sum(0), cache["resid_post", -1])
    errors["logit_lens"] = error(cache.logit_lens(cache["resid_post", -1]), true.logits)
    agree("qwen3_moe", "plain hooks", errors)
    assert not any(name.startswith("blocks.0.mlp.") for name in names), "experts"
    assert "blocks.1.mlp.hook_post" in names, "a dense layer"


def test_a_kernel_hides_scores_and_the_error_names_the_setting() -> None:
    with mf.FlexModel(FAMILIES["llama"].model(attn_implementation="sdpa")) as flex:
        for hook in ("blocks.0.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"):
            with raises(mf.SiteError, hook, "sdpa", 'attn_implementation="eager"'):
                flex.interp.run_with_cache(TOKENS, hook)
        _, cache = flex.interp.run_with_cache(TOKENS)
    assert not [name for name in cache if name.endswith(("hook_pattern", "hook_attn_scores"))]
    with mf.FlexModel(models("llama")[0]) as flex:
        _, eager = flex.interp.run_with_cache(TOKENS)
    agree("llama", "sdpa", {name: error(tensor, eager[name]) for name, tensor in cache.items()})


@pytest.mark.parametrize("point", ["model.layers.0:mid", "model.layers.1.self_attn:probs"])
def test_gradients_flow_through_an_edit(point: str) -> None:
    """A preset gets the model's tensor and saves it for the backward pass, so it must stay as it was."""
    hook = {"mid": "blocks.0.hook_resid_mid", "probs": "blocks.1.attn.hook_pattern"}[point.partition(":")[2]]
    source, lens = models("llama")
    with lens.hooks(fwd_hooks=[(hook, lambda tensor, hook: tensor.clamp(-0.2, 0.2))]):
        lens(TOKENS).square().mean().backward()
    with mf.attach(source, [mf.HookFunction(point, editing_function=mf.edits.clamp(-0.2, 0.2), save=False)]):
        source(TOKENS).logits.square().mean().backward()
    down = source.model.layers[0].mlp.down_proj.weight.grad.T
    errors = {
        "embedding": error(source.model.embed_tokens.weight.grad, lens.embed.W_E.grad),
        "down_proj": error(down, lens.blocks[0].mlp.W_out.grad),
    }
    source.zero_grad()
    lens.zero_grad()
    agree("llama", f"gradients, {point}", errors)


def test_a_trace_has_the_short_names() -> None:
    source, lens = models("gemma2")
    with torch.no_grad():
        _, kept = lens.run_with_cache(TOKENS)
    with mf.FlexModel(source) as flex, flex.interp.trace(TOKENS) as trace:
        handles = {
            "blocks.1.hook_resid_post": trace["blocks.1"].output,
            "blocks.0.hook_attn_out": trace["blocks.0.attn"].output,
            "blocks.0.hook_mlp_out": trace["blocks.0.mlp"].output,
            "blocks.0.hook_resid_mid": trace["blocks.0.ln2"].input,
            "unembed.hook_out": trace["unembed"].output,
            "hook_embed": trace["embed"].output,
        }
    agree("gemma2", "trace", {name: error(handle.value, kept[name]) for name, handle in handles.items()})


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_padded_prompt_has_the_values_that_it_has_alone(name: str) -> None:
    source, _ = models(name)
    mask = torch.ones_like(TOKENS)
    mask[0, :6] = 0
    with mf.FlexModel(source) as flex:
        _, cache = flex.interp.run_with_cache(TOKENS, lambda _: True, attention_mask=mask)
        _, alone = flex.interp.run_with_cache(TOKENS[:1, 6:], lambda _: True)
    length, errors = alone["resid_pre", 0].shape[1], {}
    for hook, want in alone.items():
        attention = hook.endswith(("hook_pattern", "hook_attn_scores"))
        got = cache[hook][:1, :, :length, :length] if attention else cache[hook][:1, :length]
        padding = cache[hook][:1, :, length:] if attention else cache[hook][:1, length:]
        errors[hook] = max(error(got, want), float(padding.abs().max()))
    agree(name, "padded", errors)


class ForeignLayer(torch.nn.Module):
    """A layer without the parts of its family."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return 2 * hidden


def test_fewer_layers_than_configured_and_foreign_ones() -> None:
    """The layers are those that a model has; without the family's parts it is a plain module."""
    model = FAMILIES["llama"].model()
    model.model.layers = model.model.layers[:1]
    with mf.FlexModel(model) as flex:
        logits, cache = flex.interp.run_with_cache(TOKENS)
        assert flex.interp.cfg.n_layers == 1
        agree("llama", "one layer", {"logit_lens": error(cache.logit_lens(cache["resid_post", -1]), logits)})
    model.model.layers[0] = ForeignLayer()
    with mf.FlexModel(model) as flex:
        assert not flex.interp.names.aliases
        assert "lm_head:output" in flex.interp.run_with_cache(TOKENS)[1]
        with raises(mf.FlexError, "cfg"):
            flex.interp.cfg  # noqa: B018  # the property raises


INNER = {  # hook points inside of layers and what TransformerLens calls them, with its tensor to ours
    "model.layers.0:mid": ("blocks.0.hook_resid_mid", lambda t: t),
    "model.layers.0.self_attn:query": ("blocks.0.attn.hook_rot_q", lambda t: t.transpose(1, 2)),
    "model.layers.0.self_attn:key": ("blocks.0.attn.hook_rot_k", lambda t: t.transpose(1, 2)),
    "model.layers.1.self_attn:value": ("blocks.1.attn.hook_v", lambda t: t.transpose(1, 2)),
    "model.layers.1.self_attn:scores": ("blocks.1.attn.hook_attn_scores", lambda t: t),
    "model.layers.1.self_attn:probs": ("blocks.1.attn.hook_pattern", lambda t: t),
}


def inner_gradients(folder: str, **options: Any) -> dict[str, Tensor]:
    """The gradients at these points."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    ).eval()
    hooks = [mf.HookFunction(point, hook_type="tensor") for point in INNER]
    with mf.attach(model, hooks) as flex:
        model(TOKENS).logits.square().mean().backward()
        return {site: captures[0] for site, captures in flex.output_dict.items() if site.endswith(".grad")}


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_gradients_inside_of_layers(name: str, tmp_path: Path) -> None:
    source, lens = models(name)
    source.save_pretrained(tmp_path)
    wanted: dict[str, Tensor] = {}

    def keep(point: str, tensor: Tensor, hook: Any) -> None:
        wanted[f"{point}.grad"] = INNER[point][1](tensor).clone()

    hooks = [(theirs_name, partial(keep, point)) for point, (theirs_name, _) in INNER.items()]
    with lens.hooks(bwd_hooks=hooks):
        lens(TOKENS).square().mean().backward()
    lens.zero_grad()
    ours = {"one process": inner_gradients(str(tmp_path))}
    ours["two ranks"] = run_alone(2, partial(inner_gradients, tp_plan="auto"), str(tmp_path))[0]
    for how, gradients in ours.items():
        assert gradients.keys() == wanted.keys()
        agree(name, f"gradients, {how}", {n: error(gradients[n], want) for n, want in wanted.items()})


def test_an_adapter_has_the_values_of_the_merged_model() -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(FAMILIES["llama"].model(), config).eval()
    with mf.FlexModel(adapted) as flex:
        _, cache = flex.interp.run_with_cache(TOKENS, lambda _: True)
        with raises(mf.FlexError, "base_model.model.model.layers.0.self_attn.o_proj", "hook_attn_out"):
            cache.stack_head_results()
    with mf.FlexModel(adapted.merge_and_unload()) as flex:
        _, merged = flex.interp.run_with_cache(TOKENS)
    agree("llama", "adapter", {name: error(cache[name], want) for name, want in merged.items()})
