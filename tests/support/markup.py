"""HTML as a browser would read it: what is shown, and that nothing else is in it."""

from __future__ import annotations

from html.parser import HTMLParser

ALLOWED = {
    *("div", "b", "i", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("svg", "text", "g", "rect", "title"),
}
VOID = {"br", "hr", "img", "input", "link", "meta"}


class Shown(HTMLParser):
    """A fragment that was read.

    Attributes:
        text: all that is shown, with a bar between pieces.
        tags: how often each tag stands in it.
        rows: the cells of each row of each table.
        colours: the background of each row.
        summaries: what stands on the folds.
    """

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.tags: dict[str, int] = {}
        self.rows: list[list[str]] = []
        self.colours: list[str] = []
        self.summaries: list[str] = []
        self._open: list[str] = []
        self.feed(fragment)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def text(self) -> str:
        return "|".join(self.pieces)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, f"<{tag}> has no place in a fragment"
        for name, value in attrs:
            assert not name.startswith("on"), f"a script: {name}"
            assert name in ("xmlns",) or "://" not in (value or ""), f"something of the network: {value}"
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.colours.append(dict(attrs).get("style") or "")
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "summary":
            self.summaries.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data
        if "summary" in self._open:
            self.summaries[-1] += data
