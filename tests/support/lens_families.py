"""Small causal language models of transformers with random weights, and the same in TransformerLens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import gpt, theirs

LAYERS, HEAD, EPSILON, WINDOW, CAP = 2, 8, 1e-5, 5, 2.0
SHAPE: dict[str, Any] = {
    "hidden_size": gpt.HIDDEN,
    "intermediate_size": gpt.FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": gpt.HEADS,
    "num_key_value_heads": gpt.GROUPS,
    "max_position_embeddings": gpt.SEQUENCE,
    "rms_norm_eps": EPSILON,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
GEMMA: dict[str, Any] = {
    "head_dim": HEAD,
    "query_pre_attn_scalar": HEAD,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
# What TransformerLens calls the same.
GATED: dict[str, Any] = {
    "act_fn": "silu",
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "rotary_dim": HEAD,
    "n_key_value_heads": gpt.GROUPS,
    "gated_mlp": True,
    "final_rms": True,
}
LENS_GEMMA: dict[str, Any] = {
    "act_fn": "gelu_pytorch_tanh",
    "use_normalization_before_and_after": True,
    "use_local_attn": True,
    "window_size": WINDOW,
    "attn_types": ["local", "global"],
}
COPIES = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")
INSIDE = ("_norm.hook_scale", "_norm.hook_normalized")  # of queries and keys


@dataclass(frozen=True)
class LensFamily:
    """A configuration of transformers.

    Attributes:
        name: the class of the configuration, without `Config`.
        settings: its arguments besides `SHAPE`.
        convert: TransformerLens' conversion of its weights; empty if it has none.
        lens: the arguments of its configuration there.
        tensor_parallel: whether transformers has a plan for it.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    convert: str = ""
    lens: dict[str, Any] = field(default_factory=dict)
    tensor_parallel: bool = True

    def model(self, **options: Any) -> Any:
        """The model in transformers, with weights that hide nothing (norms and biases too)."""
        import transformers

        settings = {
            **SHAPE,
            **self.settings,
            "vocab_size": gpt.VOCABULARY,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        config = getattr(transformers, f"{self.name}Config")(**settings)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(
            config, **{"attn_implementation": "eager", **options}
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    def lens_model(self, source: Any) -> Any:
        """The model in TransformerLens, by its own conversion; nothing folded, nothing centred."""
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained import weight_conversions

        common = {**theirs.lens_sizes(LAYERS, EPSILON), "original_architecture": type(source).__name__}
        model = HookedTransformer(HookedTransformerConfig(**{**common, **self.lens}))
        weights = getattr(weight_conversions, self.convert)(source, model.cfg)
        missing, unexpected = model.load_state_dict(
            {name: value.detach() for name, value in weights.items()}, strict=False
        )
        ignored = ("mask", "IGNORE", "rotary_sin", "rotary_cos", "b_U", "ln1.b", "ln2.b", "b_in", "b_out")
        assert all(name.endswith(ignored) for name in [*missing, *unexpected]), (missing, unexpected)
        return model.eval()


FAMILIES: dict[str, LensFamily] = {
    "llama": LensFamily("Llama", {}, "convert_llama_weights", GATED),
    "mistral": LensFamily(
        "Mistral",
        {"sliding_window": WINDOW, "head_dim": HEAD},
        "convert_mistral_weights",
        {**GATED, "use_local_attn": True, "window_size": WINDOW, "attn_types": ["local"] * LAYERS},
    ),
    "qwen2": LensFamily("Qwen2", {"tie_word_embeddings": True}, "convert_qwen2_weights", GATED),
    "qwen3": LensFamily("Qwen3", {"head_dim": HEAD}, "convert_qwen3_weights", {**GATED, "use_qk_norm": True}),
    "gemma2": LensFamily(
        "Gemma2",
        {**GEMMA, "final_logit_softcapping": CAP, "attn_logit_softcapping": CAP},
        "convert_gemma_weights",
        {**GATED, **LENS_GEMMA, "output_logits_soft_cap": CAP, "attn_scores_soft_cap": CAP},
    ),
    "gemma3": LensFamily(
        "Gemma3Text",
        {
            **GEMMA,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "convert_gemma_weights",
        {**GATED, **LENS_GEMMA, "use_qk_norm": True, "rotary_base": 10000, "rotary_base_local": 100},
    ),
    "gpt2": LensFamily(
        "GPT2",
        {"n_inner": gpt.FFN, "layer_norm_epsilon": EPSILON, "tie_word_embeddings": True},
        "convert_gpt2_weights",
        {"act_fn": "gelu_new", "normalization_type": "LN", "positional_embedding_type": "standard"},
        tensor_parallel=False,
    ),
    "phi": LensFamily(
        "Phi",
        {
            "num_key_value_heads": gpt.HEADS,
            "layer_norm_eps": EPSILON,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "convert_phi_weights",
        {
            "act_fn": "gelu_new",
            "normalization_type": "LN",
            "positional_embedding_type": "rotary",
            "rotary_dim": HEAD // 2,
            "parallel_attn_mlp": True,
        },
    ),
    "phi3": LensFamily("Phi3", {}, "convert_phi3_weights", GATED),
    "olmo2": LensFamily(
        "Olmo2",
        {"num_key_value_heads": gpt.HEADS},
        "convert_olmo2_weights",
        {**GATED, "n_key_value_heads": None},
    ),
    "mixtral": LensFamily(
        "Mixtral",
        {**EXPERTS, "num_local_experts": 4, "head_dim": HEAD},
        "convert_mixtral_weights",
        {**GATED, "rotary_base": 1000000, "num_experts": 4, "experts_per_token": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe": LensFamily(
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": HEAD, "mlp_only_layers": [1]},
    ),
}
