"""A browser for the pages that scripts write."""

from tests.browser.conftest import browser, raw, show

__all__ = ["browser", "raw", "show"]
