"""The selection of `scripts/test` names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiers

FOLDERS = [p for p in Path(__file__).parents[1].iterdir() if p.is_dir()]
FOLDERS.append(Path(__file__).parent / "internals")


def test_every_named_test_is_collected(request: pytest.FixtureRequest) -> None:
    if any("::" in word for word in request.config.args):
        pytest.skip("single tests are named, so the rest of their files is not collected")
    assert not tiers.unknown(request.config.stash[tiers.COLLECTED])


@pytest.mark.parametrize("file", [*tiers.QUICK, *tiers.NOT_QUICK, *tiers.LONG, *tiers.PRODUCT])
def test_every_named_file_exists(file: str) -> None:
    assert any((folder / file).exists() for folder in FOLDERS)
