"""pytest plugin of scripts/mutate: writes the outcome of each test to a file as soon as it is known."""

import json
import os
from pathlib import Path

import pytest

RECORD = "FLEX_MUTATE_RECORD"  # environment variable that names the file


def pytest_runtest_logreport(report: pytest.TestReport):
    outcome = report.outcome
    if outcome == "passed" and report.when != "call":
        return
    with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": outcome}) + "\n")
