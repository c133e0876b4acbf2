"""pytest plugin of scripts/test: a run in which every test was skipped is a failure, not a success."""

import pytest

_ran = []


def pytest_runtest_logreport(report: pytest.TestReport):
    if report.when == "call" and not report.skipped:
        _ran.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int):
    if hasattr(session.config, "workerinput"):  # one of several processes, which may have had only such tests
        return
    if exitstatus == pytest.ExitCode.OK and not _ran and not session.config.option.collectonly:
        print("\nerror: no test ran, all were skipped: install what they need, or select other tests")
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
