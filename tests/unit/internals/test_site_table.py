"""How many patterns a look-up in the table of sites tries."""

from __future__ import annotations

import pytest

from megatron_flex import sites
from tests.unit.internals.test_sites import NAMES, found


def test_a_name_looks_at_the_sites_of_its_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that attaching a hook at every site takes time in proportion to the sites, not to their square."""
    asked: list[str] = []
    glob = sites._glob
    monkeypatch.setattr(sites, "_glob", lambda pattern: asked.append(pattern) or glob(pattern))
    assert len(found("decoder.layers.1")) == len(asked) == 3
    asked.clear()
    assert len(found("decoder.layers.?")) == 30
    assert len(asked) == len(NAMES)
