"""The run of a LLaMA-style model of fairscale's layers, as a person starts it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.messages import any_names

pytest.importorskip("fairscale")
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.timeout(300)
def test_it_agrees_with_one_process() -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / "llama_fairscale.py"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any_names(done.stdout.splitlines(), 14, "1e-05", 4)
    for place in ("layers.1:output", "layers.1.feed_forward.act:output.grad", "loss, ablated"):
        assert place in done.stdout


def test_a_wrong_tensor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    report = importlib.import_module("llama_fairscale").report
    right = {"a": torch.ones(2, 3)}
    assert report(right, right)
    assert not report({"a": torch.ones(2, 3) + 1e-3}, right)
    assert not report({"a": torch.ones(3, 2)}, right)
