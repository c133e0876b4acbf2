"""scripts/gpu on a CPU: the real command, its results, its page, and what it does the second time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import assert_names

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
PARTS = ("copies", "dump")


def gpu(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it in the environment of this test."""
    command = [ROOT / "scripts" / "gpu", "--device", "cpu", "--venv", sys.prefix, "--out", out, *words]
    given = {**os.environ, "FLEX_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=280, check=False)


def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    pages = [ROOT / "docs" / "contributing" / name for name in ("gpu.md", "gpu.json")]
    before = [page.read_bytes() for page in pages]
    done = gpu(tmp_path, "--part", *PARTS)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PARTS:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["status"] == "passed"
        assert result["checks"]
        assert all(check["good"] for check in result["checks"])
        assert result["key"]["device"] == "cpu"
    page = (tmp_path / "gpu.md").read_text()
    assert_names(page.splitlines()[2], "CPU")
    assert "| `values` |" in page
    assert "not run" in page
    raw = json.loads((tmp_path / "gpu.json").read_text())
    assert set(raw["parts"]) == set(PARTS)
    assert raw["machine"]["device"] == "cpu"
    assert {"torch", "megatron-core", "commit", "sources"} <= set(raw["machine"])

    kept = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in PARTS}
    again = gpu(tmp_path, "--part", *PARTS)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "..." not in again.stdout, "nothing is run again"
    assert kept == {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in PARTS}

    late = gpu(tmp_path, "--part", "copies", "--fresh", "--limit", "0.2")
    assert late.returncode == 1
    statuses = {name: json.loads((tmp_path / f"{name}.json").read_text())["status"] for name in PARTS}
    assert statuses["copies"] not in ("passed", "failed")
    assert statuses["dump"] == "passed"
    assert_names(late.stdout, f"copies: {statuses['copies']}")
    listed = gpu(tmp_path, "--list").stdout
    for status in statuses.values():
        assert_names(listed, f"240 s: {status}")
    assert before == [page.read_bytes() for page in pages]
