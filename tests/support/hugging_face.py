"""Tiny models of Hugging Face with random weights, and Megatron models built from their configurations."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import context, gpt, latent
from tests.support.gpt import Case

SEQUENCE, SAMPLES, LAYERS = 16, 2, 4
ODD_VOCABULARY = 61  # which two ranks cannot divide
COMMON: dict[str, Any] = {
    "vocab_size": gpt.VOCABULARY,
    "hidden_size": gpt.HIDDEN,
    "intermediate_size": gpt.FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": gpt.HEADS,
    "num_key_value_heads": gpt.GROUPS,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS, EXPERT_WIDTH, TOP_K = 4, 24, 2


def case(name: str, **sizes: Any) -> Case:
    """A layout of the small models here, with one microbatch."""
    return Case(name, microbatches=1, layers=LAYERS, **sizes)


@dataclass(frozen=True)
class Family:
    """A tiny configuration.

    Attributes:
        kind: the name of the configuration's class.
        settings: its arguments.
        layouts: the layouts that it is converted in besides one process.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        import transformers

        return getattr(transformers, self.kind)(**self.settings, attn_implementation="eager")


ROPE = {"rope_type": "default", "rope_theta": 500.0}
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2Config",
        {
            "vocab_size": ODD_VOCABULARY,
            "n_positions": SEQUENCE,
            "n_embd": gpt.HIDDEN,
            "n_layer": LAYERS,
            "n_head": gpt.HEADS,
            "n_inner": gpt.FFN,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "llama": Family("LlamaConfig", {**COMMON, "rope_parameters": ROPE}),
    "llama3": Family(
        "LlamaConfig",
        {
            **COMMON,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral": Family("MistralConfig", {**COMMON, "sliding_window": 5, "head_dim": 12}),
    "qwen2": Family("Qwen2Config", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": Family("Qwen3Config", {**COMMON, "head_dim": 16}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {
            **COMMON,
            "head_dim": 16,
            "num_experts": EXPERTS,
            "moe_intermediate_size": EXPERT_WIDTH,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": Family(
        "MixtralConfig", {**COMMON, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        {
            **COMMON,
            "num_key_value_heads": gpt.HEADS,
            "moe_intermediate_size": EXPERT_WIDTH,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": latent.KV,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": latent.VALUE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": SEQUENCE,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
            },
        },
    ),
}


# Fields that the configurations above leave at their defaults, several at once; `STRAY` are fields that the
# modules of these architectures ignore, as files of converted models have them.
STRAY = {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": None}
_YARN = FAMILIES["deepseek_v3"].settings["rope_parameters"]
_ONE_GROUP = {**FAMILIES["deepseek_v3"].settings, "n_group": 1, "topk_group": 1}
VARIANTS: dict[str, Family] = {
    "llama, biases": Family(
        "LlamaConfig",
        {
            **COMMON,
            "vocab_size": ODD_VOCABULARY,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-3,
            "pad_token_id": 3,
        },
    ),
    "mistral, linear": Family(
        "MistralConfig",
        {
            **COMMON,
            **STRAY,
            "sliding_window": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "qwen2, windows": Family(
        "Qwen2Config",
        {
            **COMMON,
            **STRAY,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 2,
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "qwen3_moe, windows": Family(
        "Qwen3MoeConfig",
        {
            **FAMILIES["qwen3_moe"].settings,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen3_moe, no experts": Family("Qwen3MoeConfig", {**FAMILIES["qwen3_moe"].settings, "num_experts": 0}),
    "mixtral, three experts": Family(
        "MixtralConfig",
        {**FAMILIES["mixtral"].settings, **STRAY, "num_experts_per_tok": 3, "sliding_window": 5},
    ),
    "deepseek_v3, one group": Family(
        "DeepseekV3Config",
        {
            **_ONE_GROUP,
            "num_experts_per_tok": 6,
            "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3, one expert": Family(
        "DeepseekV3Config",
        {
            **_ONE_GROUP,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "rope_parameters": {**_YARN, "mscale_all_dim": None, "factor": None, "attention_factor": 1.3},
            "max_position_embeddings": 4 * SEQUENCE,
        },
    ),
    "gpt2, untied": Family(
        "GPT2Config",
        {
            **FAMILIES["gpt2"].settings,
            "n_inner": None,
            "activation_function": "silu",
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
            "reorder_and_upcast_attn": True,
        },
    ),
}


def make_model(family: str | Family, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of random weights, in which norms and biases are no identities."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        (FAMILIES[family] if isinstance(family, str) else family).config
    )
    generator = torch.Generator().manual_seed(7)
    for name, tensor in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        norm = tensor.ndim == 1 and name.endswith("weight")
        scale, offset = (0.2, 1.0) if norm else (0.15, 0.0)
        tensor.copy_(offset + scale * torch.randn(tensor.shape, generator=generator))
    made: nn.Module = model.to(dtype).eval()
    return made


def tokens() -> Tensor:
    """`[samples, sequence]`."""
    return torch.stack([batch["tokens"][0] for batch in gpt.data(SAMPLES)]) % ODD_VOCABULARY


def logits_of(model: Any) -> Tensor:
    """`[samples, sequence, vocabulary]`."""
    with torch.no_grad():
        found: Tensor = model(tokens()).logits
    return found


def megatron_config(case: Case, arguments: Any, **more: Any) -> Any:
    """Megatron's configuration from that of Hugging Face, in the layout of a case."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if arguments.latent else TransformerConfig
    mesh = {
        **gpt.spread(case),
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    known = set(inspect.signature(kind).parameters)
    return kind(**{k: v for k, v in {**arguments.transformer, **mesh, **more}.items() if k in known})


def build(case: Case, arguments: Any, **more: Any) -> list[nn.Module]:
    """The chunks of this rank: a GPTModel, or a HybridModel if the case says so."""
    from megatron.core import parallel_state

    gpt.runtime(case)
    gpt.initialize(case)
    out = []
    for stage in range(case.vpp or 1):
        if case.vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        out.append(_chunk(case, arguments, stage if case.vpp else None, more))
    return out


def _chunk(case: Case, arguments: Any, stage: int | None, more: dict[str, Any]) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    first, last = gpt._ends(stage)
    common = {**arguments.model, "pre_process": first, "post_process": last, "parallel_output": True}
    if case.hybrid:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        pattern = arguments.hybrid_layer_pattern
        config = megatron_config(case, arguments, num_layers=len(pattern), **more)
        step = len(pattern) // case.pp
        parts = [pattern[i : i + step] for i in range(0, len(pattern), step)]
        return HybridModel(
            config, hybrid_stack_spec=gpt._hybrid_spec(), hybrid_layer_pattern="|".join(parts), **common
        )
    config = megatron_config(case, arguments, **more)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    if arguments.latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = latent.core_attention()
    elif case.cp > 1:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = context.attention()
    return GPTModel(config, spec, vp_stage=stage, **common)


def run_logits(case: Case, chunks: list[nn.Module]) -> Tensor | None:
    """`[samples, sequence, vocabulary]` by Megatron's own schedule; on the leader."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_flex as mf

    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    batch = tokens()
    positions = torch.arange(SEQUENCE).expand_as(batch)

    def step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        return model(batch, positions, mask), lambda output: (output.sum(), {})

    for chunk in chunks:
        chunk.eval()
    with mf.attach(chunks, [mf.HookFunction("output_layer")]) as flex, torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([None])] * len(chunks) if case.vpp else iter([None]),
            model=chunks if case.vpp else chunks[0],
            num_microbatches=max(1, case.pp if case.vpp else 1),
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=True,
        )
        if not flex.is_leader:
            return None
        logits: Tensor = flex.output_dict["output_layer:output"][0]
    return logits.transpose(0, 1).contiguous()
