"""The selection of scripts/test names tests that exist."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import tiers


def test_the_quick_tests_exist(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected, before `-k` and `-m` narrowed them."""
    if any("::" in word for word in request.config.args):
        pytest.skip("a run of named tests does not collect the other tests of their files")
    assert tiers.unknown(request.config.stash[tiers.COLLECTED]) == []


def test_a_test_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"test_a.py": ("test_here", "test_gone[x]"), "test_b.py": ("test_c",)}
    monkeypatch.setattr(tiers, "QUICK", names)
    item = SimpleNamespace(path=Path("tests/distributed/test_a.py"), name="test_here[1]")
    assert tiers.unknown([item]) == ["test_a.py: test_gone[x]"]
