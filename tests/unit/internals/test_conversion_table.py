"""The table of architectures: rearrangements, names in other specs, and settings that are refused."""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.conversion import (
    ARCHITECTURES,
    FUSED_QUERY_KEY_VALUE,
    GATE_UP,
    QUERY_KEY_VALUE,
    Heads,
    Join,
)
from megatron_flex.conversion.model_settings import compare_settings
from megatron_flex.conversion.parameter_names import canonical_names
from megatron_flex.conversion.rearrangement import clip_runs, find_runs
from megatron_flex.errors import LayoutError
from tests.support.hugging_face import COMMON, FAMILIES, VARIANTS, Family
from tests.support.messages import assert_names, raises

HEADS = Heads(4, 2)


def test_rows_of_each_group_are_together() -> None:
    """Two groups of two queries, heads of one row: q0 q1 k0 v0, q2 q3 k1 v1."""
    runs = find_runs(QUERY_KEY_VALUE, 8, HEADS)
    rows = [(run.part, run.origin + i) for run in runs for i in range(run.rows)]
    assert rows == [(0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (0, 3), (1, 1), (2, 1)]
    fused = find_runs(FUSED_QUERY_KEY_VALUE, 12, Heads(4, 4))
    assert [run.origin for run in fused] == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


def test_long_runs_are_one_copy() -> None:
    assert len(find_runs(GATE_UP, 1000, HEADS)) == 2
    assert len(find_runs(QUERY_KEY_VALUE, 8 * 64, HEADS)) == 6
    clipped = clip_runs(find_runs(GATE_UP, 1000, HEADS), 400, 600)
    assert [tuple(run) for run in clipped] == [(0, 0, 400, 100), (100, 1, 0, 100)]


@pytest.mark.parametrize(
    ("join", "rows", "values"),
    [
        (QUERY_KEY_VALUE, 9, [9, "4, 2, 2"]),
        (GATE_UP, 7, [7, "1, 1"]),
        (Join(lambda parts, heads: parts[0][:-1], lambda heads: (1,)), 4, []),
        (Join(lambda parts, heads: parts[0].fill_(0), lambda heads: (1,)), 4, []),
        (FUSED_QUERY_KEY_VALUE, 9, [9, 2]),
    ],
)
def test_rearrangements_that_are_none(join: Join, rows: int, values: list[object]) -> None:
    with raises(LayoutError, *values):
        find_runs(join, rows, HEADS)


def test_every_rule_names_the_same_fields_on_both_sides() -> None:
    for name, architecture in ARCHITECTURES.items():
        for rule in architecture.rules:
            fields = {"{layer}", "{expert}", "{kind}"}
            ours = {f for f in fields if f in rule.ours}
            assert all({f for f in fields if f in theirs} == ours for theirs in rule.theirs), (name, rule)
            assert len(rule.join.shares(HEADS)) == len(rule.theirs), (name, rule)


def test_names_of_other_specs() -> None:
    """Transformer Engine's, and a HybridModel's with two attention layers in a row."""
    te = canonical_names(
        [
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.mlp.linear_fc1.layer_norm_bias",
            "decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight",
            *(f"decoder.layers.{n}.mlp.router.weight" for n in range(3)),
            *(f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in range(3)),
            "decoder.layers.2.mlp.experts.linear_fc2.weight17",
            "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
        ]
    )
    assert te["decoder.layers.3.mlp.linear_fc1.layer_norm_bias"] == "decoder.layers.3.pre_mlp_layernorm.bias"
    norm = te["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"]
    assert norm == "decoder.layers.3.input_layernorm.weight"
    norm = te["decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight"]
    assert norm == "decoder.layers.3.self_attention.kv_layernorm.weight"
    assert te["decoder.layers.2.mlp.experts.linear_fc2.weight17"] == (
        "decoder.layers.2.mlp.experts.local_experts.17.linear_fc2.weight"
    )
    hybrid = canonical_names(
        [
            *(f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in (0, 1, 4)),
            *(f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in (2, 3, 5)),
            "decoder.final_norm.weight",
        ]
    )
    assert list(hybrid.values()) == [
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in range(3)),
        *(f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(3)),
    ]


transformers: Any = pytest.importorskip("transformers")


REFUSALS = [
    ("LlamaConfig", {"attention_bias": True}, "attention_bias=True"),
    ("LlamaConfig", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
    (
        "Qwen3Config",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type='dynamic'",
    ),
    (
        "LlamaConfig",
        {
            "rope_parameters": {
                **FAMILIES["llama3"].settings["rope_parameters"],
                "original_max_position_embeddings": 4096,
            }
        },
        "rope_parameters",
    ),
    ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("DeepseekV3Config", {**FAMILIES["deepseek_v3"].settings, "topk_group": 1}, "topk_group=1"),
    ("DeepseekV3Config", {**FAMILIES["deepseek_v3"].settings, "rope_interleave": False}, "rope_interleave"),
    (
        "DeepseekV3Config",
        {**FAMILIES["deepseek_v3"].settings, "norm_topk_prob": False},
        "norm_topk_prob=False",
    ),
    ("DeepseekV3Config", {**FAMILIES["deepseek_v3"].settings, "rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
    ("DeepseekV3Config", {**FAMILIES["deepseek_v3"].settings, "n_shared_experts": 0}, "n_shared_experts=0"),
    ("MixtralConfig", {**FAMILIES["mixtral"].settings, "num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("MixtralConfig", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("Qwen3MoeConfig", {**FAMILIES["qwen3_moe"].settings, "num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("Qwen3Config", {"attention_bias": True}, "attention_bias=True"),
    ("LlamaConfig", {"mlp_bias": True}, "mlp_bias=True"),
    ("Gemma2Config", {}, "gemma2"),
    ("Olmo2Config", {}, "olmo2"),
    ("OlmoConfig", {}, "'olmo'"),
]


@pytest.mark.parametrize(("kind", "settings", "text"), REFUSALS)
def test_settings_without_counterpart(kind: str, settings: dict[str, Any], text: str) -> None:
    config = getattr(transformers, kind)(**settings)
    with raises(mf.FlexError, text):
        mf.config_from_hf(config)


# Fields that modules read and no argument depends on: of training alone, of other heads, of the attention
# kernel; head_dim is DeepSeek's qk_rope_head_dim.
WITHOUT_ARGUMENT = {
    "_attn_implementation",
    "embd_pdrop",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "reorder_and_upcast_attn",
    "use_cache",
    *("num_labels", "hidden_dropout", "classifier_dropout"),
}
PATTERN_WITHOUT_ARGUMENT = re.compile(r"summary_\w+")


class RecordedConfig:
    """A configuration whose fields are recorded when they are read."""

    def __init__(self, config: Any) -> None:
        self._config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._config, name)


def fields_of_modules(config: Any) -> set[str]:
    """The fields of a configuration that the modules of its architecture read, by the names it stores."""
    module = inspect.getmodule(transformers.AutoModelForCausalLM._model_mapping[type(config)])
    assert module is not None
    found = re.findall(r"""\bconfig(?:\.|, ")(\w+)""", inspect.getsource(module))
    return {config.attribute_map.get(name, name) for name in found if hasattr(config, name)}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_fields_that_modules_read_are_those_that_are_converted(family: Family) -> None:
    """A field that is left out changes what modules compute; one of another architecture changes nothing."""
    config = family.config
    recorded = RecordedConfig(config)
    ARCHITECTURES[config.model_type].arguments(recorded)
    read = {config.attribute_map.get(name, name) for name in recorded.read} - {"default_theta"}
    fields = fields_of_modules(config)
    ignored = {f for f in fields if f in WITHOUT_ARGUMENT or PATTERN_WITHOUT_ARGUMENT.fullmatch(f)}
    if config.model_type == "deepseek_v3":
        ignored |= {"head_dim", "num_key_value_heads"}
    assert fields - ignored - read == set()
    assert {f for f in read if hasattr(config, f)} - fields - {
        "tie_word_embeddings",
        "initializer_range",
    } == set()


def test_arguments_of_megatron() -> None:
    """What the configurations say, written down by hand."""
    found = mf.config_from_hf(FAMILIES["mistral"].config)
    assert found.transformer["window_size"] == (4, 0)
    assert found.transformer["kv_channels"] == 12
    assert found.hybrid_layer_pattern == "*-*-*-*-"
    linear = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
    found = mf.config_from_hf(transformers.LlamaConfig(**COMMON | {"rope_parameters": linear}))
    assert found.model["rotary_base"] == 300.0
    assert found.model["seq_len_interpolation_factor"] == 4.0
    qwen = {**COMMON, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    found = mf.config_from_hf(transformers.Qwen2Config(**qwen))
    assert found.transformer["window_attn_skip_freq"] == [0, 0, 1, 1]
    found = mf.config_from_hf(FAMILIES["gpt2"].config, vocabulary_multiple=8)
    assert found.model["vocab_size"] == 64
    found = mf.config_from_hf(FAMILIES["deepseek_v3"].config)
    assert found.hybrid_layer_pattern == "+-+E+E+E"
    assert found.transformer["mscale_all_dim"] == 0.5
    sparse = {**FAMILIES["qwen3_moe"].settings, "mlp_only_layers": [], "decoder_sparse_step": 2}
    assert mf.config_from_hf(transformers.Qwen3MoeConfig(**sparse)).experts == (False, True, False, True)


def test_differences_of_settings() -> None:
    arguments = mf.config_from_hf(FAMILIES["gpt2"].config)
    held: dict[str, Any] = {**arguments.transformer, "attention_dropout": 0.7}
    root = SimpleNamespace(config=SimpleNamespace(**held), position_embedding_type="learned_absolute")
    assert compare_settings(arguments, root) == ()
    root.config.activation_func = nn.functional.gelu
    root.config.layernorm_epsilon = 1e-6
    epsilon, activation = compare_settings(arguments, root)
    assert_names(epsilon, "layernorm_epsilon", "1e-06", "1e-05")
    assert_names(activation, "activation_func", "gelu", "gelu(approximate='tanh')")
    root.config.bias_activation_fusion = True  # the fused function computes the approximation
    assert compare_settings(arguments, root) == (epsilon,)
    root.config.activation_func = partial(nn.functional.gelu, approximate="tanh")
    root.config.layernorm_epsilon = 1e-5
    root.position_embedding_type = "rope"
    (embedding,) = compare_settings(arguments, root)
    assert_names(embedding, "position_embedding_type", "rope", "learned_absolute")
    arguments = mf.config_from_hf(VARIANTS["deepseek_v3, one group"].config)
    groups = {"moe_router_num_groups": 1, "moe_router_group_topk": 1}  # which limit nothing
    root = SimpleNamespace(config=SimpleNamespace(**{**arguments.transformer, **groups}))
    assert compare_settings(arguments, root) == ()
    root.config.moe_router_num_groups = 2
    assert len(compare_settings(arguments, root)) == 2


def test_nothing_but_a_folder_or_a_model_is_read() -> None:
    for source, named in ((3, "int"), ("no/such", "no/such")):
        with raises(mf.FlexError, named):
            mf.config_from_hf(source)
    with raises(mf.FlexError, "Linear"):
        mf.config_from_hf(nn.Linear(2, 2))


def test_a_model_that_is_sharded_or_empty_is_refused() -> None:
    from megatron_flex.conversion.checkpoints import ModelWeights

    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with raises(mf.FlexError, "weight", "Linear"):
        ModelWeights(empty)

    class Other(Tensor):
        pass

    kept = nn.Linear(2, 2)
    kept.register_buffer("other", torch.zeros(2).as_subclass(Other))
    with raises(mf.FlexError, "other", "Linear", "Other"):
        ModelWeights(kept)
