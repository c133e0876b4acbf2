"""The page of an alignment: both models side by side, the first difference, and its causes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flex.alignment import Alignment, LayerVerdict, SiteVerdict
from megatron_flex.compare import Row, Worst
from tests.browser.conftest import Open
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run_alone

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
FIRST = "decoder.layers.2.mlp.linear_fc1:gate"


def written(folder: str) -> None:
    from tests.support import aligned, alignment_faults

    one = Case("one", microbatches=1)
    alignment_faults.find("gate and up swapped", one, gradients=True).to_html(f"{folder}/differs.html")
    aligned.aligned("qwen3_moe", one).to_html(f"{folder}/agrees.html")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alignment")
    run_alone(1, written, str(folder))
    return folder


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["differs", "agrees"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_can_be_read(raw: Open, pages: Path, name: str, theme: str, width: int) -> None:
    window = raw(pages / f"{name}.html", theme=theme, size=(width, 900))
    assert window.trouble() == []
    assert window.nameless() == []
    seen, faint = window.faint()
    assert seen > 10
    assert faint == []
    assert window.page.evaluate("() => document.documentElement.scrollWidth") <= width, "nothing is cut off"


def test_the_first_difference_is_marked_between_both_verdicts(raw: Open, pages: Path) -> None:
    window = raw(pages / "differs.html", size=(1400, 900))
    page = window.page
    assert_names(window.text(".align-verdict"), FIRST)
    assert_names(window.text(".align-cause"), "gate", "up")
    assert page.locator("details.align-part[open]").count() == 1, "only the part with the first difference"
    assert page.locator("#first").is_visible()
    assert_names(window.text("#first"), "Hugging Face")
    parts = page.locator("details.align-part")
    ids = [parts.nth(n).get_attribute("id") for n in range(parts.count())]
    assert ids[:7] == [*(f"part-{p}" for p in ("embedding", 0, 1, 2, 3, "logits")), "part-gradients"]

    def verdicts(part: object) -> list[bool]:
        cells = page.locator(f"#part-{part} > summary .align-cell")
        return ["align-bad" in str(cells.nth(n).get_attribute("class")) for n in range(cells.count())]

    assert verdicts(1) == [False, False]
    assert verdicts(2) == [True, True]
    assert verdicts(3) == [True, False], "as the models run it differs, with an equal input it agrees"
    page.locator('.align-strip a[href="#part-3"]').click()
    assert page.locator("#part-3").get_attribute("open") is not None


def test_a_page_of_equal_models_opens_no_part(raw: Open, pages: Path) -> None:
    window = raw(pages / "agrees.html")
    assert window.page.locator(".align-verdict").count() == 1
    assert window.page.locator("details[open], .align-bad").count() == 0


def test_names_with_markup_stay_text(raw: Open, tmp_path: Path) -> None:
    name = "<img src=x onerror=owned()>:output"
    row = Row(name, "value", 0, 8, 1.0, 0.0, 1.0, 1.0, 0.1, False, Worst(0, None, None, (0,), 1.0, 2.0))
    verdict = SiteVerdict(name, name, "0", row, row)
    found: Any = Alignment("<b onload=owned()>", (verdict,), causes=(name,), uncompared={name: name})
    assert isinstance(found.layers[0], LayerVerdict)
    window = raw(found.to_html(tmp_path / "page.html"))
    assert window.trouble() == []
    assert window.page.locator("img").count() == 0
    assert name in window.text(".align-cause")
