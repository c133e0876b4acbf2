"""The private upstream names that the package uses: the installed versions have them."""

from __future__ import annotations

import pytest

from tests.support import symbols
from tests.support.upstream_symbols import UPSTREAM_SYMBOLS, UpstreamSymbol

pytestmark = pytest.mark.versions

PACKAGES = tuple(dict.fromkeys(s.package for s in UPSTREAM_SYMBOLS))


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


def test_a_name_that_is_gone_does_not_exist() -> None:
    assert symbols.exists(UpstreamSymbol("torch", "torch:Tensor._version", "because"))
    assert not symbols.exists(UpstreamSymbol("torch", "torch:Tensor._no_such_name", "because"))
    assert not symbols.exists(UpstreamSymbol("torch", "torch.no_such_module:_name", "because"))
    assert symbols.exists(UpstreamSymbol("torch", "torch.nn.modules.module:Module._parameters", "because"))
