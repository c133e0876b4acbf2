"""Hooks in processes without torchrun and without a command line of their own: actors, notebooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flex import open_dump
from tests.support.launching import environment
from tests.support.messages import assert_names

pytest.importorskip("pydantic")

# As in an actor: ranks are given by hand, the argv is another program's, and a thread runs the method.
ACTOR = """
import os, sys, threading
import torch, torch.distributed as dist
from torch import nn
from megatron_flex.launch import TrainingRun, load_settings

rank, folder = int(sys.argv[1]), sys.argv[2]
sys.argv = ["default_worker.py", "--node-ip-address=127.0.0.1", "--flex-estimate"]
failures = []

def act():
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        os.environ["MEGATRON_FLEX_FLAGS"] = "--flex-every 2 --flex-report report.txt"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        running = TrainingRun(load_settings("hooks.yaml"))
        running.attach(model)
        for iteration in range(3):
            running.step_begins(iteration)
            with running.flex.step():
                model(torch.ones(3, 4) * (iteration + 1)).sum().backward()
            running.step_ends()
        running.training_ends()
        running.finish()
        dist.destroy_process_group()
    except BaseException as error:
        failures.append(error)
        raise

thread = threading.Thread(target=act)
thread.start()
thread.join()
sys.exit(len(failures))
"""


def test_an_actor_with_yaml_and_the_variable(tmp_path: Path) -> None:
    """Both count, and what another program has in `sys.argv` does not; the first rank alone reports."""
    (tmp_path / "hooks.yaml").write_text("sites: ['1']\ndumps: [{path: d}]\n")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(rank), str(tmp_path)],
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    with open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [0, 2]
        first, last = dump["1:output"].torch()
        assert first.shape[-1] == 2
        assert not last.equal(first)
    told = [[n for n in text.splitlines() if n.startswith("megatron-flex: ")] for text in errors]
    assert told[1] == []
    begun, written, named = (line.removeprefix("megatron-flex: ") for line in told[0])
    assert_names(begun, 1, 2, "d")
    assert_names(written, "d", 2)
    assert_names(named, "report.txt")
    assert (tmp_path / "report.txt").read_text().splitlines()[1:] == [begun, written]
