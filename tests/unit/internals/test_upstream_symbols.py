"""The table of private upstream names: all that are used are in it, all in it are used, and they exist."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from megatron_flex.adapters.upstream_symbols import UPSTREAM_SYMBOLS
from tests.support import symbols
from tests.support.symbols import UpstreamSymbol

pytestmark = pytest.mark.versions

PACKAGES = tuple(dict.fromkeys(s.package for s in UPSTREAM_SYMBOLS))


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    listed = {part for s in UPSTREAM_SYMBOLS for part in s.path.replace(":", ".").split(".")}
    used = symbols.private_names(symbols.sources())
    missing = {name: paths for name, paths in used.items() if name not in listed}
    assert not missing, "add them to megatron_flex/adapters/upstream_symbols.py"


def test_every_name_in_the_table_is_used() -> None:
    unused = [s.path for s in UPSTREAM_SYMBOLS if not symbols.users(s, symbols.sources())]
    assert not unused, "take them out of megatron_flex/adapters/upstream_symbols.py"


def test_names_are_in_the_table_once_and_with_a_reason() -> None:
    paths = [(s.package, s.path) for s in UPSTREAM_SYMBOLS]
    assert len(set(paths)) == len(paths)
    assert all(s.reason and ":" in s.path for s in UPSTREAM_SYMBOLS)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_version_has_the_names_that_the_table_gives_it(package: str) -> None:
    installed = symbols.installed_version(package)
    if installed is None:
        pytest.skip(f"{package} is not installed")
    wrong = [
        f"{s.path}: versions {s.versions}, but {installed} {'has it' if found else 'does not have it'}"
        for s in UPSTREAM_SYMBOLS
        if s.package == package and (found := symbols.exists(s)) is not symbols.applies(s, installed)
    ]
    assert not wrong


def test_the_page_lists_the_table() -> None:
    text = symbols.PAGE.read_text(encoding="utf-8")
    assert symbols.page(text, symbols.sources()) == text, "run python -m tests.support.symbols"


# -- each check can fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("thing._secret", True),
        ("getattr(thing, '_secret', None)", True),
        ("patches.set(module, '_secret', 1)", True),
        ("from torch.x import _secret", True),
        ("import torch._secret", True),
        ("'torch._secret.part' in sys.modules", True),
        ("def f(self): return self._secret", True),
        ("class A:\n def __init__(self): self._secret = 1\n def f(self, other): return other._secret", False),
        ("f'{name}_secret'", False),
        ("thing.public", False),
    ],
)
def test_private_names_are_found(source: str, found: bool) -> None:
    assert ("_secret" in symbols.private_names({"a.py": ast.parse(source)})) is found


def test_a_name_that_an_f_string_makes_is_used() -> None:
    symbol = UpstreamSymbol("torch", "torch:A._stage_forward_ready", "because")
    assert symbols.users(symbol, {"a.py": ast.parse("f'{name}_{way}_ready'")}) == []
    longer = replace(symbol, path="torch:A._stage_forward_initialized")
    assert symbols.users(longer, {"a.py": ast.parse("f'{name}_{way}_initialized'")}) == ["a"]


def test_a_name_that_is_gone_does_not_exist() -> None:
    assert symbols.exists(UpstreamSymbol("torch", "torch:Tensor._version", "because"))
    assert not symbols.exists(UpstreamSymbol("torch", "torch:Tensor._no_such_name", "because"))
    assert not symbols.exists(UpstreamSymbol("torch", "torch.no_such_module:_name", "because"))
    assert symbols.exists(UpstreamSymbol("torch", "torch.nn.modules.module:Module._parameters", "because"))
