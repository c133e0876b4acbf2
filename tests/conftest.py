"""What the whole run tells: versions at its head, the count of compared cells at its foot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CELLS = pytest.StashKey[list[Any]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CELLS] = []


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> list[Any]:
    """Where a test puts the cells that it compared."""
    return request.config.stash[CELLS]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", metavar="FILE", help="write every compared cell to a JSON file")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash[CELLS]
    if not found:
        return
    good = [c for c in found if c.good]
    line = terminalreporter.write_line
    terminalreporter.section("configuration x site x check, against one process")
    line(f"{len(found)} cells compared, {len(good)} in agreement")
    for check in dict.fromkeys(c.check for c in found if not c.upstream):
        mine = [c for c in found if c.check == check and not c.upstream]
        worst = max(mine, key=lambda c: c.error)
        line(f"  {check}: {len(mine)} cells, greatest error {worst.error:.1e} ({worst.case}, {worst.site})")
    for why in dict.fromkeys(c.upstream for c in found if c.upstream):
        mine = [c for c in found if c.upstream == why]
        worst = max(mine, key=lambda c: c.own)
        line(f"  {len(mine)} cells in which upstream itself differs: {why}")
        line(f"    greatest difference from upstream's own run {worst.own:.1e} ({worst.case}, {worst.site})")
    if path := config.getoption("--cells"):
        names = ("case", "site", "check", "error", "bound", "upstream", "own")
        rows = [{n: getattr(c, n) for n in names} for c in found]
        Path(path).write_text(json.dumps(rows, indent=1))
