"""The causal language models of transformers whose parts are known: one table for each family.

A table is chosen by the `model_type` of the decoder's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron_flex.adapters.adapter_base import Architecture
from megatron_flex.adapters.decoder_paths import DecoderPaths, LayerPoint, NormPoint
from megatron_flex.adapters.huggingface_taps import ARGUMENTS, attention_point, residual_stream
from megatron_flex.adapters.module_names import named_modules, unwrap
from megatron_flex.adapters.named_inputs import find_named_models
from megatron_flex.sites import Tap

ATTENTION = {
    "attn.hook_q": LayerPoint("self_attn.q_proj:output", heads="n"),
    "attn.hook_k": LayerPoint("self_attn.k_proj:output", heads="g"),
    "attn.hook_v": LayerPoint("self_attn.v_proj:output", heads="g"),
    "attn.hook_rot_q": LayerPoint("self_attn:query", heads_first=True),
    "attn.hook_rot_k": LayerPoint("self_attn:key", heads_first=True),
    "attn.hook_attn_scores": LayerPoint("self_attn:scores"),
    "attn.hook_pattern": LayerPoint("self_attn:probs"),
    "attn.hook_z": LayerPoint("self_attn.o_proj:input", heads="n"),
    "hook_attn_out": LayerPoint("self_attn:output"),
}
GATED_MLP = {
    "mlp.hook_pre": LayerPoint("mlp.gate_proj:output"),
    "mlp.hook_pre_linear": LayerPoint("mlp.up_proj:output"),
    "mlp.hook_post": LayerPoint("mlp.down_proj:input"),
    "hook_mlp_out": LayerPoint("mlp:output"),
}
# Relative to the decoder; `embedding` and `head` are found in the model.
LLAMA = DecoderPaths(
    layers="layers",
    embedding="",
    head="",
    final_norms=("norm",),
    attention="self_attn",
    attention_points=ATTENTION,
    head_output="self_attn.o_proj",
    mlp_points=GATED_MLP,
    neuron_output="mlp.down_proj",
    norms={"ln1": NormPoint("input_layernorm"), "ln2": NormPoint("post_attention_layernorm")},
    mid="post_attention_layernorm",
)
NORMED_ATTENTION = {**ATTENTION, "hook_attn_out": LayerPoint("post_attention_layernorm:output")}
NORMED_MLP = {**GATED_MLP, "hook_mlp_out": LayerPoint("post_feedforward_layernorm:output")}
GEMMA_2 = replace(
    LLAMA,
    attention_points=NORMED_ATTENTION,
    mlp_points=NORMED_MLP,
    norms={
        "ln1": NormPoint("input_layernorm"),
        "ln1_post": NormPoint("post_attention_layernorm"),
        "ln2": NormPoint("pre_feedforward_layernorm"),
        "ln2_post": NormPoint("post_feedforward_layernorm"),
    },
    normed_outputs=True,
    mid="pre_feedforward_layernorm",
)
OLMO_2 = replace(
    GEMMA_2,
    norms={
        "ln1": NormPoint("post_attention_layernorm"),
        "ln2": NormPoint("post_feedforward_layernorm"),
    },
    normed_inputs=False,
    mid="mlp",
)
PHI_3 = replace(
    LLAMA,
    attention_points=ATTENTION
    | {
        f"attn.hook_{part}": LayerPoint("self_attn.qkv_proj:output", heads="ngg", index=index)
        for index, part in enumerate("qkv")
    },
    mlp_points=GATED_MLP
    | {
        "mlp.hook_pre": LayerPoint("mlp.gate_up_proj:output", index=0, parts=2),
        "mlp.hook_pre_linear": LayerPoint("mlp.gate_up_proj:output", index=1, parts=2),
    },
)
PHI = replace(
    LLAMA,
    final_norms=("final_layernorm",),
    attention_points=ATTENTION | {"attn.hook_z": LayerPoint("self_attn.dense:input", heads="n")},
    head_output="self_attn.dense",
    mlp_points={
        "mlp.hook_pre": LayerPoint("mlp.fc1:output"),
        "mlp.hook_post": LayerPoint("mlp.fc2:input"),
        "hook_mlp_out": LayerPoint("mlp:output"),
    },
    neuron_output="mlp.fc2",
    norms={
        "ln1": NormPoint("input_layernorm", "self_attn:input"),
        "ln2": NormPoint("input_layernorm", "mlp:input"),
    },
    parallel=True,
    mid="",
)
GPT_2 = replace(
    LLAMA,
    layers="h",
    final_norms=("ln_f",),
    attention="attn",
    attention_points={
        **{
            f"attn.hook_{part}": LayerPoint("attn.c_attn:output", heads="nnn", index=index)
            for index, part in enumerate("qkv")
        },
        "attn.hook_attn_scores": LayerPoint("attn:scores"),
        "attn.hook_pattern": LayerPoint("attn:probs"),
        "attn.hook_z": LayerPoint("attn.c_proj:input", heads="n"),
        "hook_attn_out": LayerPoint("attn:output"),
    },
    head_output="attn.c_proj",
    mlp_points={
        "mlp.hook_pre": LayerPoint("mlp.c_fc:output"),
        "mlp.hook_post": LayerPoint("mlp.c_proj:input"),
        "hook_mlp_out": LayerPoint("mlp:output"),
    },
    neuron_output="mlp.c_proj",
    norms={"ln1": NormPoint("ln_1"), "ln2": NormPoint("ln_2")},
    position_sum="drop:input",
    position_table="wpe.weight",
    transposed=True,
    mid="ln_2",
)
FAMILIES: Mapping[str, DecoderPaths] = {
    "gemma": LLAMA,
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_2,
    "gpt2": GPT_2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "olmo2": OLMO_2,
    "phi": PHI,
    "phi3": PHI_3,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA,
}
UNIT_OFFSET = ("gemma", "gemma2", "gemma3_text")  # families whose norms store their weight minus one


@dataclass(frozen=True)
class HuggingFaceDecoder:
    """A causal language model of transformers in a module.

    Attributes:
        config: the configuration of its decoder.
        paths: where its parts are, in the outermost module.
        modules: the modules of the outermost one by their names, without wrappers.
    """

    config: Any
    paths: DecoderPaths
    modules: Mapping[str, Any]


def find_decoder(root: nn.Module) -> HuggingFaceDecoder | None:
    """The model in a module, if there is one and its family has a table."""
    models: list[Any] = list(find_named_models(root))
    if len(models) != 1:
        return None
    (model,) = models
    head, decoder = model.get_output_embeddings(), unwrap(model.get_decoder())
    family = FAMILIES.get(getattr(decoder.config, "model_type", ""))
    if family is None or head is None:
        return None
    modules = dict(named_modules(root))
    names = {module: name for name, module in modules.items()}
    before = f"{names[decoder]}." if names.get(decoder) else ""
    paths = replace(
        family,
        layers=before + family.layers,
        embedding=names.get(unwrap(model.get_input_embeddings()), ""),
        head=names.get(unwrap(head), ""),
        final_norms=tuple(before + name for name in family.final_norms),
        position_sum=family.position_sum and before + family.position_sum,
        position_table=family.position_table and before + family.position_table,
    )
    return HuggingFaceDecoder(decoder.config, paths, modules) if _has_parts(paths, modules) else None


def _has_parts(paths: DecoderPaths, modules: Mapping[str, Any]) -> bool:
    """Whether a model was left as its family builds it, with the parts that hook points are made of."""
    parts = [paths.layers, paths.embedding, paths.head, *paths.final_norms]
    if not all(part and part in modules for part in parts):
        return False
    inside = [paths.attention, *([paths.mid] if paths.mid else [])]
    layers = map(paths.layer, range(len(modules[paths.layers])))
    return all(f"{layer}.{part}" in modules for layer in layers for part in inside)


def read_huggingface_architecture(root: nn.Module) -> Architecture | None:
    """The properties of the decoder in a module; None if its family has no table."""
    decoder = find_decoder(root)
    if decoder is None:
        return None
    config, paths, family = decoder.config, decoder.paths, decoder.config.model_type
    heads: int = config.num_attention_heads
    norm = decoder.modules[paths.final_norms[0]]
    embedding, head = decoder.modules[paths.embedding], decoder.modules[paths.head]
    return Architecture(
        paths=paths,
        heads=heads,
        groups=_count_groups(config, paths),
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        neurons=_find_width(config),
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        rms=not isinstance(norm, nn.LayerNorm),
        epsilon=_find_epsilon(config),
        unit_offset=family in UNIT_OFFSET,
        gated="mlp.hook_pre_linear" in paths.mlp_points,
        rotary="attn.hook_rot_q" in paths.attention_points,
        mask_added=True,
        tied=getattr(head, "weight", None) is getattr(embedding, "weight", head),
        table_scale=float(getattr(embedding, "scalar_embed_scale", 1.0)),
        soft_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        not_linear=_explain_head(paths.head, head),
    )


def _explain_head(path: str, head: nn.Module) -> str:
    """Why the logits may be more than a product with the head's weight, such as that of LoRA."""
    kind = type(head)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return "" if kind is nn.Linear else f"{path} is a {name}, which may do more than multiply by its weight"


def _count_groups(config: Any, paths: DecoderPaths) -> int:
    """The number of heads of keys and values; a configuration may have a number that its model ignores."""
    grouped = any("g" in point.heads for point in paths.attention_points.values())
    groups = getattr(config, "num_key_value_heads", None) if grouped else None
    return int(groups or config.num_attention_heads)


def _find_width(config: Any) -> int:
    """The width of a dense MLP; GPT-2's configuration has None for the default."""
    widths = (getattr(config, name, None) for name in ("intermediate_size", "n_inner"))
    return int(next((width for width in widths if width is not None), 4 * config.hidden_size))


def _find_epsilon(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    return next(float(getattr(config, name)) for name in names if hasattr(config, name))


@dataclass(frozen=True)
class InnerPoint:
    """A hook point inside a module's forward.

    Attributes:
        name: `query`, `scores`, `mid`, ...
        tap: access to its tensor.
        hidden: why it cannot be hooked; empty if it can.
    """

    name: str
    tap: Tap
    hidden: str = ""


def find_inner_points(root: nn.Module) -> dict[nn.Module, list[InnerPoint]]:
    """The hook points inside the layers of a model, by module, besides inputs and outputs."""
    decoder = find_decoder(root)
    if decoder is None:
        return {}
    paths, modules = decoder.paths, decoder.modules
    points: dict[nn.Module, list[InnerPoint]] = {}
    for number in range(len(modules[paths.layers])):
        layer = paths.layer(number)
        if paths.mid:
            tap = Tap(residual_stream, modules[f"{layer}.{paths.mid}"])
            points[modules[layer]] = [InnerPoint("mid", tap)]
        attention = modules[f"{layer}.{paths.attention}"]
        points[attention] = list(_attention_points(attention, decoder.config._attn_implementation))
    return points


def _attention_points(attention: nn.Module, implementation: str) -> Iterator[InnerPoint]:
    """What attention uses, `[b, n, s, d]`, and its scores and probabilities, `[b, n, s, s]`."""
    inside = getattr(attention, "reorder_and_upcast_attn", False) and implementation == "eager"
    hidden = "it is computed with reorder_and_upcast_attn; set that to False" if inside else ""
    for name in ARGUMENTS:
        yield InnerPoint(name, Tap(attention_point, attention, (name,)), hidden)
    if implementation != "eager":
        hidden = (
            f"attention {implementation!r} computes it inside of a kernel; load the model with "
            'attn_implementation="eager"'
        )
    for name in ("scores", "probs"):
        yield InnerPoint(name, Tap(attention_point, attention, (name,)), hidden)
