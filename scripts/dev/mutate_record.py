"""pytest plugin of scripts/dev/mutate: writes the outcome of each test to a file as soon as it is known.

Property tests draw the same examples in every run, and one that fails is not made smaller.
"""

import contextlib
import json
import os
from pathlib import Path

import pytest

RECORD = "FLEX_MUTATE_RECORD"  # environment variable that names the file
MOST = 400  # characters that are kept of why a test failed

with contextlib.suppress(ImportError):
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutate",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
    )
    settings.load_profile("mutate")


def pytest_runtest_logreport(report: pytest.TestReport):
    if report.passed and report.when != "call":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = getattr(crash, "message", "") if report.failed else ""
    line = {"test": report.nodeid, "outcome": report.outcome, "message": message[:MOST]}
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
