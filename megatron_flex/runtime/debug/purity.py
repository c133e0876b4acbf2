"""Whether a function's source proves that it has no side effects and depends only on the tensor.

A function without proof counts as impure.
"""

from __future__ import annotations

import ast
import builtins
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_flex.runtime.edit_traits import changes_by_pass, traits_of
from megatron_flex.runtime.function_analysis import (
    METADATA,
    FunctionSource,
    read_source,
    resolve_dotted_name,
    walk_statements,
)

PURE_BUILTINS = {"len", "range", "min", "max", "abs", "sum", "int", "float", "bool", "tuple", "list", "slice"}
PURE_BUILTINS |= {"enumerate", "zip", "isinstance", "reversed", "round"}
PURE_MODULES = {torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, math}
ALLOCATING = (
    "_like",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "eye",
    "linspace",
    "tensor",
)
IMPURE = {"save", "load", "compile", "manual_seed", "seed", "initial_seed", "set_default_device"}
IMPURE |= {"backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"}
IMPURE |= {
    "share_memory_",
    "data_ptr",
    "numpy",
    "untyped_storage",
    "storage",
    "set_",
    "resize_",
    "__setitem__",
}
STATEMENTS = (
    *(ast.Return, ast.Assign, ast.AnnAssign, ast.If, ast.For, ast.Expr, ast.Pass, ast.Raise),
    *(ast.Break, ast.Continue, ast.Assert),
)
CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Tensor, slice)


RANDOM_BY_NAME = {"fractional_max_pool2d", "fractional_max_pool3d"}  # that draw samples for an operator
RANDOM_BY_NAME |= {f"{name}_with_indices" for name in RANDOM_BY_NAME}


def draws_random_numbers(edit: Callable[..., Any]) -> bool:
    """Whether an editing function may draw random numbers.

    What it declares decides; otherwise its source must prove that it only
    calls operators of torch that draw none, as torch's tags tell. A function is examined as it is now; later
    changes of what its names refer to are not seen.
    """
    declared = traits_of(edit).uses_random_numbers
    if declared is not None:
        return declared
    if changes_by_pass(edit):
        return True
    source = read_source(edit)
    if source is None or not is_pure(source):
        return True
    nodes = walk_statements(source.body)
    return any(_may_draw(node.func) for node in nodes if isinstance(node, ast.Call))


def _may_draw(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Name) and (name in PURE_BUILTINS or name.endswith(("Error", "Exception"))):
        return False
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in RANDOM_BY_NAME:
        return name not in METADATA
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads())


def is_pure(source: FunctionSource) -> bool:
    """Whether a dry run may call the function."""
    if not source.inputs or isinstance(source.node, ast.AsyncFunctionDef):
        return False
    owned = _find_owned_names(source)
    return all(_is_harmless(node, source, owned) for node in walk_statements(source.body))


def _find_owned_names(source: FunctionSource) -> set[str]:
    """The names that always refer to the dry run's tensor, or to memory made from it."""
    given: dict[str, list[ast.expr | None]] = {}
    for node in walk_statements(source.body):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        given.setdefault(name.id, []).append(node.value if name is target else None)
        elif isinstance(node, (ast.For, ast.NamedExpr, ast.AnnAssign)):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    given.setdefault(name.id, []).append(None)
    owned = {source.inputs, *given}
    while True:  # a name that depends on a name that is not owned is not owned
        lost = {n for n in owned & given.keys() if not all(_is_owned(v, owned, source) for v in given[n])}
        if not lost:
            return owned
        owned -= lost


def _is_owned(value: ast.expr | None, owned: set[str], source: FunctionSource) -> bool:
    match value:
        case ast.Name(id=name):
            return name in owned
        case ast.Subscript(value=inner):
            return _is_owned(inner, owned, source)
        case ast.IfExp(body=one, orelse=other):
            return _is_owned(one, owned, source) and _is_owned(other, owned, source)
        case ast.BinOp(left=one, right=other):
            return _is_owned(one, owned, source) or _is_owned(other, owned, source)
        case ast.UnaryOp(operand=inner):
            return _is_owned(inner, owned, source)
        case ast.Call(func=ast.Attribute(value=inner, attr=name)):
            makes = isinstance(resolve_dotted_name(value.func, source.names), types.BuiltinFunctionType)
            return _is_owned(inner, owned, source) or (makes and name.endswith(ALLOCATING))
    return False


def _is_harmless(node: ast.AST, source: FunctionSource, owned: set[str]) -> bool:
    if isinstance(node, ast.AugAssign):
        return _root(node.target) in owned
    if isinstance(node, ast.stmt):
        return isinstance(node, STATEMENTS)
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda, ast.NamedExpr)):
        return False
    if isinstance(node, ast.Name):
        return _is_harmless_name(node, source)
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        return _root(node) in owned and not isinstance(node, ast.Attribute)
    if isinstance(node, ast.Call):
        return _is_harmless_call(node, source, owned)
    return True


def _is_harmless_name(node: ast.Name, source: FunctionSource) -> bool:
    if node.id in source.arguments:
        return False
    if node.id == source.inputs or isinstance(node.ctx, ast.Store) or node.id not in source.names:
        return True
    return _is_constant(source.names[node.id]) or _is_known(source.names[node.id])


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(v) for v in value)
    return isinstance(value, CONSTANTS)


def _is_known(value: Any) -> bool:
    home = getattr(value, "__module__", "") or ""
    if isinstance(value, types.ModuleType):
        return value in PURE_MODULES or value is builtins
    ours = home.startswith("torch") and not home.startswith(("torch.distributed", "torch.autograd"))
    return (ours or home in ("math", "builtins")) and callable(value) and not isinstance(value, Tensor)


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_harmless_call(node: ast.Call, source: FunctionSource, owned: set[str]) -> bool:
    into = {k.arg: _root(k.value) if k.arg == "out" else _first(node) for k in node.keywords}
    if any(into.get(name) not in {None, *owned} for name in ("out", "inplace")) or None in into:
        return False
    if isinstance(node.func, ast.Name):
        found = source.names.get(node.func.id, getattr(builtins, node.func.id, None))
        plain = node.func.id in PURE_BUILTINS and found is getattr(builtins, node.func.id)
        error = isinstance(found, type) and issubclass(found, Exception)
        return plain or error or _is_torch_function(found)
    if not isinstance(node.func, ast.Attribute) or node.func.attr in IMPURE or node.func.attr.endswith("__"):
        return False
    found = resolve_dotted_name(node.func, source.names)
    if found is not None:
        return _is_torch_function(found) and not (node.func.attr.endswith("_") and _first(node) not in owned)
    if isinstance(resolve_dotted_name(node.func.value, source.names), types.ModuleType):
        return False
    root = _root(node.func.value)
    return root in owned if node.func.attr.endswith("_") else root != ""


def _first(node: ast.Call) -> str:
    return _root(node.args[0]) if node.args else ""


def _is_torch_function(found: Any) -> bool:
    """Whether it is a function of the modules that only compute."""
    name = getattr(found, "__name__", "")
    if name in IMPURE or name.startswith("set_") or isinstance(found, type):
        return False
    return callable(found) and any(getattr(m, name, None) is found for m in PURE_MODULES)
