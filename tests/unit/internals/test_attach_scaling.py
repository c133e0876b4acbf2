"""Attaching to a large model: kinds and lists of modules are looked up once, and are still the right ones."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_flex import attach
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.site_builder import KindTable, ModuleMatcher
from megatron_flex.adapters.module_names import all_modules, named_modules
from megatron_flex.adapters.module_walk import ModuleWalk, shared_walk, walk_modules
from megatron_flex.mesh import Axis, Mesh

ROOT = Path(__file__).parents[3]
SCRIPTS, KEPT = ROOT / "scripts" / "measure", ROOT / "tests" / "data" / "attach.json"


def theirs(name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {"__module__": "megatron.core.made_up"})


@dataclass(frozen=True)
class Named(ModuleMatcher):
    name: str
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


OUTER, OTHER, INNER = theirs("Outer"), theirs("Other"), theirs("Inner")
KINDS = (
    Named("in outer", ("Inner",), inside=("Outer",)),
    Named("by role", ("Inner",), roles=("query",)),
    Named("any", ("Inner",)),
)


def test_a_kind_depends_on_the_parent_too() -> None:
    table = KindTable(KINDS)
    asked = [(role, INNER(), parent) for role in ("query", "0", "1") for parent in (OUTER(), OTHER(), None)]
    for role, module, parent in [*asked, *reversed(asked)]:
        wanted = next(kind for kind in KINDS if kind.fits(role, module, parent))
        assert table.find(role, module, parent) is wanted
    assert table.find("query", nn.Linear(1, 1)) is None


def test_a_kind_is_looked_for_once_for_each_class_and_role(monkeypatch: pytest.MonkeyPatch) -> None:
    table, asked = KindTable(KINDS), []
    fits = ModuleMatcher.fits
    monkeypatch.setattr(ModuleMatcher, "fits", lambda *args: asked.append(args) or fits(*args))
    for expert in range(100):
        table.find(str(expert), INNER(), OTHER())
    assert len(asked) == len(KINDS)


def trees() -> Iterator[nn.Module]:
    yield nn.Linear(1, 1)
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.ReLU(), shared, nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    yield nn.ModuleDict({"a": inner, "b": shared, "c": nn.ModuleList([inner, nn.Dropout(), nn.Identity()])})
    cycle = nn.Sequential(nn.ReLU())
    cycle.itself = cycle
    yield cycle


@pytest.mark.parametrize("root", list(trees()), ids=lambda root: type(root).__name__)
def test_modules_are_listed_as_torch_lists_them(root: Any) -> None:
    assert all_modules(root) == list(root.modules())
    assert [m for _, m in named_modules(root)] == list(root.modules())
    assert dict(named_modules(root)) == dict(root.named_modules())


def test_layouts_are_shared_and_differ_by_their_arguments() -> None:
    config = torch.nn.Module()
    config.sequence_parallel = True
    mesh = Mesh((Axis("tp", 2, 0, None, (0, 1)),))
    of = ModelLayouts(config, mesh)
    assert of.features("f") is of.features("f")
    assert of.features("f") is not of.features("f", (1, 1))
    assert of.stream() is not of.gathered()
    assert of.stream(False) != of.stream(True)
    assert ModelLayouts(config, Mesh()).stream(True) != of.stream(True), "another mesh, another layout"


def test_attaching_walks_a_model_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find its framework, once to find what stores its parameters."""
    model = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for n in range(10)})
    walked: list[nn.Module] = []
    make = ModuleWalk.__init__
    monkeypatch.setattr(ModuleWalk, "__init__", lambda self, root: walked.append(root) or make(self, root))
    attach(model).detach()
    assert walked
    assert all(root is model for root in walked)
    assert len(walked) <= 2, "a search of its own for each question again"


def test_what_is_found_once_is_forgotten_after_the_walk() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with shared_walk():
        first = walk_modules(model)
        with shared_walk():
            assert walk_modules(model) is first
        assert walk_modules(model) is first
        assert not gc.isenabled()
    assert gc.isenabled()
    model.append(nn.ReLU())
    assert walk_modules(model).modules == list(model.modules())


def test_the_collector_of_cycles_is_left_as_it_was() -> None:
    gc.disable()
    try:
        with shared_walk():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), shared_walk():
        raise KeyError
    assert gc.isenabled()


def test_attaching_calls_no_more_than_is_kept_for_each_hook_point(tmp_path: Path) -> None:
    """Calls of Python for each hook point of a model of experts, as attach.json counts them."""
    name = "2 layers of 64 experts"
    (kept,) = (row for row in json.loads(KEPT.read_text(encoding="utf-8")) if row["model"] == name)
    places = os.pathsep.join([str(ROOT), str(SCRIPTS), *sys.path])
    command = [sys.executable, str(SCRIPTS / "bench_attach.py"), "measure", name, "0", "1", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": places, "PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    counted = json.loads(ran.stdout.splitlines()[-1])
    assert counted["sites"] == kept["sites"]
    assert counted["calls_per_site"] <= kept["calls_per_site"] * 1.1
