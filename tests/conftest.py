"""What the whole run tells: versions at its head, the count of compared cells at its foot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

CELLS = pytest.StashKey[list[Any]]()
FINDINGS = pytest.StashKey[list[Any]]()
STARTED = pytest.StashKey[float]()
SKIPPED: dict[str, str] = {}  # file of a test to why it was skipped
PACKAGES = (
    "megatron-core",
    "torch",
    "fairscale",
    "apex",
    "transformers",
    "accelerate",
    "deepspeed",
)  # what tests run on, as far as it is installed

# Compositions of what other cells hold by themselves, cells that larger ones hold too, and a test of minutes
# beside a shorter one (kills of Megatron's own ranks): scripts/test runs them, continuous integration, which
# has no time for all, leaves them out (`-m "not wide"`).
WIDE = {
    "test_matrix.py": (
        *(
            "test_gpt[tp2]",
            "test_gpt[tp4]",
            "test_gpt[pp2]",
            "test_gpt[tp2 dp2]",
            "test_hybrid[hybrid tp2 sp]",
        ),
        *("test_context_parallel[cp2]", "test_context_parallel[cp2 pp2]"),
    ),
    "test_moe.py": (
        "test_experts[moe tp2 sp ep2, allgather]",
        "test_experts[moe pp2 dp2 ep2]",
        "test_experts[moe tp2 sp ep2, experts recomputed]",
        "test_experts_on_four_ranks[moe tp2 sp dp2 ep2 etp2, allgather]",
        "test_experts_on_four_ranks[moe tp2 sp dp2 ep4]",
    ),
    "test_models.py": (
        "test_prediction_of_several_tokens[mtp pp2 vpp2]",
        "test_layers_without_attention[M tp2 dp2]",
        "test_layers_without_attention[G|*M tp2 pp2]",
        "test_every_site_is_compared[M tp2 dp2]",
        "test_every_site_is_compared[G|*M tp2 pp2]",
    ),
    "test_compare_bugs.py": tuple(
        f"test_right_run_raises_no_alarm[{c}]"
        for c in ("tp2", "dp2", "cp2", "pp2", "tp4 sp, q/k norm", "bf16 cp2")
    ),
    "test_dump_crash.py": ("test_killed_ranks_leave_no_torn_iteration_and_lose_none",),  # minutes: 200 kills
    "test_patched.py": ("test_gpt[tp2, tied]", "test_fairscale[mp2, vocabulary]"),
    "test_latent.py": ("test_latent_attention[mla tp2]", "test_upstream_as_it_is[mla tp2, upstream]"),
    "test_selecting.py": ("test_every_kind_is_what_one_process_has[tp2]",),
    "test_linear_edits.py": ("test_as_on_one_process[tp2]",),
}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CELLS] = []
    config.stash[FINDINGS] = []
    config.stash[STARTED] = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cells" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.matrix)
        if item.name in WIDE.get(item.path.name, ()):
            item.add_marker(pytest.mark.wide)


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> list[Any]:
    """Where a test puts the cells that it compared."""
    return request.config.stash[CELLS]


@pytest.fixture
def findings(request: pytest.FixtureRequest) -> list[Any]:
    """Where a test of comparing dumps puts what was found of a bug, or of a right run."""
    return request.config.stash[FINDINGS]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", metavar="FILE", help="write every compared cell to a JSON file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _skipped(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _skipped(report)


def _skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        SKIPPED[report.nodeid.partition("::")[0]] = report.longrepr[2].removeprefix("Skipped: ")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    _told_of_bugs(terminalreporter, config.stash[FINDINGS])
    all_found = config.stash[CELLS]
    found = [c for c in all_found if not c.hidden]
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
        names = ("model", "case", "site", "check", "error", "bound", "upstream", "own", "hidden")
        run = {
            "versions": ", ".join(f"{p} {v}" for p in PACKAGES if (v := _version(p)) is not None),
            "packages": {p: _version(p) for p in PACKAGES},
            "skipped": SKIPPED,
            "seconds": time.monotonic() - config.stash[STARTED],
            "cores": os.cpu_count(),
            "cells": [{n: getattr(c, n) for n in names} for c in all_found],
        }
        Path(path).write_text(json.dumps(run, indent=1))


def _told_of_bugs(terminalreporter: Any, findings: list[dict[str, Any]]) -> None:
    bugs, right = [f for f in findings if "bug" in f], [f for f in findings if "case" in f]
    if not findings:
        return
    line = terminalreporter.write_line
    terminalreporter.section("distributed bugs, by comparing dumps")
    for found in bugs:
        said = "localised" if found["localised"] else ("found" if found["found"] else "MISSED")
        line(f"  {said}: {found['bug']}: {found['first'] or 'no divergence'}")
    count = [sum(f[key] for f in bugs) for key in ("found", "localised")]
    line(f"{len(bugs)} bugs: {count[0]} found, {count[1]} localised")
    alarms = [f["case"] for f in right if f["alarm"]]
    tensors = sum(f["tensors"] for f in right)
    line(f"{len(right)} right runs ({tensors} tensors): {len(alarms)} false alarms")
    for name in alarms:
        line(f"  false alarm: {name}")
