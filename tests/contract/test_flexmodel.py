"""FlexModel's own tests (2023), from a checkout that FLEX_FLEXMODEL names, with only the import aliased.

`scripts/flexmodel PATH` runs this file. Those of its tests that reach into it are named in INTERNALS.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_flex.compat.gone import SUCCESSORS

CHECKOUT = os.environ.get("FLEX_FLEXMODEL", "")
if not CHECKOUT:
    pytest.skip("FlexModel is not on this machine: run scripts/flexmodel PATH", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("fairscale")

ROOT = Path(__file__).parents[2]
TESTS = Path(CHECKOUT).resolve() / "_test"
ALONE = (
    "core/test_hook_function.py",
    "core/test_wrapper.py",
    "traverse/test_nodes.py",
    "traverse/test_ops.py",
)
RANKS = {
    "distributed.test_mappings": 2,
    "core.test_dp_wrappers_vs_single_gpu": 4,
    "core.test_fairscale_mpu_vs_ddp": 4,
}

# The tests that cannot pass, and why.
INTERNALS = {
    "core/test_hook_function_group_manager.py": "calls the private _HookFunctionGroupManager",
    "distributed/test_initialize.py": "calls the private _BaseGPUDeviceMesh",
    "core/test_wrapper.py::test_FlexModel_group_creation": (
        "compares lists by torch.allclose, which raises as soon as a hook is created; in FlexModel none was"
    ),
    **dict.fromkeys(
        (
            "multi_gpu/core/test_fairscale_mpu_vs_ddp.py::test_full_backward_hooks_fairscale",
            "multi_gpu/core/test_fairscale_mpu_vs_ddp.py::test_full_backward_pre_hooks_fairscale",
        ),
        "expects the output's shape of the input's gradient, gathered as if it were sharded: an error here",
    ),
    "multi_gpu/distributed/test_initialize.py": "imports the private _global_state_is_initialized",
}


def launch(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python on some ranks, inside the checkout."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(ROOT), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, f"--nproc_per_node={ranks}", "-m", *words],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


def list_tests(path: str) -> list[str]:
    """The names of the tests in one of its files."""
    tree = ast.parse((TESTS / path).read_text("utf-8"))
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]


@cache
def on_one_rank(folder: Path) -> dict[str, str]:
    """What came of each test of its files for one rank: empty, or the failure."""
    report = folder / "report.xml"
    files = [f"_test/{path}" for path in ALONE]
    done = launch(1, "pytest", "-p", "tests.support.flexmodel", "-q", f"--junitxml={report}", *files)
    assert report.exists(), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")  # written by the pytest that this test started
    return {str(c.get("name")): "".join(str(part.text) for part in c) for c in cases}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("path", "name"), [(path, name) for path in ALONE for name in list_tests(path)])
def test_on_one_rank(path: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = on_one_rank(tmp_path_factory.getbasetemp())[name]
    if f"{path}::{name}" in INTERNALS:
        assert found, "it passes: take it out of INTERNALS"
        return
    assert not found, found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", RANKS)
def test_on_several_ranks(module: str, tmp_path: Path) -> None:
    path = f"multi_gpu/{module.replace('.', '/')}.py::"
    left_out = [name.removeprefix(path) for name in INTERNALS if name.startswith(path)]
    done = launch(RANKS[module], "tests.support.flexmodel", module, str(tmp_path / "report"), *left_out)
    said = done.stdout + done.stderr
    for rank in range(RANKS[module]):
        report = tmp_path / f"report.{rank}"
        assert report.exists(), said
        names, results = json.loads(report.read_text("utf-8"))
        assert names, said
        assert results == dict.fromkeys(names), said


def test_every_test_is_run_or_listed() -> None:
    files = {str(p.relative_to(TESTS)) for p in TESTS.rglob("test_*.py")}
    run = {*ALONE, *(f"multi_gpu/{module.replace('.', '/')}.py" for module in RANKS)}
    assert files - run == {name for name in INTERNALS if "::" not in name}


DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def public_names() -> list[str]:
    """The public names that its modules define, by module."""
    source = TESTS.parent / "flex_model"
    found = []
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        module = ".".join(p for p in parts if p != "__init__")
        defined = [n for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, DEFINITIONS)]
        found += [f"{module}.{node.name}" for node in defined if not node.name.startswith("_")]
    return found


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_is_here_or_names_its_successor(name: str) -> None:
    module, _, own = name.rpartition(".")
    there = importlib.import_module(f"megatron_flex.compat.{module}")
    if own in SUCCESSORS:
        with pytest.raises(ImportError):
            getattr(there, own)
    else:
        assert hasattr(there, own)
