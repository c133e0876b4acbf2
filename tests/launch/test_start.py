"""docs/start.md as a person follows it: the script put together, torchrun, the commands behind it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages, typed

PAGE = pages.ROOT / "docs" / "start.md"
PROGRAMS = {"torchrun": "torch.distributed.run", "megatron-flex": "megatron_flex.cli"}


def follow(command: str, folder: Path) -> str:
    """Run a command of the page; what it printed."""
    first, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[first], *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("typer")
    (tmp_path / "first.py").write_text("\n\n".join(pages.mine(PAGE)), encoding="utf-8")
    commands = [
        c for b in pages.blocks_of("docs/start.md") if b.language == "bash" for c in typed.commands(b.text)
    ]
    start, listing, sites = [c for c in commands if c.partition(" ")[0] in PROGRAMS]
    assert follow(start, tmp_path) == "".join(pages.mine(PAGE, "text"))
    for command in (listing, sites):
        assert "decoder.layers" in follow(command, tmp_path) or "layers 0-3" in follow(command, tmp_path)
