"""Documented attributes and exceptions exist; of arguments ruff checks that (DOC102)."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_flex as mf

ROOT = Path(__file__).parents[2]
SECTION = r"^{}:\n((?:    .*\n|\n)*)"
ITEM = re.compile(r"^    (\w+(?:, \w+)*):", re.MULTILINE)


@cache
def modules() -> dict[str, ast.Module]:
    folders = (ROOT / "megatron_flex", ROOT / "patches")
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def documented(node: ast.AST, section: str) -> list[str]:
    """The names that a section of a docstring describes."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return []
    text = (ast.get_docstring(node) or "") + "\n"
    items = "".join(re.findall(SECTION.format(section), text, re.MULTILINE))
    return [name for names in ITEM.findall(items) for name in names.split(", ")]


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for module in modules().values() for node in ast.walk(module))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def defined(node: ast.ClassDef) -> Iterator[str]:
    """The names that a class assigns or defines, in its methods too, and those of its bases."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute | ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.attr if isinstance(inner, ast.Attribute) else inner.id
        elif isinstance(inner, ast.FunctionDef):
            yield inner.name
    for base in node.bases:
        known = classes().get(ast.unparse(base).partition("[")[0].rpartition(".")[2])
        if known is not None:
            yield from defined(known)


def test_documented_attributes_exist() -> None:
    missing = [
        f"{node.name}.{name}"
        for node in classes().values()
        for name in sorted({*documented(node, "Attributes")} - {*defined(node)})
    ]
    assert missing == []


def test_documented_exceptions_exist() -> None:
    known = {*classes(), *dir(builtins)}
    missing = [
        f"{path}: {name}"
        for path, module in modules().items()
        for node in ast.walk(module)
        for name in documented(node, "Raises")
        if name not in known
    ]
    assert missing == []


@pytest.mark.parametrize("kind", [mf.Dump, mf.Statistics])
def test_help_shows_the_types_of_arguments(kind: type) -> None:
    arguments = inspect.signature(kind).parameters
    shown = {name: str(arguments[name]) for name in ("path", "every", "gradients")}
    assert shown == {
        "path": "path: 'str | PathLike[str]'",
        "every": "every: 'int' = 1",
        "gradients": "gradients: 'bool' = False",
    }
    assert not any("Setting" in str(argument) for argument in arguments.values())
