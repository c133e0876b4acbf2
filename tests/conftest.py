"""What belongs to a whole run: its tier, the order of files, what its processes share, and its summary."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tests.support import design, execution, tiers, truths
from tests.support.gpt import Case

# Machines are shared and several processes run at once: how long drawing takes says nothing.
hypothesis.settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared machine")

# Tests read what is printed for a program: how wide and colourful a terminal would be is not inherited.
for _variable in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(_variable, None)

CELLS = pytest.StashKey[list[Any]]()
FINDINGS = pytest.StashKey[list[Any]]()
STARTED = pytest.StashKey[float]()
COLLECTION_S = pytest.StashKey[list[float]]()  # of each process that collects
ORDER_SEED = "FLEX_ORDER_SEED"  # the variable by which the processes of a run share the seed
BEGUN = "FLEX_TEST_BEGUN"  # the variable in which scripts/test says when it began, in seconds since 1970
RECORDER = pytest.StashKey[Any]()
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", metavar="FILE", help="write every compared cell to a JSON file")
    parser.addoption(
        "--product", action="store_true", help="every edit in every configuration (tests/support/design.py)"
    )
    parser.addoption(
        "--quick", action="store_true", help="the selection of scripts/test (tests/support/tiers.py)"
    )
    parser.addoption(
        "--order-seed",
        type=int,
        metavar="N",
        help="the seed of the random order of files; the summary names it",
    )
    parser.addoption(
        "--every-module", action="store_true", help="fail if a module of the package is not executed"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CELLS] = []
    config.stash[FINDINGS] = []
    config.stash[STARTED] = time.monotonic()
    config.stash[COLLECTION_S] = []
    if config.getoption("--product"):
        os.environ[design.PRODUCT] = "1"
    if not _is_worker(config):  # what processes of the run share, by variables that they inherit
        seed = config.getoption("--order-seed")
        os.environ[ORDER_SEED] = str(random.randrange(10_000) if seed is None else seed)
        for variable in (truths.FOLDER, execution.FOLDER):
            os.environ[variable] = tempfile.mkdtemp(prefix="flex-tests-")
    config.stash[RECORDER] = execution.start()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        for variable in (truths.FOLDER, execution.FOLDER):
            shutil.rmtree(os.environ.pop(variable), ignore_errors=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test before `-m` selects by marks, and note it before `-k` and `-m` narrow the run."""
    item.config.stash.setdefault(tiers.COLLECTED, []).append(item)
    if "cells" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.matrix)
    if tiers.is_product(item.path.name, item.name):
        item.add_marker(pytest.mark.product)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [i for i in items if _is_left_out(config, i)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted((i for i in items if i not in set(left_out)), key=_order)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was loaded to collect tests stays: the garbage collector need not walk through it each time."""
    gc.collect()
    gc.freeze()


def _names_tests(config: pytest.Config) -> bool:
    """Whether the command line names single tests, so that the rest of their files is not collected."""
    return any("::" in word for word in config.args)


def _is_left_out(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether a run of this tier leaves a test out; one that is named on the command line runs in any."""
    if _names_tests(config):
        return False
    if config.getoption("--quick"):
        return not tiers.is_quick(item)
    return not config.getoption("--product") and item.get_closest_marker("product") is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    began = time.monotonic()
    yield
    session.config.stash[COLLECTION_S].append(time.monotonic() - began)


def _order(item: pytest.Item) -> tuple[bool, float, str, str]:
    """Files at random, so that none comes to need another before it; in a file by topology.

    Files that take long come first, at random too, so that no process ends up with one alone.
    """
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    topology = next((v.topology for v in values if isinstance(v, Case)), "")
    path = str(item.path)
    rank = random.Random(f"{os.environ[ORDER_SEED]}/{item.path.parent.name}/{item.path.name}").random()
    return item.path.name not in tiers.LONG, rank, path, topology


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if (recorder := config.stash[RECORDER]) is not None:
        recorder.write()
    if _is_worker(config):  # to the process that prints and writes them
        config.workeroutput["cells"] = [asdict(c) for c in config.stash[CELLS]]  # type: ignore[attr-defined]
        config.workeroutput["findings"] = config.stash[FINDINGS]  # type: ignore[attr-defined]
        config.workeroutput["collection_s"] = config.stash[COLLECTION_S]  # type: ignore[attr-defined]
        return
    if config.getoption("--every-module") and exitstatus == pytest.ExitCode.OK and _not_executed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """A process of pytest-xdist has ended: what it compared is counted with the rest."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[CELLS] += [SimpleNamespace(**c, good=_good(c)) for c in output.get("cells", ())]
    node.config.stash[FINDINGS] += output.get("findings", ())
    node.config.stash[COLLECTION_S] += output.get("collection_s", ())


def _good(cell: dict[str, Any]) -> bool:
    return bool((cell["own"] if cell["upstream"] else cell["error"]) <= cell["bound"])


def _commit() -> str:
    """The commit that was run, and whether the tree differs from it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return "no commit: the tree is not git's"
    return f"commit {name.stdout.strip()}{' with changes' if changed else ''}"


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _not_executed() -> list[str]:
    return execution.missing(Path(os.environ[execution.FOLDER])) if hasattr(sys, "monitoring") else []


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> list[Any]:
    """Where a test puts the cells that it compared."""
    return request.config.stash[CELLS]


@pytest.fixture
def findings(request: pytest.FixtureRequest) -> list[Any]:
    """Where a test of comparing dumps puts what was found of a bug, or of a right run."""
    return request.config.stash[FINDINGS]


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
    if _is_worker(config):
        return
    _report_times(terminalreporter, config)
    if config.getoption("--every-module"):
        found = _not_executed()
        terminalreporter.section("modules of the package")
        terminalreporter.write_line(f"{len(found)} were not executed: {', '.join(found) or 'none'}")
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
            "commit": _commit(),
            "versions": ", ".join(f"{p} {v}" for p in PACKAGES if (v := _version(p)) is not None),
            "packages": {p: _version(p) for p in PACKAGES},
            "skipped": SKIPPED,
            "seconds": time.monotonic() - config.stash[STARTED],
            "cores": os.cpu_count(),
            "cells": [{n: getattr(c, n) for n in names} for c in all_found],
        }
        Path(path).write_text(json.dumps(run, indent=1))


def _report_times(terminalreporter: Any, config: pytest.Config) -> None:
    begun = float(os.environ.get(BEGUN, 0))
    total = time.monotonic() - config.stash[STARTED]
    start_up = f"start-up {time.time() - total - begun:.0f} s, " if begun else ""
    collection = max(config.stash[COLLECTION_S], default=0.0)  # processes collect at the same time
    terminalreporter.write_line(
        f"{start_up}collection {collection:.0f} s, in all {total:.0f} s; "
        f"--order-seed {os.environ[ORDER_SEED]} repeats the order of files"
    )


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
