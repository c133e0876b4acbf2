"""Every call of the compatible interface has a test, and every name of it is in the list."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from megatron_flex import compat
from megatron_flex.compat import FlexModel, HookFunction
from megatron_flex.compat.distributed import ParallelState
from tests.support.compat_calls import ADVERTISED, INTERNALS, SILENT

ROOT = Path(__file__).parents[2]


@cache
def found_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("name", [*ADVERTISED, *SILENT])
def test_a_call_has_a_test(name: str) -> None:
    path, _, test = (ADVERTISED | SILENT)[name].partition("::")
    assert test in found_in(path)


@pytest.mark.parametrize("name", INTERNALS)
def test_what_their_test_of_internals_shows_has_a_test_of_ours(name: str) -> None:
    why, *tests = INTERNALS[name]
    assert why
    assert tests
    for path, _, test in (t.partition("::") for t in tests):
        assert test in found_in(path)


def public() -> set[str]:
    """The names that the package gives away, with methods and arguments."""
    rooms = {"core", "distributed", "traverse", "utils"}
    names = set(compat.__all__) | {"utils.setup_logger"}
    for room in rooms - {"utils"}:
        names |= {f"{room}.{n}" for n in getattr(compat, room).__all__}
    names -= {f"core.{n}" for n in compat.__all__}  # the same, in a second place
    for kind in (FlexModel, HookFunction):
        name = kind.__name__
        names |= {f"{name}({p})" for p in inspect.signature(kind).parameters}
        own = {n for c in kind.__mro__ if c.__module__.startswith("megatron_flex") for n in vars(c)}
        names |= {f"{name}.{n}" for n in own if not n.startswith("_") and n != "call_super_init"}
    names |= {f"fmps.{n}" for n in vars(ParallelState) if n.startswith("get_")}
    return names - {"HookFunction.edits", "HookFunction.keep"}  # for the package's own use


def test_every_public_name_is_in_the_list() -> None:
    assert public() - set(ADVERTISED) == set()


def test_what_is_in_the_list_exists() -> None:
    made = FlexModel(nn.Linear(2, 2), {})
    for name in ADVERTISED:
        kind, _, rest = name.partition(".")
        if kind == "FlexModel" and rest and "(" not in rest:
            assert hasattr(made, rest), name
        elif kind == "HookFunction" and rest and "(" not in rest:
            assert hasattr(HookFunction("x"), rest), name
    made.restore()
