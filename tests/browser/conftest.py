"""One browser for all tests of this folder, and windows that must have been silent when they are closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support import paged
from tests.support.browsing import ARGUMENTS, NEEDED, WHICH, Opened, find

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., Opened]


def missing(why: str) -> None:
    """Skip, or fail where a browser is needed or named."""
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{NEEDED}=1, but {why}", pytrace=False)
    if os.environ.get(WHICH):
        pytest.fail(why, pytrace=False)
    # A machine may have no browser; continuous integration says FLEX_BROWSER_NEEDED=1, and fails above.
    pytest.skip(why)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    path, why = find()
    if not path:
        missing(why)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install --group browser")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield found
        found.close()


@pytest.fixture
def raw(browser: Browser) -> Iterator[Open]:
    """Opens a page, whatever it does."""
    windows: list[Opened] = []

    def opened(path: Path, **how: Any) -> Opened:
        windows.append(Opened(browser, path, **how))
        return windows[-1]

    yield opened
    for window in windows:
        window.close()


@pytest.fixture
def show(raw: Open) -> Iterator[Open]:
    """Opens a page and waits until it is drawn; at the end it must have asked for and said nothing."""
    windows: list[Opened] = []

    def opened(path: Path, **how: Any) -> Opened:
        windows.append(raw(path, **how).ready())
        return windows[-1]

    yield opened
    for window in windows:
        assert window.trouble() == []


class Made(NamedTuple):
    """A page, and the dumps that it shows."""

    page: Path
    dumps: tuple[Path, ...] = ()


Make = Callable[[str], Made]


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Pages by name, each made when it is first asked for."""
    needs = {"quick": "megatron.core", "large": "megatron.training"}

    @cache
    def make(name: str) -> Made:
        for module in ("typer", needs.get(name, "torch")):
            pytest.importorskip(module)
        folder = tmp_path_factory.mktemp(name)
        page = folder / "page.html"
        if name == "quick":
            dump = paged.trained(folder, page=True)
            return Made(page, (dump,))
        if name == "large":
            return Made(paged.viewed(page, "--world-size", paged.LARGE_RANKS, "--", *paged.LARGE))
        if name in paged.MESHES:
            return Made(paged.of_mesh(page, paged.MESHES[name]))
        if name == "broken":
            dump = paged.broken(folder / "dump")
            return Made(paged.viewed(page, dump), (dump,))
        if name == "empty":
            return Made(paged.empty(page))
        if name == "hostile":
            dump = paged.hostile(folder / "dump")
            return Made(paged.viewed(page, dump), (dump,))
        whole = make("quick").dumps[0]
        if name == "damaged":
            dump = paged.damaged(whole, folder / "dump")
            return Made(paged.viewed(page, dump), (dump,))
        assert name == "diverged"
        dump = paged.trained(folder, wrong=True)
        return Made(paged.viewed(page, whole, dump), (whole, dump))

    return make
