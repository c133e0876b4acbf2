"""The sizes of a model, by the names of TransformerLens' `cfg`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.errors import FlexError
from megatron_flex.lens.lens_names import LensNames


@dataclass(frozen=True)
class LensConfig:
    """The fields of TransformerLens' `HookedTransformerConfig` that describe a model.

    Attributes:
        n_layers: the number of blocks.
        d_model: the width of the residual stream.
        n_heads: the number of heads of queries.
        n_key_value_heads: the number of heads of keys and values; None if that is `n_heads`.
        d_head: the width of a head.
        d_mlp: the width of a dense MLP.
        d_vocab: the number of rows of W_E.
        n_ctx: the greatest number of positions; None if the model's configuration does not have it.
        eps: the constant that norms add to the mean square.
        normalization_type: `RMS` or `LN`.
        positional_embedding_type: `rotary`, `standard` for learned positions, or `none`.
        gated_mlp: whether MLPs are gated.
        parallel_attn_mlp: whether the MLP reads the same stream as attention.
        output_logits_soft_cap: the greatest absolute logit; -1 if a tanh does not cap them.

    Examples:
        >>> cfg = flex.interp.cfg
        >>> cfg.n_layers, cfg.d_model, cfg.n_heads, cfg.d_head
        (4, 32, 4, 8)
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_key_value_heads: int | None
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int | None
    eps: float
    normalization_type: str
    positional_embedding_type: str
    gated_mlp: bool
    parallel_attn_mlp: bool
    output_logits_soft_cap: float


def make_lens_config(names: LensNames) -> LensConfig:
    """The sizes of a model.

    Raises:
        FlexError: they are not known.
    """
    of = names.made_of
    if of is None:
        raise FlexError(
            "the sizes of this model are not known; cfg describes Megatron's decoders and the Hugging Face "
            "models that docs/lens.md lists"
        )
    learned = "standard" if names.has(of.paths.position_table) else "none"
    return LensConfig(
        n_layers=names.layers,
        d_model=of.hidden,
        n_heads=of.heads,
        n_key_value_heads=None if of.groups == of.heads else of.groups,
        d_head=of.head_size,
        d_mlp=of.neurons,
        d_vocab=of.vocabulary,
        n_ctx=of.context,
        eps=of.epsilon,
        normalization_type="RMS" if of.rms else "LN",
        positional_embedding_type="rotary" if of.rotary else learned,
        gated_mlp=of.gated,
        parallel_attn_mlp=of.paths.parallel,
        output_logits_soft_cap=of.soft_cap or -1.0,
    )
