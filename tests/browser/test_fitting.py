"""Letters that can be read, panes that fit, and layers, blocks and sites where they should be."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from megatron_flex import open_dump
from tests.browser.conftest import Make, Open
from tests.support.browsing import Opened
from tests.support.messages import assert_names

SIZES = [(1400, 900), (1024, 800), (390, 844)]
PHONE = (390, 844)
FC1 = "decoder.layers.1.mlp.linear_fc1:output"
LEAST = 12  # pixels of a letter

SMALL = """(least) => {
  const HIDDEN = "script, style, noscript, title, option, dialog:not([open])";
  const out = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const at = node.parentElement;
    if (!node.textContent.trim() || at.closest(HIDDEN)) continue;
    if (!at.getClientRects().length) continue;
    const matrix = at instanceof SVGElement ? at.getScreenCTM() : null;
    const size = parseFloat(getComputedStyle(at).fontSize) * (matrix ? Math.hypot(matrix.a, matrix.b) : 1);
    seen += 1;
    if (size < least - 0.01) out.push(`${size.toFixed(1)}: ${node.textContent.trim().slice(0, 40)}`);
  }
  return [seen, out];
}"""


@pytest.mark.parametrize("size", SIZES, ids=lambda s: str(s[0]))
@pytest.mark.parametrize("kind", ["quick", "diverged", "large", "pp16 dp128"])
def test_no_letter_is_smaller_than_12_pixels(
    show: Open, made: Make, kind: str, size: tuple[int, int]
) -> None:
    window = show(made(kind).page, size=size)
    tabs = window.page.locator("[role=tab]")
    for n in range(max(1, tabs.count())):
        if tabs.count():
            tabs.nth(n).click()
        seen, small = window.page.evaluate(SMALL, LEAST)
        assert seen > 20
        assert small == []
    if kind == "quick":  # all layers side by side, and from afar
        window.page.locator(".opener").first.click()
        for _ in range(4):
            assert window.page.evaluate(SMALL, LEAST)[1] == []
            window.page.keyboard.press("-")


@pytest.mark.parametrize("kind", ["quick", "large", "diverged", "damaged", "hostile", "pp8", "broken"])
def test_a_page_is_as_wide_as_a_phone(show: Open, made: Make, kind: str) -> None:
    window = show(made(kind).page, size=PHONE)
    assert window.page.evaluate("() => document.documentElement.scrollWidth") == PHONE[0]
    for one in window.page.locator("#top input, #top select, #top button, #title, #about").all():
        box = one.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]


def out_of_sight(window: Opened) -> tuple[int, int]:
    """How many pixels of the ranks are below and beside what is seen of them."""
    script = "(e) => [e.scrollHeight - e.clientHeight, e.scrollWidth - e.clientWidth]"
    down, right = window.page.locator(".ranks").evaluate(script)
    return down, right


@pytest.mark.parametrize("size", [(1400, 900), (1100, 720), (1024, 800)], ids=lambda s: str(s[0]))
@pytest.mark.parametrize("kind", ["pp8", "pp16 dp128", "tp8 pp8 dp4"])
def test_ranks_fit_their_pane(show: Open, made: Make, kind: str, size: tuple[int, int]) -> None:
    window = show(made(kind).page, size=size)
    window.pick("layer", 1)
    window.find("decoder.layers.1.mlp.linear_fc1:output")
    down, right = out_of_sight(window)
    assert (down <= 2, right <= 2) == (True, True)
    assert not window.page.locator(".more").is_visible()
    ranks = window.page.locator(".ranks svg, .ranks canvas").bounding_box()
    pane = window.page.locator("#mesh").bounding_box()
    assert ranks is not None
    assert pane is not None
    assert ranks["y"] + ranks["height"] <= pane["y"] + pane["height"]
    assert ranks["x"] + ranks["width"] <= pane["x"] + pane["width"]


def test_ranks_that_do_not_fit_are_scrolled_with_a_cue(show: Open, made: Make) -> None:
    window = show(made("pp16 dp1024").page, size=(1024, 640))
    window.page.wait_for_timeout(100)
    down, right = out_of_sight(window)
    assert down > 2 or right > 2
    cue = window.page.locator(".more")
    assert cue.inner_text().strip()
    box, pane = cue.bounding_box(), window.page.locator("#mesh").bounding_box()
    assert box is not None
    assert pane is not None
    assert box["y"] + box["height"] <= pane["y"] + pane["height"], "the cue itself is in sight"
    first = cue.inner_text()
    window.page.locator(".ranks").evaluate("(e) => e.scrollTo(e.scrollWidth, e.scrollHeight)")
    window.page.wait_for_timeout(100)
    assert cue.inner_text() != first


def test_a_drawing_and_estimates_that_do_not_fit_fade_at_their_end(show: Open, made: Make) -> None:
    window = show(made("quick").page, size=(1024, 768))
    window.find("decoder.layers.1.mlp.linear_fc1:output")
    window.page.wait_for_timeout(100)
    side = window.page.locator("#mesh .side")
    mask = "(e) => [e.scrollHeight - e.clientHeight > 2, getComputedStyle(e).maskImage !== 'none']"
    assert side.evaluate(mask) == [True, True]
    side.evaluate("(e) => e.scrollTo(0, e.scrollHeight)")
    window.page.wait_for_timeout(100)
    assert side.evaluate(mask) == [True, False]
    window.page.set_viewport_size({"width": 1400, "height": 1600})
    window.page.wait_for_timeout(200)
    assert side.evaluate(mask) == [False, False], "nothing fades where all of it is shown"


def test_blocks_are_in_the_order_of_execution(show: Open, made: Make) -> None:
    window = show(made("quick").page, size=(1400, 1200))
    titles = window.page.locator("#canvas .title").all()
    places = sorted((t.bounding_box()["y"], t.text_content()) for t in titles)  # type: ignore[index]
    shown = [re.match(r"[a-z_.]+[a-z]", text)[0] for _, text in places]  # type: ignore[arg-type, index]
    assert shown == [
        "embedding",
        "decoder.layers",
        "decoder.final_layernorm",
        "decoder",
        "output_layer",
        "loss",
    ]


def test_a_page_opens_with_a_recorded_site_unless_its_address_names_one(show: Open, made: Make) -> None:
    page = made("quick").page
    window = show(page)
    (site,) = window.chosen("site")
    assert re.fullmatch(r"decoder\.layers\.0\b.*", site)
    assert window.page.locator("#data-body").get_attribute("data-view") == "site"
    assert site in window.text("#data-body")
    window.page.keyboard.press("Escape")
    assert window.chosen("site") == []
    window.page.goto(f"{window.address}#site={FC1.replace(':', '%3A')}&rank=2")
    window.page.reload()
    window.ready()
    assert window.chosen("site") == [FC1]
    assert window.chosen("rank") == ["2"]


def test_two_dumps_open_with_their_divergence(show: Open, made: Make) -> None:
    window = show(made("diverged").page)
    assert window.page.locator("#data-body").get_attribute("data-view") == "divergence"
    (site,) = window.chosen("site")
    assert site in window.text(".data-is-first")


def test_states_are_named_as_what_they_are(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    assert window.text(".legend") == "available hooked recorded hidden read only"


def test_the_ring_of_a_divergence_is_in_the_legend(show: Open, made: Make) -> None:
    window = show(made("diverged").page)
    assert window.page.locator("#canvas .differs").count() > 0
    assert window.text(".legend").endswith("read only diverges")


def colours(window: Opened) -> dict[str, list[int]]:
    """The colour of each layer's cell."""
    script = """(cells) => cells.map((c) => [c.dataset.layer,
      getComputedStyle(c.querySelector('.tick')).fill.match(/[\\d.]+/g).map(Number).slice(0, 3)])"""
    return dict(window.page.locator("#canvas [data-layer].cell").evaluate_all(script))


def test_layers_are_coloured_by_what_was_recorded(show: Open, made: Make) -> None:
    page, (path,) = made("quick")
    window = show(page, size=(1400, 900))
    window.pick("site", FC1)
    with open_dump(path) as dump:
        sizes = [
            float(dump[f"decoder.layers.{n}.mlp.linear_fc1"].torch()[-1].double().square().mean().sqrt())
            for n in range(4)
        ]
    shown = colours(window)
    assert shown[str(sizes.index(max(sizes)))] == [253, 231, 37], "the light end of the scale"
    assert shown[str(sizes.index(min(sizes)))] == [68, 1, 84], "its dark end"
    light = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b in (shown[str(n)] for n in range(4))]
    ranked = sorted(range(4), key=lambda n: sizes[n])
    assert all(light[a] <= light[b] for a, b in pairwise(ranked))
    words = window.page.locator("#canvas [data-layer='2'].cell").get_attribute("aria-label") or ""
    found = re.search(r"RMS ([\d.e-]+)", words)
    assert found is not None
    assert float(found[1]) == pytest.approx(sizes[2], rel=2e-3)
    assert_names(window.text(".layer-scale"), "mlp.linear_fc1:output", 2)
    window.pick("site", "decoder.layers.1:output")
    assert_names(window.text(".layer-scale"), "output", 2)
    assert "mlp" not in window.text(".layer-scale")
    window.page.locator(".layer-scale select").select_option("stage")
    assert len({tuple(c) for c in colours(window).values()}) == 2


def test_layers_with_nan_are_red_whatever_colours_the_others(show: Open, made: Make) -> None:
    window = show(made("broken").page, size=(1400, 900))
    window.pick("site", "decoder.layers.0:output")
    shown = colours(window)
    red = window.page.evaluate("""() => {
      const at = document.createElement('i');
      at.style.color = 'var(--wrong)';
      document.body.append(at);
      return getComputedStyle(at).color.match(/\\d+/g).map(Number);
    }""")
    assert [n for n, colour in shown.items() if colour == red] == ["3"]
    light = [0.3 * r + 0.59 * g + 0.11 * b for n, (r, g, b) in shown.items() if n != "3"]
    assert light == sorted(light), "each layer is larger than the one before"
    window.page.locator(".layer-scale select").select_option("odd")
    assert [n for n, colour in colours(window).items() if colour == red] == ["3"]
    assert "in 1 of 6 layers" in window.text(".layer-scale")


@pytest.mark.parametrize("clipboard", [True, False])
def test_a_name_and_a_hook_are_copied(show: Open, made: Make, clipboard: bool) -> None:
    window = show(made("quick").page)
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    window.page.evaluate(
        "(open) => { window.copied = [];"
        "if (open) return;"
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.addEventListener("
        "'copy', () => window.copied.push(String(document.activeElement.value))); }",
        clipboard,
    )
    window.pick("site", FC1)
    for name, wanted in (("copy name", FC1), ("copy hook", f"mf.HookFunction({json.dumps(FC1)})")):
        button = window.page.locator(".copy").filter(has_text=name)
        button.click()
        window.page.locator(".copy").filter(has_text="copied").first.wait_for()
        script = "() => navigator.clipboard.readText()" if clipboard else "() => window.copied.at(-1)"
        assert window.page.evaluate(script) == wanted
        window.page.locator(".copy").filter(has_text=name).wait_for()


def test_what_alone_has_something_to_show_has_the_full_width(show: Open, made: Make) -> None:
    window = show(made("empty").page, size=(1400, 900))
    main, data = (window.page.locator(one).bounding_box() for one in ("main", "#data"))
    assert main is not None
    assert data is not None
    assert data["width"] >= main["width"] - 30
    assert not window.page.locator("#architecture, #mesh, #chosen").first.is_visible()
    window = show(made("pp8").page, size=(1400, 900))  # no data: the panes above have the room
    mesh, data = (window.page.locator(one).bounding_box() for one in ("#mesh", "#data"))
    assert mesh is not None
    assert data is not None
    assert mesh["height"] > 500
    assert data["width"] > 1300
    window = show(made("broken").page, size=(1400, 900))  # one rank: no picture of a mesh
    assert not window.page.locator("#mesh .ranks").is_visible()
    box = window.page.locator("#data").bounding_box()
    assert box is not None
    assert box["height"] > 450


def test_charts_are_as_wide_as_their_pane(show: Open, made: Make) -> None:
    for size in SIZES:
        window = show(made("quick").page, size=size)
        window.page.locator("#data-tab-norms").click()
        chart, body = (
            window.page.locator(one).first.bounding_box() for one in ("svg.data-chart", "#data-body")
        )
        assert chart is not None
        assert body is not None
        assert body["width"] - 60 <= chart["width"] <= body["width"]


def test_a_histogram_has_no_empty_middle(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    window.pick("site", FC1)
    path = window.page.locator(".data-ridge.data-on").get_attribute("d") or ""
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
    top, base = min(y for _, y in points), max(y for _, y in points)
    chart = window.page.locator("svg.data-chart").filter(has=window.page.locator(".data-ridge"))
    zero = chart.locator("text[text-anchor=middle]").filter(has_text=re.compile("^0$"))
    at, (left, right) = float(zero.get_attribute("x") or 0), (points[0][0], max(x for x, _ in points))
    middle = [y for x, y in points if abs(x - at) < 0.06 * (right - left)]
    assert len(middle) >= 4
    assert all(base - y > 0.75 * (base - top) for y in middle), "densities are greatest around zero"
