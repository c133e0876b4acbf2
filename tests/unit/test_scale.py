"""A rank of 16,384 sends, asks and keeps what one of 1,024 does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "measure" / "bench_scale.py"
SMALL, LARGE = 1024, 16384
CHANGES = 30  # of hooks
SHAPES = ["2 layers, TP8", "2 layers, TP8 x PP4"]
# The most bytes in which a rank's place, five numbers, passes the first rank on its way to a dump's manifest:
# the gathers along dp and pp receive the place, and along pp the rows of a stage are sent again.
COORDINATES = 96


@pytest.fixture(scope="module", params=SHAPES)
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, Any]]]:
    """What each part of a run costs the first rank, in jobs of both sizes."""
    folder = tmp_path_factory.mktemp("jobs")
    command = [
        sys.executable,
        str(SCRIPT),
        request.param,
        str(folder),
        str(CHANGES),
        str(SMALL),
        str(LARGE),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return {int(world): parts for world, parts in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("figure", ["bytes", "largest", "requests", "keys", "files"])
def test_nothing_grows_with_the_ranks(jobs: dict[int, dict[str, dict[str, Any]]], figure: str) -> None:
    small, large = jobs[SMALL], jobs[LARGE]
    assert small.keys() == large.keys()
    for part, costs in small.items():
        more = large[part][figure] - costs[figure]
        if part == "open a dump" and figure in ("bytes", "largest"):
            more -= COORDINATES * (LARGE - SMALL)  # the manifest lists all ranks, and one rank writes it
        assert more <= 0, (
            f"{part}: {costs[figure]} {figure} of {SMALL} ranks, {large[part][figure]} of {LARGE}"
        )


def test_keys_of_comparisons_are_deleted_and_steps_ask_nothing(
    jobs: dict[int, dict[str, dict[str, Any]]],
) -> None:
    for parts in jobs.values():
        (changed,) = (costs for part, costs in parts.items() if part.endswith("changes of hooks"))
        attached = parts["attach"]["keys"]
        assert {costs["keys"] for costs in parts.values()} == {attached}
        assert parts["first step"]["requests"] > parts["step"]["requests"] == 0
        assert changed["requests"] >= 5 * CHANGES, "hooks were compared"
