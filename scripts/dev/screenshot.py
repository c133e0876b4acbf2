"""What scripts/dev/screenshot runs: a picture of a page as a reader would first see it."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.support.browsing import ARGUMENTS, Opened, find
from tests.support.pictures import small

SITE = "decoder.layers.1.mlp.linear_fc1:output"
RANK = 1  # of the stage that has the site
SIZE = (1360, 850)
MAX_BYTES = 200_000


def main(page: Path, target: Path) -> int:
    """Draw it; the exit status."""
    path, why = find()
    if not path:
        sys.exit(f"error: {why}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        window = Opened(browser, page, size=SIZE).ready()
        window.pick("site", SITE)
        window.pick("rank", RANK)
        window.page.mouse.move(0, 0)
        picture, trouble = window.picture(), window.trouble()
        browser.close()
    if trouble:
        sys.exit(f"error: {page} is not silent: {'; '.join(trouble)}")
    drawn = next((d for n in (256, 128, 64, 32) if len(d := small(picture, n)) < MAX_BYTES), None)
    if drawn is None:
        sys.exit(f"error: the picture has more than {MAX_BYTES} bytes, even of 32 colours")
    target.write_bytes(drawn)
    print(f"{target}: {len(drawn)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
