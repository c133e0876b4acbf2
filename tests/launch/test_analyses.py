"""The analyses run from end to end on a barely trained model, and say what they should."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.launching import SCRIPTS, has_pretrain
from tests.support.messages import assert_names

SHORT = ["--tuning", "4"]


def check(output: str) -> None:
    """What the analyses printed."""
    rows = re.findall(r"^layer \d +((?:\d\.\d{3} *){8})$", output, re.MULTILINE)
    assert len(rows) == 8, output
    scores = [float(score) for row in rows for score in row.split()]
    assert all(0 < score < 0.1 for score in scores)
    found = re.findall(r"^before layer \d((?: +\d\.\d{3}){4})", output, re.MULTILINE)
    numbers = [[float(n) for n in row.split()] for row in found]
    assert len(numbers) == 4
    assert all(tuned < plain for _, _, plain, tuned in numbers), "a lens that is tuned is nearer"


# `megatron.training` came with megatron-core 0.19; continuous integration runs 0.19.2 and skips nothing here.
@pytest.mark.skipif(not has_pretrain(), reason="needs megatron.training, which 0.19.2 has: CI runs it")
@pytest.mark.timeout(600)
def test_analyses_of_a_model_that_they_train() -> None:
    command = [sys.executable, str(SCRIPTS / "analyses.py"), "--iterations", "2", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


def test_flags_are_checked() -> None:
    command = [sys.executable, str(SCRIPTS / "analyses.py"), "--weights", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert_names(done.stderr, "'weights'", "/nowhere", "scripts/quickstart --folder /nowhere")
