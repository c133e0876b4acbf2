"""The analyses run from end to end on a barely trained model, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.launch.test_quickstart import SCRIPTS, has_pretrain


@pytest.mark.timeout(600)
def test_analyses_say_what_they_found() -> None:
    if not has_pretrain():
        pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
    command = [sys.executable, str(SCRIPTS / "analyses.py"), "--iterations", "2", "--tuning", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^layer \d +((?:\d\.\d{3} *){8})$", done.stdout, re.MULTILINE)
    assert len(rows) == 8, done.stdout
    scores = [float(score) for row in rows for score in row.split()]
    assert all(0 < score < 0.1 for score in scores)
    found = re.findall(r"^before layer \d((?: +\d\.\d{3}){4})", done.stdout, re.MULTILINE)
    numbers = [[float(n) for n in row.split()] for row in found]
    assert len(numbers) == 4
    assert all(tuned < plain for _, _, plain, tuned in numbers), "a lens that is tuned is nearer"


def test_flags_are_checked() -> None:
    command = [sys.executable, str(SCRIPTS / "analyses.py"), "--weights", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no file 'weights' in /nowhere; make one with scripts/quickstart --keep /nowhere" in done.stderr
