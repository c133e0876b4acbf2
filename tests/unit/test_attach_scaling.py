"""Attaching to a large model: kinds and lists of modules are looked up once, and are still the right ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.site_builder import KindTable, ModuleMatcher
from megatron_flex.adapters.module_names import all_modules, named_modules
from megatron_flex.mesh import Axis, Mesh


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


@pytest.mark.parametrize("root", trees(), ids=lambda root: type(root).__name__)
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
