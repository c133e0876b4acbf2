"""What the adapter relies on in sources that need a GPU: read from the installed wheel's syntax tree."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

TE = "extensions/transformer_engine.py"
LATENT = "transformer/multi_latent_attention.py"


def classes(path: str) -> dict[str, ast.ClassDef]:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = (Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8")
    return {n.name: n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)}


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def arguments(owner: ast.ClassDef, name: str) -> list[str]:
    return [a.arg for a in method(owner, name).args.args]


def told_parent(owner: ast.ClassDef) -> dict[str, str]:
    """The keywords with which a class calls its parent's `__init__`."""
    for node in ast.walk(method(owner, "__init__")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            return {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
    return {}


def test_wrappers_of_transformer_engine() -> None:
    found = classes(TE)
    bases = {name: [ast.unparse(b) for b in node.bases] for name, node in found.items()}
    assert bases["TELinear"] == ["te.pytorch.Linear"]
    assert bases["TELayerNormColumnParallelLinear"] == ["te.pytorch.LayerNormLinear"]
    assert bases["TEColumnParallelLinear"] == bases["TERowParallelLinear"] == ["TELinear"]
    assert (
        bases["TEColumnParallelGroupedLinear"] == bases["TERowParallelGroupedLinear"] == ["TEGroupedLinear"]
    )
    for name in ("TELinear", "TELayerNormColumnParallelLinear"):
        assert arguments(found[name], "forward") == ["self", "x"]
        assert told_parent(found[name])["sequence_parallel"] == "self.config.sequence_parallel"
        assert told_parent(found[name])["return_bias"] == "self.te_return_bias"
    parallel = ("TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear")
    modes = {name: told_parent(found[name])["parallel_mode"] for name in parallel}
    assert modes["TEColumnParallelLinear"] == modes["TELayerNormColumnParallelLinear"] == "'column'"
    assert modes["TERowParallelLinear"] == "'row'"
    assert told_parent(found["TELayerNormColumnParallelLinear"])["return_layernorm_output"] == "False"
    assert arguments(found["TEDotProductAttention"], "forward")[:4] == ["self", "query", "key", "value"]


def test_multi_latent_attention() -> None:
    found = classes(LATENT)
    made = {
        node.targets[0].attr
        for name in ("MultiLatentAttention", "MLASelfAttention")
        for node in ast.walk(method(found[name], "__init__"))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    }
    assert {
        *(
            f"linear_{n}"
            for n in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
        ),
        "core_attention",
        "q_layernorm",
        "kv_layernorm",
    } <= made
    calls = [
        [ast.unparse(a) for a in node.args[:3]]
        for node in ast.walk(found["MultiLatentAttention"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.core_attention"
    ]
    assert calls, "core attention is called by its attribute"
    assert all(c == ["query", "key", "value"] for c in calls), "queries, keys and values go by position"


def test_reductions_of_the_embedding() -> None:
    """They are called by their bare names, so that what stands in the module's namespace is called."""
    forward = method(classes("tensor_parallel/layers.py")["VocabParallelEmbedding"], "forward")
    called = {ast.unparse(n.func): len(n.args) for n in ast.walk(forward) if isinstance(n, ast.Call)}
    for name in ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        assert called[name] == 1, "the tensor is the only argument by position"


def test_order_of_columns_in_the_fused_projection() -> None:
    """Queries, gates, keys and values come out of each group's columns in this order."""
    attention = method(classes("transformer/attention.py")["SelfAttention"], "get_query_key_value_tensors")
    orders = {
        ast.unparse(node.targets[0])
        for node in ast.walk(attention)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("SplitAlongDim", "torch.split")
    }
    assert "(query, key, value)" in orders
    assert orders <= {"(query, key, value)", "(query, gate, key, value)"}


def test_linears_take_their_tensor_by_position() -> None:
    """`linear_fc1`'s halves, and the taps on inputs, rest on it."""
    forward = method(classes("transformer/mlp.py")["MLP"], "forward")
    calls = [
        n for n in ast.walk(forward) if isinstance(n, ast.Call) and "self.linear_fc1" in ast.unparse(n.func)
    ]
    assert any(call.args and ast.unparse(call.args[0]) == "hidden_states" for call in calls)
