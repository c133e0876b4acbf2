"""Each check of pages notices what it is for: on small pages that are wrong on purpose."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.support import browsing, pictures

PANES = "".join(f'<div id="{p}" data-ready="1"></div>' for p in browsing.PANES)
GREY = "<rect width=90 height=40 fill=#333 />"


def written(folder: Path, body: str, head: str = "") -> Path:
    path = folder / "page.html"
    path.write_text(
        f"<!doctype html><html lang=en><head><title>t</title>{head}</head><body>{PANES}{body}</body>"
    )
    return path


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<img src='https://example.org/a.png'>", "https://example.org/a.png"),
        ("<script>console.warn('hm')</script>", "warning: hm"),
        ("<script>throw new Error('wrong')</script>", "raised: wrong"),
        ("<script>owned()</script>", "code of a name ran"),
    ],
)
def test_a_page_that_is_not_silent_is_noticed(raw: Open, tmp_path: Path, body: str, said: str) -> None:
    window = raw(written(tmp_path, body)).ready()
    window.page.wait_for_timeout(100)
    assert any(said in line for line in window.trouble()), window.trouble()


def test_a_silent_page_is_silent(show: Open, tmp_path: Path) -> None:
    window = show(written(tmp_path, "<button>go</button>"))
    assert window.nameless() == []
    assert window.nodes() == 8


def test_controls_without_names_are_noticed(raw: Open, tmp_path: Path) -> None:
    body = "<button></button><button aria-label=a></button><input><label>b<input></label><select></select>"
    assert sorted(raw(written(tmp_path, body)).nameless()) == ["button", "combobox", "textbox"]


@pytest.mark.parametrize(
    ("body", "faint"),
    [
        ("<p style='color:#767676;background:#fff'>enough</p>", 0),
        ("<p style='color:#777;background:#fff'>less</p>", 1),
        (f"<svg width=90 height=40>{GREY}<text y=20 fill=#666>dark</text></svg>", 1),
        (f"<svg width=90 height=40>{GREY}<text y=20 fill=#fff>light</text></svg>", 0),
    ],
)  # fmt: skip
def test_faint_texts_are_noticed(raw: Open, tmp_path: Path, body: str, faint: int) -> None:
    seen, found = raw(written(tmp_path, body)).faint()
    assert seen == 1
    assert len(found) == faint, found


def drawn(boxes: list[tuple[int, int, int, int]], colour: str = "#444", ground: str = "white") -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (480, 360), ground)
    draw = ImageDraw.Draw(image)
    for box in boxes:
        draw.rectangle(box, fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


LINES = [(20, y, 300, y + 8) for y in range(20, 340, 20)]


def test_pictures_by_their_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.delenv(pictures.AGAIN, raising=False)
    (tmp_path / "a.png").write_bytes(pictures.small(drawn(LINES)))
    out = tmp_path / "out"
    pictures.kept("a", drawn(LINES), out, tmp_path)
    pictures.kept("a", drawn([(x + 1, y + 1, u - 6, v) for x, y, u, v in LINES]), out, tmp_path)
    for wrong in (drawn(LINES[:8]), drawn(LINES, "white", "#222"), drawn([(x + 60, *r) for x, *r in LINES])):
        with pytest.raises(
            AssertionError, match=r"a\.png differs in .*a-new\.png and a-difference\.png in .*out"
        ):
            pictures.kept("a", wrong, out, tmp_path)
    assert {p.name for p in out.iterdir()} == {"a-new.png", "a-difference.png"}
    with pytest.raises(AssertionError, match=r"b\.png is not kept"):
        pictures.kept("b", drawn(LINES), out, tmp_path)
    monkeypatch.setenv(pictures.AGAIN, "1")
    pictures.kept("b", drawn(LINES), out, tmp_path)
    assert pictures.apart(tmp_path / "b.png", drawn(LINES)) == 0
