"""Whether installed packages have the private names that the package uses, and the page of these names.

`python -m tests.support.symbols` prints the page, which `scripts/docs` has in the site.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from tests.support.upstream_symbols import UPSTREAM_SYMBOLS, UpstreamSymbol

HEAD = """# Private names of other packages

Hooks need some functions that have no public name upstream. This page lists every private or undocumented
name that the package uses, the supported versions that have it, and why no public name suffices.
`tests/support/upstream_symbols.py` is the source of the list, and `tests/unit/test_upstream_symbols.py`
compares it with the installed packages, on each supported version.
"""


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


def tables() -> str:
    """The tables of the page, by package."""
    out: list[str] = []
    for package in dict.fromkeys(s.package for s in UPSTREAM_SYMBOLS):
        out += [f"\n**{package}**\n", "| name | versions | why |", "| --- | --- | --- |"]
        out += _rows(s for s in UPSTREAM_SYMBOLS if s.package == package)
    return "\n".join(out).strip() + "\n"


def _rows(symbols: Iterable[UpstreamSymbol]) -> Iterator[str]:
    for symbol in symbols:
        versions = "all" if symbol.versions == "*" else symbol.versions
        yield f"| `{symbol.path}` | {versions} | {symbol.reason} |"


def page() -> str:
    """The page."""
    return f"{HEAD}\n{tables()}"


if __name__ == "__main__":
    print(page(), end="")
