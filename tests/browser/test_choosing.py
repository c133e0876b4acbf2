"""What is clicked is shown in all panes, as the dump and the layout have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_flex import open_dump
from megatron_flex.compare import compare
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.layout import Dim, Layout, spans
from megatron_flex.view import describe_layout, describe_shape
from tests.browser.conftest import Make, Open
from tests.support import dumps, paged
from tests.support.dumps import Given
from tests.support.messages import any_names, assert_names

SITES = [
    "decoder.layers.1:output",
    "decoder.layers.1.mlp.linear_fc1:output",
    "decoder.layers.3.mlp.linear_fc1:output",
    "decoder.layers.2.self_attention.core_attention:probs",
]


def number_behind(term: str, text: str) -> float:
    """The first number behind a term."""
    found = re.search(rf"(?<!\w){re.escape(term)}\s*([-+]?\d[\d.]*(?:e[-+]?\d+)?)", text)
    assert found, f"{term} is not in {text!r}"
    return float(found[1])


@pytest.mark.parametrize("site", SITES)
def test_a_site_is_told_as_its_layout_and_its_values_are(show: Open, made: Make, site: str) -> None:
    page, (path,) = made("quick")
    window = show(page)
    window.pick("site", site)
    with open_dump(path) as dump:
        place = next(p for p in dump.manifest.sites if p.name == site)
        words = describe_layout(layout_from_json(place.layout), dict(dump.manifest.sizes))
        told = window.text("#chosen")
        assert site in told.replace(" ", "")
        assert words in told
        assert describe_shape(place.shape) in told
        assert f"stage {place.stage}" in told.lower()
        value = dump[site.removesuffix(":output")].torch()[-1].double()
    shown = window.text("#data")
    assert site in shown
    assert number_behind("rms", shown) == pytest.approx(value.square().mean().sqrt().item(), rel=2e-3)
    assert number_behind("max |x|", shown) == pytest.approx(value.abs().max().item(), rel=2e-3)
    assert window.chosen("site") == [site]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_is_told_with_its_coordinates_and_its_part(show: Open, made: Make, rank: int) -> None:
    page, (path,) = made("quick")
    window = show(page)
    site = "decoder.layers.3.mlp.linear_fc1:output"
    window.pick("site", site)
    window.pick("rank", rank)
    assert window.chosen("rank") == [str(rank)]
    told = window.text("#mesh")
    pp, tp = divmod(rank, 2)
    assert re.search(rf"pp[ =]{pp}\b", told)
    assert re.search(rf"tp[ =]{tp}\b", told)
    with open_dump(path) as dump:
        place = next(p for p in dump.manifest.sites if p.name == site)
        layout, sizes = layout_from_json(place.layout), dict(dump.manifest.sizes)
    assert place.stage == 1
    pieces = window.page.locator("#mesh [data-part][aria-selected=true] rect")
    if pp != place.stage:
        assert not any_names([told], f"{tp + 1} of 2")
        assert pieces.count() == 0
        return
    assert_names(told, f"{tp + 1} of 2")
    drawn = window.shares("#mesh [data-part]", "[aria-selected=true]")
    held = spans(layout.dims[-1], place.shape[-1], {"tp": tp}, sizes)  # gate and up
    assert drawn == pytest.approx([x / place.shape[-1] for span in held for x in span], abs=0.02)


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_is_chosen_in_all_panes(show: Open, made: Make, layer: int) -> None:
    window = show(made("quick").page)
    window.pick("site", "decoder.layers.1.mlp.linear_fc1:output")
    window.pick("layer", layer)
    assert window.chosen("layer") == [str(layer)]
    site = f"decoder.layers.{layer}.mlp.linear_fc1:output"  # the same place there
    assert window.chosen("site") == [site]
    assert site in window.text("#data")


def test_a_hook_s_collectives_are_told_with_bytes(show: Open, made: Make) -> None:
    window = show(made("quick").page)
    window.pick("site", "decoder.layers.1.mlp.linear_fc1:output")
    told = window.text("#mesh")
    assert re.search(r"gather", told), told
    assert re.search(r"[\d.,]+ (bytes|KiB|MiB|B)\b", told), told


def test_the_first_divergence_is_marked(show: Open, made: Make) -> None:
    page, (one, other) = made("diverged")
    with open_dump(one) as a, open_dump(other) as b:
        found = compare(a, b)
    assert found.first is not None
    window = show(page)
    told = window.text("#data")
    assert found.first.name in told
    assert re.search(r"first", told, re.IGNORECASE)


def test_the_verdict_of_two_dumps_is_that_of_the_comparison(show: Open, tmp_path: Path) -> None:
    table = dumps.random(1, 64, 4)
    embedded, more = "embedding.word_embeddings:output", "decoder.layers.0:output"

    def write(name: str, shift: int, *sites: str) -> Path:
        tokens = (torch.arange(8 * 16).reshape(8, 16) + shift) % 64
        dumps.write(
            tmp_path / name,
            {site: Given(table[:, tokens], dumps.SEQUENCE) for site in (embedded, *sites)},
            parameters={"embedding.word_embeddings.weight": Given(table, Layout((Dim("v"), Dim("h"))))},
        )
        return tmp_path / name

    base = write("a", 0)
    for other, verdict in (
        (write("equal", 0), "equal"),
        (write("more", 0, more), "incomplete"),
        (write("shifted", 5), "cannot be compared"),
    ):
        window = show(paged.viewed(tmp_path / f"{other.name}.html", base, other))
        shown = window.page.locator(".data-verdict")
        assert shown.get_attribute("data-verdict") == compare(base, other).verdict == verdict
        assert any_names([shown.inner_text()], "8 of 8") == (verdict == "cannot be compared"), other.name
