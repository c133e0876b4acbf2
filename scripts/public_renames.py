"""`scripts/renames.py fork`: public names that changed, in calls of code that imports this package.

An argument is renamed where its call is that of a function or class of the package; a method where it is
called on a variable that such a call gave. What is reached in another way is left as it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from renames import File, Origin, Tree

MAKERS = {  # what a function returns
    ("megatron_flex", "attach"): ("megatron_flex", "FlexModel"),
    ("megatron_flex", "open_dump"): ("megatron_flex", "OpenDump"),
    ("megatron_flex", "open_statistics"): ("megatron_flex", "OpenStatistics"),
}


def rename_calls(text: str, public: Mapping[str, Mapping[str, str]], foreign: frozenset[str]) -> str:
    """Code with arguments, values of arguments and methods renamed.

    Args:
        text: of a Python file.
        public: the tables `arguments`, `values` and `methods`, by `module:name.member`.
        foreign: modules of the package that it may import.
    """
    tree = Tree({"theirs.py": text}, foreign)
    calls = _Calls(tree)
    for node in ast.walk(calls.file.tree):
        if isinstance(node, ast.Call):
            _rename_arguments(calls, node, public.get("arguments", {}), public.get("values", {}))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            origin = calls.objects.get(node.value.id)
            new = public.get("methods", {}).get(_key(origin, node.attr))
            if new:
                calls.file.replace(calls.file.end(node) - len(node.attr.encode()), node.attr, new)
    return calls.file.edited()


def _key(origin: Origin | None, member: str) -> str:
    return f"{origin[0]}:{origin[1]}.{member}" if origin else ""


def _rename_arguments(
    calls: _Calls, node: ast.Call, arguments: Mapping[str, str], values: Mapping[str, str]
) -> None:
    origin = calls.origin(node.func)
    for keyword in node.keywords if origin else ():
        key, value = _key(origin, keyword.arg or ""), keyword.value
        if key in arguments and keyword.arg:
            calls.file.replace(calls.file.start(keyword), keyword.arg, arguments[key])
        if isinstance(value, ast.Constant) and f"{key}={value.value}" in values:
            literal = calls.file.data[calls.file.start(value) : calls.file.end(value)].decode()
            new = re.sub(re.escape(str(value.value)), values[f"{key}={value.value}"], literal)
            calls.file.replace(calls.file.start(value), literal, new)


class _Calls:
    """What the functions of calls in a file are, and the variables that hold what they return."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.file: File = tree.files["theirs.py"]
        self.objects: dict[str, Origin] = dict(self._objects())

    def origin(self, node: ast.AST) -> Origin | None:
        """What an expression refers to, where it is a name of the package."""
        if isinstance(node, ast.Name):
            return self.tree.refers(self.file, node)
        if isinstance(node, ast.Attribute):
            inner = self.origin(node.value)
            if inner is None or inner[1]:
                return None
            inside = f"{inner[0]}.{node.attr}"
            return (inside, "") if inside in self.tree.foreign else self.tree.origin(inner[0], node.attr)
        return None

    def _objects(self) -> Iterator[tuple[str, Origin]]:
        for node in ast.walk(self.file.tree):
            target: Any = None
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.withitem):
                target, value = node.optional_vars, node.context_expr
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                origin = self.origin(value.func)
                if origin and origin[1]:
                    yield target.id, MAKERS.get(origin, origin)
