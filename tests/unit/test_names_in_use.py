"""Names of the package that tests and scripts use exist, also those that only a forked rank reads."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_flex"
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


def _import_name(name: str) -> Any:
    """The module, or attribute of a module, of that name; None if it needs a package not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(PACKAGE):
            return None
    owner, _, attribute = name.rpartition(".")
    module = importlib.import_module(owner)
    return getattr(module, attribute)


def _get_imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The line, the local name and the full name of each import from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.asname or PACKAGE, alias.name if alias.asname else PACKAGE
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def find_missing_names(text: str) -> list[str]:
    """Imports and attributes of this package's modules that are not there, each with its line."""
    tree = ast.parse(text)
    missing = []
    modules: dict[str, ModuleType] = {}
    for line, local, full in _get_imports(tree):
        try:
            found = _import_name(full)
        except AttributeError:
            missing.append(f"{line}: {full}")
            continue
        if isinstance(found, ModuleType):
            modules[local] = found
    nodes = list(ast.walk(tree))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in modules and node.value.id not in bound:
            module = modules[node.value.id]
            if not hasattr(module, node.attr):
                missing.append(f"{node.lineno}: {module.__name__}.{node.attr}")
    return missing


def test_missing_names_are_found() -> None:
    text = (
        "import megatron_flex as mf\nfrom megatron_flex import edits, nothing\n"
        "edits.steer, edits.add, mf.FlexModel, mf.x"
    )
    assert find_missing_names(text) == [
        "2: megatron_flex.nothing",
        "3: megatron_flex.edits.add",
        "3: megatron_flex.x",
    ]
    assert not find_missing_names(
        "def f(edits):\n    from megatron_flex import edits as e\n    edits.add, e.scale"
    )


def test_names_are_there() -> None:
    missing = {
        file.relative_to(ROOT): find_missing_names(text)
        for file in FILES
        if PACKAGE in (text := file.read_text())
    }
    assert len(missing) > 200
    assert not {file: names for file, names in missing.items() if names}


# The compatible interface has the names of its predecessor, beside ours; programs start at `__main__`.
SAME_CLASS = {"FlexModel", "HookFunction"}
SAME_FILE = {"__init__.py", "__main__.py"}


def find_repeated(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that are in more than one place, each with its places."""
    found: dict[str, list[str]] = {}
    for name, where in names:
        found.setdefault(name, []).append(where)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    classes = (
        (node.name, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert set(find_repeated(classes)) == SAME_CLASS


def test_a_module_has_a_name_of_its_own() -> None:
    files = ((path.name, str(path.relative_to(ROOT))) for path in sorted((ROOT / PACKAGE).rglob("*.py")))
    assert set(find_repeated(files)) == SAME_FILE
