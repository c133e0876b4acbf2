"""A browser for the pages that scripts write, and a process that forks into the ranks of launches."""

from collections.abc import Iterator

import pytest

from tests.browser.conftest import browser, raw, show
from tests.support.launching import Server

__all__ = ["browser", "raw", "server", "show"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    process = Server()
    yield process
    process.close()
