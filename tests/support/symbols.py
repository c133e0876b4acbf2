"""Whether installed packages have the private names that the package uses."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from tests.support.upstream_symbols import UpstreamSymbol


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
