"""The page of an alignment, as text; tests/browser/test_alignment_page.py looks at it in a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from megatron_flex.alignment import Alignment, SiteVerdict
from megatron_flex.compare import Row, Worst
from tests.support.messages import assert_names

GOOD, BAD = "decoder.layers.0:output", "decoder.layers.1:output"


class Elements(HTMLParser):
    """The names of the elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def verdict(name: str, layer: str, error: float) -> SiteVerdict:
    row = Row(name, "value", 0, 8, error, 1.0, error, error, 0.1, False, Worst(0, None, None, (0,), 1.0, 2.0))
    return SiteVerdict(name, name, layer, row, row)


def write(found: Alignment, path: Path) -> Elements:
    return Elements(Path(found.to_html(path)).read_text(encoding="utf-8"))


def test_the_first_difference_and_its_cause_are_named(tmp_path: Path) -> None:
    verdicts = (verdict(GOOD, "0", 0.01), verdict(BAD, "1", 1.0))
    page = write(Alignment("Llama", verdicts, causes=("gate and up are swapped",)), tmp_path / "page.html")
    assert_names(page.text, "gate and up are swapped")
    first = re.search(
        r'<h2>[^<]*<a href="#first"><code>([^<]*)<', (tmp_path / "page.html").read_text("utf-8")
    )
    assert first is not None
    assert first[1] == BAD
    write(Alignment("Llama", verdicts[:1]), tmp_path / "equal.html")
    assert "#first" not in (tmp_path / "equal.html").read_text("utf-8")


def test_the_verdict_is_the_first_line_and_a_table_follows_where_the_models_differ() -> None:
    verdicts = (verdict(GOOD, "0", 0.01), verdict(BAD, "1", 1.0))
    found = Alignment("Llama", verdicts, notes=("padded",))
    lines = str(found).splitlines()
    assert_names(lines[0], BAD)
    assert lines.index("Llama") < lines.index("padded") < lines.index("")
    table = lines[lines.index("") + 2 :]
    assert [line.split()[:3] for line in table[:2]] == [["0", "agrees", "0.1"], ["→", "1", BAD]]
    assert [row.is_first for row in found.table_rows()] == [False, True]
    assert "" not in str(Alignment("Llama", verdicts[:1])).splitlines()


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=owned()>:output"
    found = Alignment("<blink>", (verdict(name, "0", 1.0),), causes=(name,), uncompared={name: name})
    page = write(found, tmp_path / "page.html")
    assert not {"img", "blink"} & set(page.names)
    assert name in page.text
