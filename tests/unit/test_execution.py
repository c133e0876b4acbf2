"""Which modules of the package a test run has not executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import execution


def test_modules_of_an_absent_package_need_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter may have several modules: none of them counts."""
    (tmp_path / "1").write_text("mesh.py\n", encoding="utf-8")
    apex = {"adapters/apex.py", "adapters/apex_schedule.py"}
    monkeypatch.setattr(execution, "find_spec", lambda package: None)
    absent = set(execution.missing(tmp_path))
    monkeypatch.setattr(execution, "find_spec", lambda package: package)
    present = set(execution.missing(tmp_path))
    assert present - absent == apex
    assert "mesh.py" not in present
    assert "sites.py" in absent, "which no package is needed for"
