"""The private names of other packages that the package uses, found in its source, and the page of them.

`python -m tests.support.symbols` writes the tables of docs/upstream-names.md.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_flex.adapters.upstream_symbols import UPSTREAM_SYMBOLS, UpstreamSymbol

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_flex"
PAGE = ROOT / "docs" / "upstream-names.md"
BEGIN, END = "<!-- generated: python -m tests.support.symbols -->", "<!-- end of generated -->"
PRIVATE = re.compile(r"_[A-Za-z]\w+")
WORD = re.compile(r"[\w.]+")

DOCUMENTED = {"_replace", "_fields", "_getframe"}  # of namedtuple and sys, in Python's own documents
OURS = {
    "_GatherBackward": "a node of our own function in the autograd graph",
    "_ToTokensBackward": "likewise",
    "_flex_impl": "an attribute that we put on an object",
    "_flex_watch": "likewise",
    "_given": "an attribute of FlexModel",
    "_hook_type": "an attribute of HookFunction",
    "_header": "part of a file's name",
    "_like": "the end of torch's names such as zeros_like",
    "_megatron_flex_file_": "the beginning of a module's name",
}


@cache
def sources() -> dict[str, ast.Module]:
    """The package's files, parsed."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "upstream_symbols.py"
    }


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a file itself makes: functions, classes, variables, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__setattr__"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def _used(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names in attributes, imports and strings of one word; and whether it is an attribute of self."""
    in_text = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Expr)
        for part in (node.values if isinstance(node, ast.JoinedStr) else [node.value])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, own
        elif isinstance(node, ast.ImportFrom):
            if not (node.module or "").startswith(("megatron_flex", "__future__")):
                for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                    yield name, False
        elif isinstance(node, ast.Import):
            for alias in node.names:
                for name in alias.name.split("."):
                    yield name, False
        elif isinstance(node, ast.Constant) and id(node) not in in_text and WORD.fullmatch(str(node.value)):
            for name in str(node.value).split("."):
                yield name, False


def _composed(tree: ast.Module) -> Iterator[re.Pattern[str]]:
    """The names that an f-string may make, such as `{name}_{way}_initialized`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else None for p in node.values]
            if all(p is None or re.fullmatch(r"\w+", p) for p in parts) and any(
                p and len(p) > 6 for p in parts
            ):
                yield re.compile("".join(r"\w+" if p is None else p for p in parts))


def private_names(files: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Private names of other packages by name, each with the files that use it."""
    own_attributes = {name for tree in files.values() for name in _defined(tree)}
    out: dict[str, dict[str, None]] = {}
    for path, tree in files.items():
        defined = set(_defined(tree))
        for name, of_self in _used(tree):
            ours = name in defined or (of_self and name in own_attributes)
            if PRIVATE.fullmatch(name) and not ours and name not in DOCUMENTED | OURS.keys():
                out.setdefault(name, {})[path] = None
    return {name: list(paths) for name, paths in out.items()}


@cache
def _names_of(tree: ast.Module) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    return frozenset(name for name, of_self in _used(tree) if not of_self), tuple(_composed(tree))


def users(symbol: UpstreamSymbol, files: dict[str, ast.Module]) -> list[str]:
    """The modules that use a name."""
    out: list[str] = []
    for path, tree in files.items():
        names, patterns = _names_of(tree)
        if symbol.name in names or any(pattern.fullmatch(symbol.name) for pattern in patterns):
            out.append(path.removesuffix(".py"))
    return out


def installed_version(package: str) -> str | None:
    """The version of a package here; None if it is not installed."""
    if package == "python":
        return ".".join(map(str, sys.version_info[:3]))
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def exists(symbol: UpstreamSymbol) -> bool:
    """Whether the installed package has the name: as an attribute, or where its source assigns it."""
    module, _, qualified = symbol.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = (
                getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{module}.{part}")
            )
        return True
    except (ImportError, AttributeError):
        return _is_assigned(symbol.assigned_in or module, symbol.name)


def _is_assigned(module: str, name: str) -> bool:
    try:
        spec = find_spec(module)
    except ImportError:
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
            return True
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return True
        if isinstance(node, ast.Constant) and node.value == name:
            return True
    return False


def applies(symbol: UpstreamSymbol, installed: str) -> bool:
    """Whether the table says that this version has the name."""
    return symbol.versions == "*" or SpecifierSet(symbol.versions).contains(installed, prereleases=True)


def tables(files: dict[str, ast.Module]) -> str:
    """The tables of the page, by package."""
    out: list[str] = []
    for package in dict.fromkeys(s.package for s in UPSTREAM_SYMBOLS):
        out += [f"\n**{package}**\n", "| name | versions | used in | why |", "| --- | --- | --- | --- |"]
        out += _rows((s for s in UPSTREAM_SYMBOLS if s.package == package), files)
    return "\n".join(out).strip() + "\n"


def _rows(symbols: Iterable[UpstreamSymbol], files: dict[str, ast.Module]) -> Iterator[str]:
    for symbol in symbols:
        used = ", ".join(f"`{path}`" for path in users(symbol, files))
        versions = "all" if symbol.versions == "*" else symbol.versions
        yield f"| `{symbol.path}` | {versions} | {used} | {symbol.reason} |"


def page(text: str, files: dict[str, ast.Module]) -> str:
    """A page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(files)}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), sources()), encoding="utf-8")
