"""A page is used without a mouse: every pane is reached, walked, searched and left, and the focus is seen."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Make, Open
from tests.support.browsing import PANES, Opened

FC1 = "decoder.layers.1.mlp.linear_fc1:output"


def walk(window: Opened, most: int = 80) -> list[dict[str, object]]:
    """What Tab goes to, until it is where it was."""
    out: list[dict[str, object]] = []
    for _ in range(most):
        window.page.keyboard.press("Tab")
        at = window.focused()
        if out and at["key"] == out[0]["key"]:
            return out
        if at["tag"] != "body":  # where it goes behind the last, before it comes back to the first
            out.append(at)
    raise AssertionError(f"Tab does not come back after {most} steps: {[a['name'] for a in out]}")


@pytest.mark.parametrize("kind", ["quick", "large", "diverged"])
def test_tab_reaches_every_pane_comes_back_and_is_seen(show: Open, made: Make, kind: str) -> None:
    window = show(made(kind).page)
    if kind == "quick":
        window.pick("site", FC1)
    stops = walk(window)
    panes = {a["pane"] for a in stops}
    assert panes >= set(PANES) - ({"data"} if kind == "large" else set())  # which has no data to walk over
    assert [a for a in stops if not a["seen"]] == []
    assert [a for a in stops if not a["name"] and a["tag"] not in ("input", "select")] == []


def test_a_site_is_found_and_chosen_by_typing(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    keys = window.page.keyboard
    keys.press("/")
    assert window.focused()["tag"] == "input"
    keys.type("layers.1 fc1:output")
    keys.press("ArrowDown")
    keys.press("Enter")
    assert window.chosen("site") == [FC1]
    keys.press("Escape")
    keys.press("Escape")
    assert window.chosen("site") == []


def test_what_was_chosen_of_those_found_gives_the_keys_back_at_once(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    window.page.keyboard.press("/")
    window.page.keyboard.type("layers.1 fc1:output")
    window.page.keyboard.press("ArrowDown")
    tags = window.page.evaluate(
        "() => { const at = document.activeElement; at.click(); "
        "return [at.getAttribute('role'), document.activeElement.tagName]; }"
    )
    assert tags == ["option", "BODY"]


def test_arrows_walk_over_sites_and_ranks(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    window.pick("site", FC1)
    keys = window.page.keyboard
    for attribute, names in (("site", ("ArrowDown", "ArrowRight")), ("rank", ("ArrowRight",))):
        at = window.one(attribute, FC1 if attribute == "site" else 0)
        at.focus()
        first = window.focused()["data"]
        assert attribute in first
        for name in names:
            keys.press(name)
        there = window.focused()["data"]
        assert attribute in there
        assert there[attribute] != first[attribute]
        keys.press("Enter")
        assert window.chosen(attribute) == [there[attribute]]


def test_layers_and_sites_by_brackets(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    window.pick("site", FC1)
    keys = window.page.keyboard
    keys.press("]")
    assert window.chosen("site") == [FC1.replace(".1.", ".2.")]
    keys.press("[")
    keys.press("[")
    assert window.chosen("site") == [FC1.replace(".1.", ".0.")]
    keys.press("}")
    assert window.chosen("site") != [FC1.replace(".1.", ".0.")]


def test_help_opens_and_is_left(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    help_ = window.page.locator("#help")
    assert not help_.is_visible()
    window.page.keyboard.press("?")
    assert help_.is_visible()
    assert "Escape" in help_.inner_text()
    window.page.keyboard.press("Escape")
    assert not help_.is_visible()
