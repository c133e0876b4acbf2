"""Analysis of an editing function's bytecode and source without a call: arguments used, likely mistakes."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from megatron_flex.errors import FlexWarning
from megatron_flex.runtime.edit_traits import traits_of

INTROSPECTION = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
STORE_OPCODES = {"STORE_FAST", "DELETE_FAST"}


CONTEXT_ARGUMENT = 2  # index of `save_ctx` in an editing function's arguments


def uses_context(edit: Any) -> bool:
    """Whether an editing function may use `save_ctx`."""
    declared = traits_of(edit).uses_context
    return uses_argument(edit, CONTEXT_ARGUMENT) if declared is None else declared


def uses_argument(fn: Any, index: int) -> bool:
    """Whether a function may read one of its positional arguments.

    Determined from the bytecode of plain functions, lambdas, methods, and partials of these. Conservative:
    anything else, and a function that could access its variables indirectly, counts as using the argument.

    Args:
        fn: the callable.
        index: the argument's position in the call, from 0.
    """
    if isinstance(fn, partial):
        return uses_argument(fn.func, index + len(fn.args))
    if isinstance(fn, MethodType):
        return uses_argument(fn.__func__, index + 1)
    if not isinstance(fn, FunctionType):
        return True
    code = fn.__code__
    if index >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[index]
    return name in code.co_cellvars or bool(INTROSPECTION & set(code.co_names)) or _reads_local(code, name)


def _reads_local(code: CodeType, name: str) -> bool:
    """Whether an instruction reads a local variable; some instructions read two."""
    return any(
        i.argval == name or (isinstance(i.argval, tuple) and name in i.argval)
        for i in dis.get_instructions(code)
        if i.opname not in STORE_OPCODES and "FAST" in i.opname
    )


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SYNCHRONIZING = {"item", "tolist", "cpu", "numpy"}  # methods that synchronize host and device
METADATA = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad"}
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "all_reduce"),
    *("all_gather_single", "reduce_scatter_single"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
}


class SourceFinding(NamedTuple):
    """A finding, and its line in the source."""

    text: str
    line: int


@dataclass(frozen=True)
class FunctionSource:
    """The source of an editing function.

    Attributes:
        node: its syntax tree.
        file: its file.
        inputs: the name of its tensor argument; empty if arguments are collected by `*args`.
        arguments: the names of its other arguments, without those that have a default or bound value.
        names: the values of its free names, and of arguments with a default or bound value.
    """

    node: Function
    file: str
    inputs: str
    arguments: frozenset[str]
    names: dict[str, Any]

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements; for a lambda, a return of its expression."""
        if isinstance(self.node, ast.Lambda):
            value = self.node.body
            return [ast.Return(value, lineno=value.lineno, col_offset=value.col_offset)]
        return self.node.body


def read_source(edit: Callable[..., Any]) -> FunctionSource | None:
    """The source of an editing function, if it is Python code in a readable file."""
    function = unwrap_function(edit)
    if function is None:
        return None
    node = _find_node(function.__code__)
    if node is None:
        return None
    places, defaults = _read_arguments(edit)
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, **defaults}
    inputs = places[1] if len(places) == 4 else ""
    others = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)} - {inputs} - defaults.keys()
    return FunctionSource(node, function.__code__.co_filename, inputs, frozenset(others), names)


def unwrap_function(edit: Callable[..., Any]) -> types.FunctionType | None:
    """The Python function inside a partial, a bound method, a module or another callable object."""
    while isinstance(edit, partial) or "function" in getattr(edit, "__dict__", ()):
        edit = edit.func if isinstance(edit, partial) else vars(edit)["function"]
    if isinstance(edit, nn.Module):
        edit = edit.forward
    elif not isinstance(edit, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        edit = getattr(type(edit), "__call__", edit)  # noqa: B004
    edit = getattr(edit, "__func__", edit)
    return edit if isinstance(edit, types.FunctionType) else None


def _read_arguments(edit: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of the four arguments, if each has one, and the values of the others."""
    called = edit.forward if isinstance(edit, nn.Module) else edit
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return [], {}
    places = [p.name for p in found if p.kind in positional][:4]
    set_already = {p.name: p.default for p in found if p.default is not p.empty and p.name not in places}
    return places, set_already


@cache
def _parse_file(file: str, size: int) -> list[Function]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [n for n in ast.walk(tree) if isinstance(n, Function)]


def _find_node(code: types.CodeType) -> Function | None:
    """Find the syntax tree that a code object was compiled from."""
    lines = linecache.getlines(code.co_filename)
    first, spans = code.co_firstlineno, [p for p in code.co_positions() if p[0] and p[2] is not None]
    found: list[Function] = []
    for node in _parse_file(code.co_filename, len(lines)):
        if isinstance(node, ast.Lambda):
            inside = [
                (p[0] or 0, p[2] or 0) >= (node.lineno, node.col_offset)
                and (p[1] or 0, p[3] or 0) <= (node.end_lineno or 0, node.end_col_offset or 0)
                for p in spans
                if p[0] != p[1] or p[2] != p[3]
            ]
            fits = code.co_name == "<lambda>" and node.lineno == first and all(inside)
        else:
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            fits = code.co_name == node.name and start == first
        if fits:
            found.append(node)
    return found[-1] if found else None  # the innermost of nested lambdas


# -- findings ----------------------------------------------------------------------------------------


def find_mistakes(source: FunctionSource, on_gpu: bool, once: bool) -> list[SourceFinding]:
    """Find likely mistakes.

    Args:
        source: the source of the editing function.
        on_gpu: whether the model is on a device with asynchronous execution.
        once: whether one rank runs the function for all.
    """
    found = [*_find_bad_returns(source)]
    if on_gpu:
        found += _find_synchronizations(source)
    found += _find_collectives(source, once)
    return found


def warn_of_mistakes(edit: Callable[..., Any], name: Callable[[], str], on_gpu: bool, once: bool) -> None:
    """Warn of likely mistakes in an editing function's source, at their lines.

    Args:
        edit: the function.
        name: returns the name of the hook.
        on_gpu: as in `find_mistakes`.
        once: as in `find_mistakes`.
    """
    source = read_source(edit)
    for finding in find_mistakes(source, on_gpu, once) if source else ():
        assert source is not None
        warnings.warn_explicit(f"hook ({name()}): {finding.text}", FlexWarning, source.file, finding.line)


def walk_statements(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes that run with these statements; without the bodies of nested functions."""
    todo: list[ast.AST] = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*Function.__args__, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)


def _find_bad_returns(source: FunctionSource) -> Iterator[SourceFinding]:
    inside = list(walk_statements(source.body))
    if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in inside) or isinstance(
        source.node, ast.AsyncFunctionDef
    ):
        yield SourceFinding(
            "it is a generator or coroutine and returns no tensor; return one", source.node.lineno
        )
        return
    for node in inside:
        if isinstance(node, ast.Return) and _may_be_none(node.value):
            yield SourceFinding("it can return None here; return a tensor on every path", node.lineno)
    if not _always_returns(source.body):
        last = source.body[-1]
        yield SourceFinding(
            "it can end without a return, which is None; return a tensor on every path", last.lineno
        )


def _may_be_none(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return _may_be_none(value.body) or _may_be_none(value.orelse)
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _always_returns(body: list[ast.stmt]) -> bool:
    """Whether these statements never continue past their end."""
    for node in body:
        if isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
            return True
        if isinstance(node, ast.If) and _always_returns(node.body) and _always_returns(node.orelse):
            return True
        if isinstance(node, (ast.With, ast.AsyncWith)) and _always_returns(node.body):
            return True
        if isinstance(node, (ast.Try, ast.TryStar)):
            through = _always_returns([*node.body, *node.orelse]) and all(
                _always_returns(h.body) for h in node.handlers
            )
            if through or _always_returns(node.finalbody):
                return True
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            return not any(isinstance(n, ast.Break) for n in walk_statements(node.body))
        if isinstance(node, ast.Match) and _match_returns(node):
            return True
    return False


def _match_returns(node: ast.Match) -> bool:
    last = node.cases[-1]
    anything = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
    return anything and all(_always_returns(c.body) for c in node.cases)


def find_derived_names(source: FunctionSource) -> set[str]:
    """The names of values that the source computes from the tensor."""
    found = {source.inputs} if source.inputs else set()
    for _ in range(3):  # a loop may use a name before its assignment
        for node in walk_statements(source.body):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
                targets = [node.target]
            value = getattr(node, "value", None)
            if targets and value is not None and is_derived(value, found):
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def is_derived(node: ast.AST, names: set[str]) -> bool:
    """Whether the value of an expression is the content of a tensor, and not its shape or other metadata."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute) and node.attr in METADATA | SYNCHRONIZING:
        return False
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("len", "isinstance", "type", "id"):
        return False
    if isinstance(node, ast.Compare) and any(isinstance(o, (ast.Is, ast.IsNot)) for o in node.ops):
        return False
    return any(is_derived(child, names) for child in ast.iter_child_nodes(node))


def _find_synchronizations(source: FunctionSource) -> Iterator[SourceFinding]:
    names = find_derived_names(source)
    advice = "makes the host wait for the GPU at each microbatch; compute with tensors, or read with a hook"
    for node in walk_statements(source.body):
        if isinstance(node, ast.Call):
            name, of = getattr(node.func, "id", ""), node.args
            method, owner = getattr(node.func, "attr", ""), getattr(node.func, "value", None)
            if method in SYNCHRONIZING and owner is not None and is_derived(owner, names):
                yield SourceFinding(f".{method}() {advice}", node.lineno)
            elif name in ("print", "bool", "int", "float", "str") and any(is_derived(a, names) for a in of):
                yield SourceFinding(f"{name}() of a tensor {advice}", node.lineno)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) and is_derived(node.test, names):
            yield SourceFinding(f"a decision on a tensor's content {advice}", node.lineno)


def _find_collectives(source: FunctionSource, once: bool) -> Iterator[SourceFinding]:
    for node in walk_statements(source.body):
        if not isinstance(node, ast.Call):
            continue
        found = resolve_dotted_name(node.func, source.names)
        name, home = getattr(found, "__name__", ""), getattr(found, "__module__", "") or ""
        if name in COLLECTIVES and home.startswith("torch.distributed"):
            why = (
                "only one rank runs it, so the others never come"
                if once
                else "if not every rank comes here, the others wait for ever"
            )
            yield SourceFinding(
                f"torch.distributed.{name}() in an edit: {why}; the tensor is whole already", node.lineno
            )


def resolve_dotted_name(node: ast.AST, names: dict[str, Any]) -> Any:
    """Resolve a dotted name in modules and their attributes; else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve_dotted_name(node.value, names)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
    return None
