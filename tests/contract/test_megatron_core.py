"""What the adapter relies on in the installed megatron-core. An upgrade that moves it fails here, by name."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import pytest

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])


def facts() -> dict[str, Any]:
    """Looked up in a worker, where Megatron can be imported without a GPU."""
    from megatron_flex import cpu

    cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers, mappings
    from megatron.core.transformer import (
        attention,
        dot_product_attention,
        transformer_block,
        transformer_config,
        transformer_layer,
    )

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    return {
        "schedules": {n: callable(getattr(schedules, n, None)) for n in SCHEDULE},
        "keywords": names(schedules.forward_backward_no_pipelining),
        "forward_step": names(schedules.forward_step),
        "backward_step": names(schedules.backward_step),
        "config": names(transformer_config.TransformerConfig),
        "groups": [n for n in GROUPS if not callable(getattr(parallel_state, n, None))],
        "column": names(layers.ColumnParallelLinear.forward),
        "row": names(layers.RowParallelLinear.forward),
        "impl is a method": "_forward_impl" in vars(layers.ColumnParallelLinear),
        "gather": names(mappings.gather_from_sequence_parallel_region),
        "copy": names(mappings.copy_to_tensor_model_parallel_region),
        "qkv": callable(attention.SelfAttention.get_query_key_value_tensors),
        "core": names(dot_product_attention.DotProductAttention.forward)[1:4],
        "classes": [transformer_block.TransformerBlock.__name__, transformer_layer.TransformerLayer.__name__],
    }


SCHEDULE = (
    "forward_step",
    "backward_step",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
GROUPS = (
    "get_tensor_model_parallel_group",
    "get_context_parallel_group",
    "get_data_parallel_group",
    "get_pipeline_model_parallel_group",
)


def test_names_and_signatures() -> None:
    (found,) = run(1, facts)
    assert all(found["schedules"].values()), found["schedules"]
    assert "model" in found["keywords"]
    assert "forward_only" in found["keywords"]
    assert "num_microbatches" in found["keywords"]
    assert {"grad_scale_func", "calculate_per_token_loss"} <= set(found["config"])
    assert found["forward_step"][2] == "model"
    assert "current_microbatch" in found["forward_step"]
    assert found["backward_step"][1] == "output_tensor"
    assert found["groups"] == []
    assert found["column"][:2] == ["self", "input_"]
    assert found["row"][:2] == ["self", "input_"]
    assert found["impl is a method"] == (VERSION >= (0, 14))
    assert "tensor_parallel_output_grad" in found["gather"]
    assert found["copy"][0] == "input_"
    assert found["qkv"]
    assert found["core"] == ["query", "key", "value"]


def calls() -> dict[str, Any]:
    """Which calls pass by, in one step of a real model, with what the taps look at."""
    case = Case("one")
    chunks = ranks.start(case)
    model = chunks[0]
    seen: dict[str, Any] = {"order": []}
    layer = model.decoder.layers[0]
    layer.register_forward_pre_hook(
        lambda m, a, k: seen.update(layer=(len(a), sorted(k)[:0] or "hidden_states" in k)), with_kwargs=True
    )
    core = layer.self_attention.core_attention
    core.register_forward_pre_hook(lambda m, a, k: seen.update(core=len(a)), with_kwargs=True)
    core.scale_mask_softmax.register_forward_pre_hook(lambda m, a: seen.update(softmax=len(a)))
    for name in ("linear_qkv", "linear_proj"):
        getattr(layer.self_attention, name).register_forward_hook(
            lambda m, a, out, n=name: seen["order"].append((n, type(out).__name__, len(out)))
        )
    for name in ("linear_fc1", "linear_fc2"):
        getattr(layer.mlp, name).register_forward_hook(
            lambda m, a, out, n=name: seen["order"].append((n, type(out).__name__, len(out)))
        )
    make = layer.self_attn_bda
    layer.self_attn_bda = lambda training, fused: seen.update(bda=True) or make(training, fused)
    loss = model.compute_language_model_loss
    model.compute_language_model_loss = lambda *a: seen.update(loss=tuple(loss(*a).shape)) or loss(*a)
    gpt.step(case, chunks, 0)
    seen["layer_number"] = [la.layer_number for la in model.decoder.layers]
    return seen


def test_call_order_and_arguments() -> None:
    (seen,) = run(1, calls)
    first = seen["order"][:4]
    assert first == [(n, "tuple", 2) for n in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")]
    assert seen["layer"] == (0, True), "layers get their hidden states by keyword"
    assert seen["core"] >= 3, "queries, keys and values go by position"
    assert seen["softmax"] >= 1
    assert seen["bda"]
    assert seen["loss"] == (gpt.BATCH, gpt.SEQUENCE)
    assert seen["layer_number"] == [1, 2, 3, 4], "counted from one over the whole model"
