"""Each kind of page opens from its file, asks for nothing, says nothing wrong, and looks as it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex import open_dump
from tests.browser.conftest import Make, Open
from tests.support import paged
from tests.support.browsing import SIZE
from tests.support.pictures import AGAIN, kept

KINDS = ("quick", "large", "diverged", "damaged", "hostile")
FC1 = "decoder.layers.1.mlp.linear_fc1:output"
MAX_NODES = 20_000  # of the page of 16,384 ranks and 100 layers, whatever is chosen


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_quietly_and_can_be_read(show: Open, made: Make, kind: str, theme: str) -> None:
    window = show(made(kind).page, theme=theme)
    assert window.nameless() == []
    seen, faint = window.faint()
    assert seen > 10
    assert faint == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["quick", "diverged"])
def test_what_is_chosen_can_be_read_too(show: Open, made: Make, kind: str, theme: str) -> None:
    window = show(made(kind).page, theme=theme)
    window.pick("site", FC1)
    window.pick("rank", 3)
    assert window.nameless() == []
    seen, faint = window.faint()
    assert seen > 20
    assert faint == []


def test_help_can_be_read_in_both_themes(show: Open, made: Make) -> None:
    for theme in ("light", "dark"):
        window = show(made("quick").page, theme=theme)
        window.page.keyboard.press("?")
        assert window.faint()[1] == []
        assert window.nameless() == []


@pytest.mark.parametrize(
    ("name", "kind", "theme", "site"),
    [
        ("quick-light", "quick", "light", FC1),
        ("quick-dark", "quick", "dark", FC1),
        ("quick-opened", "quick", "light", None),
        ("quick-nothing-chosen", "quick", "light", ""),
        ("quick-phone", "quick", "dark", FC1),
        ("pp16-dp128", "pp16 dp128", "light", "decoder.layers.1.mlp.linear_fc1:output"),
        ("broken", "broken", "light", "decoder.layers.2:output"),
        ("large", "large", "light", "decoder.layers.57.mlp.linear_fc1:output"),
        ("diverged", "diverged", "light", None),
        ("damaged", "damaged", "light", FC1),
        ("hostile", "hostile", "light", paged.HOSTILE[0]),
    ],
)
def test_a_page_looks_as_it_is_kept(
    show: Open, made: Make, tmp_path: Path, name: str, kind: str, theme: str, site: str | None
) -> None:
    window = show(made(kind).page, theme=theme, size=(390, 844) if name.endswith("phone") else SIZE)
    if site == "":
        window.page.keyboard.press("Escape")
    elif site is not None:
        window.pick("site", site)
    window.page.evaluate("() => scrollTo(0, 0)")
    kept(name, window.picture(), tmp_path, fonts=window.fonts())


HIDE = "([which, how]) => document.querySelectorAll(which).forEach((e) => { e.style.visibility = how; })"


def test_a_lost_pane_is_not_as_it_is_kept(
    show: Open, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where fonts are the same, which is where the picture was just taken."""
    window = show(made("quick").page)
    window.pick("site", FC1)
    monkeypatch.setenv(AGAIN, "1")
    kept("whole", window.picture(), tmp_path, tmp_path, fonts=window.fonts())
    monkeypatch.delenv(AGAIN)
    kept("whole", window.picture(), tmp_path, tmp_path, fonts=window.fonts())
    for part in ("#data", "#mesh .side", "#architecture .point", "#chosen dl"):
        window.page.evaluate(HIDE, [part, "hidden"])
        with pytest.raises(AssertionError, match=r"whole\.png differs in"):
            kept("whole", window.picture(), tmp_path, tmp_path, fonts=window.fonts())
        window.page.evaluate(HIDE, [part, ""])


def test_the_system_s_theme_is_followed_and_the_switch_overrules_it(show: Open, made: Make) -> None:
    window = show(made("quick").page, theme="dark")
    assert window.brightness() < 64
    window.page.emulate_media(color_scheme="light")
    assert window.brightness() > 192
    window.page.emulate_media(color_scheme="dark")
    window.page.keyboard.press("t")
    assert window.brightness() > 192  # light, whatever the system prefers
    window.page.keyboard.press("t")
    window.page.emulate_media(color_scheme="light")
    assert window.brightness() < 64


def test_names_with_markup_in_them_stay_text(show: Open, made: Make) -> None:
    window = show(made("hostile").page)
    for name in paged.HOSTILE:
        window.pick("site", name)
        assert name in window.page.locator("#chosen").text_content()
        assert "owned" not in window.page.title()
        assert window.page.locator("#chosen img, #chosen b img, [onerror], [onload]").count() == 0
    assert window.page.locator("img").count() == 0


def test_what_is_damaged_is_told_and_the_rest_is_shown(show: Open, made: Make) -> None:
    page, (path,) = made("damaged")
    window = show(page)
    notes = window.page.locator("#notes").inner_text()
    assert "00000-000" in notes  # the part with the wrong byte
    assert "rank 3" in notes
    assert "iteration 2" in notes
    with open_dump(path) as dump:
        assert dump.iterations == [0, 1]
    window.pick("site", FC1)
    assert "rms" in window.text("#data")


def test_a_large_page_is_small_and_ready(show: Open, made: Make) -> None:
    page = made("large").page
    assert page.stat().st_size < 20_000_000
    window = show(page)
    assert window.nodes() < MAX_NODES
    assert "16,384" in window.text("#about")
    for layer in (0, 57, 99):
        site = f"decoder.layers.{layer}.mlp.linear_fc1:output"
        window.find(site)
        assert str(layer) in window.text("#chosen")
        assert window.nodes() < MAX_NODES
    window.page.locator("#mesh").scroll_into_view_if_needed()
    assert window.page.locator("#mesh [data-rank]").count() <= 1024
