"""What the adapter relies on in DeepSpeed: read from the installed sources, of which nothing runs."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_flex.adapters import deepspeed as adapter

SPEC = find_spec("deepspeed")
pytestmark = pytest.mark.skipif(SPEC is None, reason="deepspeed is not installed")

ENGINE, PIPE = "runtime/engine.py", "runtime/pipe/engine.py"
ZERO_12, ZERO_3 = "runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py"


def source(path: str) -> str:
    assert SPEC is not None
    assert SPEC.submodule_search_locations is not None
    return (Path(SPEC.submodule_search_locations[0]) / path).read_text(encoding="utf-8")


def classes(path: str) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in ast.walk(ast.parse(source(path))) if isinstance(n, ast.ClassDef)}


def functions(path: str, owner: str = "") -> dict[str, ast.FunctionDef]:
    tree: ast.AST = classes(path)[owner] if owner else ast.parse(source(path))
    return {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def assigned(path: str, owner: str) -> set[str]:
    """Attributes of `self` that a class sets."""
    found = [n for n in ast.walk(classes(path)[owner]) if isinstance(n, (ast.Assign, ast.AnnAssign))]
    targets = [t for n in found for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
    return {ast.unparse(t).removeprefix("self.") for t in targets if ast.unparse(t).startswith("self.")}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (ENGINE, adapter.DEEPSPEED_ENGINE),
        (PIPE, adapter.PIPELINE_ENGINE),
        ("inference/engine.py", adapter.INFERENCE_ENGINE),
        ("runtime/hybrid_engine.py", "DeepSpeedHybridEngine"),
        (ZERO_12, adapter.ZERO_12),
        (ZERO_3, adapter.ZERO_3),
        ("runtime/pipe/module.py", "TiedLayerSpec"),
        ("runtime/pipe/schedule.py", "ForwardPass"),
        ("runtime/pipe/schedule.py", "BackwardPass"),
    ],
)
def test_classes_have_their_names(path: str, name: str) -> None:
    assert name in classes(path)


def test_an_engine_says_how_it_is_configured() -> None:
    known = functions(ENGINE, adapter.DEEPSPEED_ENGINE).keys() | assigned(ENGINE, adapter.DEEPSPEED_ENGINE)
    gone = {"mics_shard_size", "zenflow"}  # since 0.19.0; set by another file
    assert adapter.WITHOUT_A_RULE.keys() - gone <= known
    asked = {"seq_data_parallel_group", "optimizer", "is_gradient_accumulation_boundary", "global_steps"}
    assert asked | {"gradient_accumulation_steps", "_get_optimizer_loss_scale", "mpu"} <= known


def test_zero_keeps_gradients_where_they_are_looked_for() -> None:
    for path, owner, more in [
        (ZERO_12, adapter.ZERO_12, {"bit16_groups", "cpu_offload"}),
        (ZERO_3, adapter.ZERO_3, {"offload_optimizer"}),
    ]:
        assert more | {"averaged_gradients"} <= assigned(path, owner)
        bases = [ast.unparse(b) for b in classes(path)[owner].bases]
        assert bases == ["ZeROOptimizer"], "no torch.optim.Optimizer, by which ZeRO is told from none"


def test_parameters_tell_what_keeps_them() -> None:
    for name in ("ds_id", "ds_shape", "ds_tensor", "ds_process_group"):
        assert f"param.{name} = " in source("runtime/zero/partition_parameters.py"), name
    assert "_hp_mapping = " in source("utils/mixed_precision_linkage.py")
    assert "._z3_optimizer = " in source(ZERO_3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("safe_get_full_grad", ["param"]),
        ("safe_set_full_grad", ["param", "value"]),
        ("safe_set_local_grad", ["param", "value"]),
        ("safe_set_full_fp32_param", ["param", "value"]),
        ("safe_set_local_fp32_param", ["param", "value"]),
    ],
)
def test_functions_take_what_they_are_given(name: str, arguments: list[str]) -> None:
    assert [a.arg for a in functions("utils/tensor_fragment.py")[name].args.args] == arguments


def test_a_pipeline_runs_each_schedule_through_one_method() -> None:
    run = ast.unparse(functions(PIPE, adapter.PIPELINE_ENGINE)["_exec_schedule"])
    assert "pipe_schedule.num_pipe_buffers()" in run
    assert "for step_cmds in pipe_schedule" in run
    for name in ("train_batch", "eval_batch"):
        assert "self._exec_schedule(sched)" in ast.unparse(functions(PIPE, adapter.PIPELINE_ENGINE)[name])
    assert "self.pipe_buffers['outputs'][buffer_id] = outputs" in ast.unparse(
        functions(PIPE, adapter.PIPELINE_ENGINE)["_exec_forward_pass"]
    )
    kept = assigned("runtime/pipe/topology.py", "PipelineParallelGrid")
    assert {"pp_proc_group", "dp_proc_group", "slice_proc_group"} <= kept
    assert {"parts", "_layer_specs"} <= assigned("runtime/pipe/module.py", "PipelineModule")
    assert "reset_activation_shape" in functions(PIPE, adapter.PIPELINE_ENGINE)
