"""A page in headless Chromium: opened from its file, without network, and all that it says and asks for."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WHICH, NEEDED = "FLEX_BROWSER", "FLEX_BROWSER_NEEDED"  # a path or name; set: no browser is a failure
PANES = ("architecture", "mesh", "data")
SIZE = (1100, 720)
ARGUMENTS = (
    "--no-sandbox",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name leads anywhere
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--disable-lcd-text",
)
# Runs before the page: what its policy forbids is kept, and what markup in a name would do is seen.
WATCH = """
window.__forbidden = [];
window.owned = () => { window.__forbidden.push("code of a name ran"); };
addEventListener("securitypolicyviolation", (e) => window.__forbidden.push(
  `${e.violatedDirective}: ${e.blockedURI || e.sample}`));
"""
CONTROLS = frozenset(
    [
        "button",
        "link",
        "textbox",
        "searchbox",
        "combobox",
        "checkbox",
        "radio",
        "switch",
        "slider",
        "spinbutton",
        "option",
        "tab",
        "treeitem",
        "gridcell",
        "menuitem",
        "menuitemradio",
        "listbox",
        "tree",
        "grid",
        "tablist",
        "radiogroup",
        "dialog",
        "img",
        "table",
        "region",
    ]
)


def find() -> tuple[str, str]:
    """The path of a Chromium or Chrome; or, where there is none, why."""
    said = os.environ.get(WHICH, "")
    for name in (said,) if said else NAMES:
        if path := shutil.which(name):
            return path, ""
    if said:
        return "", f"{WHICH}={said} is no program: name one, or unset it"
    return "", f"no {', '.join(NAMES[:-1])} or {NAMES[-1]} is installed: apt install chromium, or set {WHICH}"


class Opened:
    """A page in a window of its own.

    Args:
        browser: the browser.
        path: the page's file.
        theme: what the system prefers, `light` or `dark`.
        size: of the window, in pixels.

    Attributes:
        page: playwright's.
        asked: addresses that the page asked for, without its own.
        said: what it wrote to the console, raised or popped up.
    """

    def __init__(
        self, browser: Browser, path: Path, theme: Any = "light", size: tuple[int, int] = SIZE
    ) -> None:
        self.context = browser.new_context(
            color_scheme=theme,
            viewport={"width": size[0], "height": size[1]},
            reduced_motion="reduce",
            offline=True,
            service_workers="block",
            locale="en-GB",
        )
        self.asked: list[str] = []
        self.said: list[str] = []
        self.address = path.resolve().as_uri()
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.route(re.compile(r"^(?!file:)"), lambda route: route.abort())
        self.page.on("request", self._request)
        self.page.on("websocket", lambda socket: self.asked.append(socket.url))
        self.page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"raised: {error}"))
        self.page.on("popup", lambda other: self.asked.append(f"window {other.url}"))
        self.page.on("dialog", self._dialog)
        self.page.goto(self.address)

    def _request(self, request: Any) -> None:
        if request.url.partition("#")[0] != self.address:
            self.asked.append(request.url)

    def _dialog(self, dialog: Any) -> None:
        self.said.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    def trouble(self) -> list[str]:
        """All that a page has no business to say or ask for; empty of a clean one."""
        forbidden = self.page.evaluate("() => window.__forbidden")
        return [*(f"asks for {a}" for a in self.asked), *self.said, *(f"forbidden: {f}" for f in forbidden)]

    def close(self) -> None:
        """Close the window."""
        self.context.close()

    # -- what is there -----------------------------------------------------------------------------------

    def ready(self) -> Opened:
        """Wait until the three panes are drawn."""
        for pane in PANES:
            self.page.locator(f'#{pane}[data-ready="1"], #{pane} [data-ready="1"]').first.wait_for(
                state="attached"
            )
        return self

    def one(self, attribute: str, value: object) -> Locator:
        """The element whose `data-…` has a value: a site, a rank, a layer."""
        said = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return self.page.locator(f'[data-{attribute}="{said}"]').first

    def pick(self, attribute: str, value: object) -> None:
        """Click the element whose `data-…` has a value; of a site that is folded away, its layer first."""
        at = self.one(attribute, value)
        layer = re.search(r"\.(\d+)[.:]", str(value)) if attribute == "site" else None
        if layer and not at.count():
            self.pick("layer", layer[1])
        at.click()
        self.page.mouse.move(0, 0)  # what is pointed at is told in place of what is chosen

    def find(self, site: str) -> None:
        """Type a site's name into the filter, and choose what is found."""
        self.page.locator("#filter").fill(site)
        self.page.keyboard.press("Enter")

    def brightness(self) -> float:
        """Of the page, from 0 to 255: the median of all pixels of the window."""
        import numpy as np
        from PIL import Image

        return float(np.median(np.asarray(Image.open(io.BytesIO(self.picture())).convert("L"))))

    def text(self, where: str) -> str:
        """What is shown there, spaces made one."""
        return " ".join(self.page.locator(where).first.inner_text().split())

    def chosen(self, attribute: str) -> list[str]:
        """The values of what is marked as chosen, each once."""
        marked = "[aria-selected=true], [aria-current]:not([aria-current=false]), [aria-pressed=true]"
        found = self.page.locator(f"[data-{attribute}]").and_(self.page.locator(marked))
        values = [e.get_attribute(f"data-{attribute}") or "" for e in found.all()]
        return list(dict.fromkeys(values))

    def shares(self, every: str, some: str) -> list[float]:
        """Where some of the elements begin and end, from left to right, as shares of the width of all."""
        script = """([every, some]) => {
          const all = [...document.querySelectorAll(every)];
          const box = (e) => e.querySelector("rect").getBoundingClientRect();
          const left = Math.min(...all.map((e) => box(e).left));
          const right = Math.max(...all.map((e) => box(e).right));
          return all.filter((e) => e.matches(some)).map(box).sort((a, b) => a.left - b.left)
            .flatMap((b) => [(b.left - left) / (right - left), (b.right - left) / (right - left)]);
        }"""
        found: list[float] = self.page.evaluate(script, [every, some])
        return found

    def focused(self) -> dict[str, Any]:
        """What has the focus: its tag, name, pane, `data-…`, and whether one can see it."""
        found: dict[str, Any] = self.page.evaluate(FOCUSED)
        return found

    def nodes(self) -> int:
        """How many elements the document has."""
        return int(self.page.evaluate("() => document.getElementsByTagName('*').length"))

    def nameless(self) -> list[str]:
        """Controls, pictures and regions that have no name for those who cannot see them."""
        session = self.context.new_cdp_session(self.page)
        tree = session.send("Accessibility.getFullAXTree")["nodes"]
        session.detach()
        out = []
        for node in tree:
            role = node.get("role", {}).get("value", "")
            name = node.get("name", {}).get("value", "")
            if role in CONTROLS and not node.get("ignored") and not str(name).strip():
                out.append(role)
        assert any(n.get("role", {}).get("value") in CONTROLS for n in tree), "no control at all"
        return out

    def faint(self, least: float = 4.5) -> tuple[int, list[str]]:
        """How many texts were looked at, and those whose contrast to what is behind is below `least`."""
        script = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
        found = self.page.evaluate(script, least)
        return found["seen"], found["faint"]

    def fonts(self) -> str:
        """How wide texts are in the page's fonts, in pixels: the same where the fonts are."""
        return str(self.page.evaluate(WIDTHS))

    def picture(self) -> bytes:
        """The window as PNG."""
        shot: bytes = self.page.screenshot(animations="disabled", caret="hide", scale="css")
        return shot


WIDTHS = """() => ['--sans', '--mono'].map((name) => {
  const pen = document.createElement('canvas').getContext('2d');
  pen.font = `40px ${getComputedStyle(document.documentElement).getPropertyValue(name)}`;
  return pen.measureText('Sphinx of black quartz, judge 0123456789').width.toFixed(1);
}).join()"""
FOCUSED = """() => {
  const it = document.activeElement;
  if (!it || it === document.body) {
    return {tag: "body", pane: "", name: "", data: {}, seen: true, key: "body"};
  }
  const style = getComputedStyle(it);
  const line = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const inside = it instanceof SVGElement ? [...it.querySelectorAll("rect, circle, path")] : [];
  const stroked = inside.map((e) => getComputedStyle(e))
    .some((s) => s.stroke !== "none" && parseFloat(s.strokeWidth) >= 2);
  const pane = it.closest("#architecture, #mesh, #data");
  const all = [...document.querySelectorAll("*")];
  return {
    tag: it.tagName.toLowerCase(),
    pane: pane ? pane.id : "",
    name: it.getAttribute("aria-label") || it.textContent.trim().slice(0, 40),
    data: {...it.dataset},
    seen: it.matches(":focus-visible") && (line || stroked || style.boxShadow !== "none"),
    key: String(all.indexOf(it)),
  };
}"""
