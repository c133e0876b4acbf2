"""A page as one HTML file: styles, scripts and values in it, nothing from anywhere else."""

from __future__ import annotations

import json
import os
import re
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path

from megatron_flex.errors import FlexError
from megatron_flex.notebook_html import PAGE_BYTES
from megatron_flex.page.content import Page

FIRST_SCRIPTS, LAST_SCRIPTS = ("core.js", "top.js"), ("go.js",)  # what others need, and what draws them
BASE_STYLE = "style.css"  # the others build on it
PLACEHOLDER = re.compile(r"@(title|style|page|scripts)@")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html(page: Page) -> str:
    """The page, as text of ASCII but for what its scripts and title say.

    Values from files are in it once, as JSON in which nothing ends a script or begins a tag.
    """
    assets = files("megatron_flex.page") / "assets"
    there = sorted(f.name for f in assets.iterdir() if f.name.endswith(".js"))
    styles = sorted(
        (f.name for f in assets.iterdir() if f.name.endswith(".css")), key=lambda n: (n != BASE_STYLE, n)
    )
    middle = [n for n in there if n not in (*FIRST_SCRIPTS, *LAST_SCRIPTS)]
    scripts = [
        f"<script>\n{(assets / name).read_text(encoding='utf-8')}</script>"
        for name in (*FIRST_SCRIPTS, *middle, *LAST_SCRIPTS)
    ]
    parts = {
        "title": escape(page.title),
        "style": "\n".join((assets / name).read_text(encoding="utf-8") for name in styles),
        "page": page_json(page),
        "scripts": "\n".join(scripts),
    }
    frame = (assets / "page.html").read_text(encoding="utf-8")
    return PLACEHOLDER.sub(lambda found: parts[found[1]], frame)


def page_json(page: Page) -> str:
    """What the page shows, as JSON that may stand in a script element."""
    encoded = json.dumps(page.to_json(), separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda found: ESCAPES[found[0]], encoded)


def write(page: Page, path: str | PathLike[str], *, most_bytes: int | None = PAGE_BYTES) -> Path:
    """Write a page, whole or not at all.

    Args:
        page: what it shows.
        path: of the file; one that is there is replaced.
        most_bytes: how large it may be; None for any size.

    Raises:
        FlexError: it would be larger, or cannot be written.
    """
    target = Path(path)
    text = html(page).encode("utf-8", errors="replace")
    if most_bytes is not None and len(text) > most_bytes:
        raise FlexError(
            f"{target}: the page would have {len(text) / 1e6:.2f} MB, more than {most_bytes / 1e6:.2f} MB: "
            "show fewer sites by a pattern, or allow it by most_bytes (--most-megabytes)"
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(text)
        draft.replace(target)
    except OSError as error:
        raise FlexError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target
