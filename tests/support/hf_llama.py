"""The model of `llama` as transformers' LlamaForCausalLM has it, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import llama

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "act": "act_fn",
    "output": "lm_head",
    "norm": "model.norm",
}


def theirs(name: str) -> str:
    """The name of a module, site or parameter of `llama` there."""
    path, colon, point = name.partition(":")
    out = ".".join(NAMES.get(step, step) for step in path.split("."))
    return ("model." if out.startswith("layers.") else "") + out + colon + point


def ours(name: str) -> str:
    """The other way round."""
    back = {theirs(n): n for n, _ in llama.single().named_parameters()}
    return back[name]


def config() -> Any:
    """Its configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=llama.VOCABULARY,
        hidden_size=llama.HIDDEN,
        intermediate_size=llama.FFN,
        num_hidden_layers=llama.LAYERS,
        num_attention_heads=llama.HEADS,
        num_key_value_heads=llama.GROUPS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        use_cache=False,
    )


def single(**options: Any) -> Any:
    """The model on one process."""
    from transformers import LlamaForCausalLM

    made = config()
    for name, value in options.items():
        setattr(made, name, value)
    model = LlamaForCausalLM(made)
    model.load_state_dict({theirs(n): t for n, t in llama.single().state_dict().items()}, strict=True)
    return model


def save(folder: Path) -> str:
    """Write it as `from_pretrained` reads it."""
    single().save_pretrained(str(folder))
    return str(folder)
