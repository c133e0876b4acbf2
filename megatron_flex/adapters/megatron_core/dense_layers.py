"""The dense parts: embeddings, residual stream, norms, MLP, logits; multi-token prediction; other heads.

Layers of multi-token prediction follow the decoder, and each predicts one token further. They use the model's
own embedding and its output layer, which are therefore called once for each of them and once more for the
decoder. BERT's own parts follow the encoder, a stack like any other. T5's head holds its output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.adapted_linears import unadapted
from megatron_flex.adapters.megatron_core.megatron_taps import (
    bias_dropout_add,
    embedding_partial,
    norm_branch_input,
    not_copied,
    outside,
)
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import (
    COLUMN_LINEARS,
    ROW_LINEARS,
    is_identity,
    is_megatron,
    is_megatrons_own,
)
from megatron_flex.adapters.megatron_core.site_builder import (
    Kind,
    OwnerKind,
    ParameterKind,
    SiteBuilder,
    gate_up,
    norm_inside,
    used_on_full_tensor,
    used_on_local_tokens,
)
from megatron_flex.adapters.taps import module_input, module_output
from megatron_flex.layout import Dim, Layout, replicated
from megatron_flex.sites import Site, Tap

OP_FUSER_MLP = (
    "Transformer Engine's operation fuser runs the full MLP as one operation; "
    "set use_transformer_engine_op_fuser=False to have what is in it"
)
FIXED_IDS = "token ids have no gradient; give the model other tokens, or edit word_embeddings:output"
FINAL_NORMS = ("final_layernorm", "final_norm")
STREAM_NORMS = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm", *FINAL_NORMS)


def embedding(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The input of the decoder: the token ids, the word embeddings alone, and the embeddings.

    Layers of multi-token prediction call the same module, or on a later stage its copy; their embeddings
    are the input of their `enorm`. So these sites mean one call, whatever the stages. In T5 they mean two
    calls of each microbatch: the encoder's, then the decoder's.
    """
    if not b.is_first_stage:
        return
    later = getattr(b.root, "mtp", None)
    words = getattr(module, "word_embeddings", None)
    if words is not None:
        ids = Tap(module_input, words, (0, "input_"))
        ids = ids if later is None else ids.around(outside, later)
        yield b.site(f"{path}.word_embeddings:input", b.of.token_ids(), ids, read_only_reason=FIXED_IDS)
        # One rank has no reduction: there the partial sum is the output.
        inner = Tap(embedding_partial, words) if b.of.tp > 1 else Tap(module_output, words)
        inner = inner if later is None else inner.around(outside, later)
        yield b.site(f"{path}.word_embeddings:partial", b.of.word_embeddings_partial(words), inner)
        tap = Tap(module_output, words)
        tap = tap if later is None else tap.around(outside, later)
        yield b.site(f"{path}.word_embeddings:output", b.of.word_embeddings(words), tap)
    scattered = getattr(module, "scatter_to_sequence_parallel", True) and b.of.sequence_parallel
    tap = Tap(module_output, module)
    tap = tap if later is None else tap.around(outside, later)
    yield b.site(f"{path}:output", b.of.stream(scattered), tap)


def stack(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The stack of layers; its output matters where it ends, which is where the model does.

    Unless multi-token prediction is on an earlier stage than the loss: the stack ends before it. The last
    stage's stack has no layers then, and passes the hidden states of all predictions on, one after the other.
    """
    ends = b.is_last_stage or getattr(
        module, "post_process", False
    )  # some wrappers turn off the model's end alone
    if getattr(b.config, "mtp_num_layers", None):
        final = next((n for n in FINAL_NORMS if not is_identity(getattr(module, n, None))), None)
        ends = final is not None or (ends and len(module.layers) > 0)
    if ends:
        yield b.site(f"{path}:output", b.of.stream(), Tap(module_output, module))


def transformer_layer(b: SiteBuilder, path: str, layer: Any) -> Iterator[Site]:
    """A transformer layer: the residual stream before, between and after its sublayers."""
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, layer, (0, "hidden_states")))
    if not is_identity(layer.self_attn_bda) and not is_identity(layer.mlp):
        yield b.site(f"{path}:mid", b.of.stream(), Tap(bias_dropout_add, layer, ("self_attn_bda",)))
    if not is_identity(getattr(layer, "cross_attn_bda", None)):
        yield b.site(f"{path}:cross_mid", b.of.stream(), Tap(bias_dropout_add, layer, ("cross_attn_bda",)))
    yield b.site(f"{path}:output", b.of.stream(), Tap(module_output, layer))
    attention = layer.self_attention  # or a gated delta net
    for role, linear in (
        ("input_layernorm", getattr(attention, "linear_qkv", getattr(attention, "in_proj", None))),
        ("pre_mlp_layernorm", getattr(layer.mlp, "linear_fc1", None)),
    ):
        norm = getattr(layer, role, None)
        yield from norm_inside(b, f"{path}.{role}", norm, linear, b.of.stream())


def norm(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A norm on the residual stream."""
    stream = b.of.stream()
    if is_megatron(module, "TEFusedResidualRMSNorm"):
        entry, end = (Tap(tap, module).around(not_copied) for tap in (norm_branch_input, module_output))
        yield b.site(f"{path}:input", stream, entry)
        yield b.site(f"{path}:output", stream, end, beside=(stream,))
    elif not is_identity(module):
        yield from b.both(path, module, stream, "x")


def mlp(b: SiteBuilder, path: str, module: Any, width: int | None = None, hidden: str = "") -> Iterator[Site]:
    """A dense MLP, of the model's width unless another is given."""
    fused = OP_FUSER_MLP if is_megatron(module, "TEFusedMLP") else ""
    for site in b.both(path, module, b.of.stream(), "hidden_states", hidden, (b.of.bias_beside(),)):
        yield replace(site, tap=site.tap.around(not_copied)) if fused and site.tap else site
    for site in mlp_linears(b, path, module, width or b.config.ffn_hidden_size, hidden):
        yield replace(site, hidden=fused or site.hidden)


def mlp_linears(
    b: SiteBuilder, path: str, module: Any, width: int, hidden: str = "", input_width: int | None = None
) -> Iterator[Site]:
    """The two linears of an MLP of `width` features, whose input has `input_width` or the hidden size."""
    gated = b.config.gated_linear_unit
    layout = b.of.features("gate|up" if gated else "f", (1, 1) if gated else (1,))
    full = width * (2 if gated else 1)
    yield from b.column(
        f"{path}.linear_fc1", module.linear_fc1, layout, full, hidden=hidden, input_width=input_width
    )
    if gated:
        why_no_gate = hidden or b.no_rule(module.linear_fc1, COLUMN_LINEARS)
        yield from gate_up(b, f"{path}.linear_fc1", module.linear_fc1, why_no_gate, width)
    yield from b.row(f"{path}.linear_fc2", module.linear_fc2, "f", width, hidden)


def is_output_layer(module: Any) -> bool:
    """Whether a module gives logits. A value head in their place is one of the model's further modules."""
    if not isinstance(module, nn.Module):
        return False
    return is_megatrons_own(module) or is_megatron(unadapted(module), *COLUMN_LINEARS)


def output_layer(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The logits."""
    if not is_output_layer(module):
        return

    def resolve(kwargs: dict[str, Any]) -> Layout | None:
        return b.of.logits(True) if kwargs.get("runtime_gather_output") else None

    layout = b.of.logits(bool(getattr(unadapted(module), "gather_output", False)))
    width = b.sizes["v"]
    yield from b.column(path, module, layout, width if isinstance(width, int) else None, resolve)


DENSE_KINDS = (
    Kind(embedding, roles=("embedding",)),
    Kind(stack, ("TransformerBlock", "HybridStack", "MambaStack"), ("decoder", "encoder")),
    Kind(transformer_layer, ("TransformerLayer",)),
    Kind(norm, roles=STREAM_NORMS),
    Kind(mlp, ("MLP",), ("mlp",)),
    Kind(output_layer, roles=("output_layer",)),
)


def _column_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    if name.startswith("layer_norm_"):  # of the norm inside a TELayerNormColumnParallelLinear
        return used_on_local_tokens(of, role, name, parameter)
    if role == "output_layer":
        return of.vocabulary_cut(parameter.ndim)
    gated = role == "linear_fc1" and of.config.gated_linear_unit
    return of.rows_cut(parameter.ndim, (1, 1) if gated else (1,))


def _row_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.columns_cut() if name == "weight" else of.replicated(1, shared=of.sequence_parallel)


def _vocabulary_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.vocabulary_cut(2)


DENSE_PARAMETERS = (
    ParameterKind(_column_layout, COLUMN_LINEARS),
    ParameterKind(_row_layout, ROW_LINEARS),
    ParameterKind(_vocabulary_layout, ("VocabParallelEmbedding",)),
    ParameterKind(used_on_full_tensor, roles=("position_embeddings",)),
    ParameterKind(used_on_local_tokens, roles=STREAM_NORMS),
)


MTP_NORMS = ("enorm", "hnorm")


def mtp_block(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """All depths at the input of the output layer: `[(1 + depths) * s, b, h]`, the decoder's states first."""
    stream = b.of.stream()
    sequence, *rest = stream.dims
    last = module.layers[-1].layer_number
    depths = b.config.mtp_num_layers if getattr(module, "mtp_use_repeated_layer", False) else last
    depth = Dim(f"{1 + depths}s", sequence.cuts, segments=(1,) * (1 + depths))
    yield b.site(f"{path}:output", Layout((depth, *rest)), Tap(module_output, module))


def mtp_layer(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """One depth: its input states, and its output states for the next depth and the output layer."""
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, module, (2, "hidden_states")))
    yield b.site(f"{path}:output", b.of.stream(), Tap(module_output, module))


def mtp_projection(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Embedding and states concatenated, `[s, b, 2h]`, and the output of one linear on them."""
    yield from b.column(path, module, b.of.features("h"), None, input_width=2 * b.config.hidden_size)


MTP_KINDS = (
    Kind(mtp_block, ("MultiTokenPredictionBlock",)),
    Kind(mtp_layer, ("MultiTokenPredictionLayer",)),
    Kind(norm, roles=MTP_NORMS),
    Kind(mtp_projection, roles=("eh_proj",)),
)
MTP_PARAMETERS = (ParameterKind(used_on_local_tokens, roles=MTP_NORMS),)


def lm_head(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A replicated linear and norm, applied to the rank's part of the residual stream."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from b.both(f"{path}.dense", module.dense, b.of.stream(), "input")
    yield from b.both(f"{path}.layer_norm", module.layer_norm, b.of.stream(), "x")


def first_token(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The outputs for each sample's first token, `[b, ...]`, replicated."""
    layout = replicated("b", "h" if path == "pooler" else "classes")
    yield b.site(f"{path}:output", layout, Tap(module_output, module))


def _lm_head_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    for parameter in module.parameters():
        yield parameter, of.replicated(parameter.ndim, shared=of.sequence_parallel)


def _first_token_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    heads = [m for m in (getattr(module, "pooler", None), getattr(module, "binary_head", None)) if m]
    for parameter in (p for head in heads for p in head.parameters()):
        yield parameter, of.replicated(parameter.ndim, shared=False)


def t5_head(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The head around T5's output layer, which gives the same logits."""
    width = b.sizes["v"] if isinstance(b.sizes["v"], int) else None
    gathered = bool(getattr(module.output_layer, "gather_output", False))
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, module, (0, "hidden_states")))
    yield b.site(f"{path}:output", b.of.logits(gathered), Tap(module_output, module), width=width)


HEAD_KINDS = (
    Kind(lm_head, ("BertLMHead",)),
    Kind(t5_head, ("T5LMHead",)),
    Kind(first_token, roles=("pooler", "binary_head")),
)
BERT_PARAMETERS = (ParameterKind(used_on_full_tensor, roles=("tokentype_embeddings",)),)
BERT_OWNERS = (OwnerKind(_lm_head_layouts, ("BertLMHead",)), OwnerKind(_first_token_layouts, ("BertModel",)))
