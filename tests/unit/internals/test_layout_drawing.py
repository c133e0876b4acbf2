"""Drawings of layouts: blocks fill the tensor, each with the ranks that hold it, and names stay text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from megatron_flex import Dim, Layout
from megatron_flex.layout import Cut, coordinates, replicated, spans
from megatron_flex.layout.layout_drawing import LayoutPicture, draw_layout, make_picture
from tests.support.messages import assert_names
from tests.unit.test_layout import SIZES, layouts

SVG = "{http://www.w3.org/2000/svg}"


def area(shown: LayoutPicture) -> int:
    return sum((b.rows[1] - b.rows[0]) * (b.columns[1] - b.columns[0]) for b in shown.blocks)


@given(layouts())
def test_blocks_fill_the_drawn_dims_once(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    shown = make_picture(drawn[0], SIZES)
    cells = Counter((r, c) for b in shown.blocks for r in range(*b.rows) for c in range(*b.columns))
    assert set(cells.values()) == {1}
    assert len(cells) == shown.lengths[0] * shown.lengths[1] == area(shown)


@given(layouts())
def test_every_rank_holds_what_the_layout_says(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout = replace(drawn[0], dims=tuple(replace(d, keep=None) for d in drawn[0].dims), permute=None)
    shown = make_picture(layout, SIZES)
    names = [d.name for d in layout.dims]
    for coords in coordinates(layout, SIZES):
        mine = [b for b in shown.blocks if tuple(coords.items()) in b.ranks]
        held = sum((b.rows[1] - b.rows[0]) * (b.columns[1] - b.columns[0]) for b in mine)
        due = 1
        for name, length in zip(shown.names, shown.lengths, strict=True):
            dim = layout.dims[names.index(name)] if name else Dim()
            due *= sum(b - a for a, b in spans(dim, length, coords, SIZES))
        assert held == due


@pytest.mark.parametrize(
    ("layout", "sizes", "words"),
    [
        (replicated("s", "b", "h"), {"tp": 4}, ["every rank"]),
        (Layout((Dim("s"), Dim("f", (Cut("tp"),), segments=(1, 1)))), {"tp": 2}, ["tp 0", "tp 1"] * 2),
        (Layout((Dim("s", (Cut("cp", "zigzag"),)),)), {"cp": 2}, ["cp 0", "cp 1", "cp 0"]),
        (Layout((Dim("g", (Cut("tp", copies=2),)),)), {"tp": 4}, ["tp 0,1", "tp 2,3"]),
        (Layout((Dim("s"),), partial=("tp",)), {"tp": 2}, ["tp 0,1"]),
    ],
)
def test_blocks_say_who_holds_them(layout: Layout, sizes: dict[str, int], words: list[str]) -> None:
    drawn = ET.fromstring(draw_layout(layout, sizes))
    found = [(float(g[1].get("x", 0)), g[0].text) for g in drawn.iter(f"{SVG}g")]
    assert [text for _, text in sorted(found)] == words


def test_a_notebook_gets_a_drawing_that_says_what_it_assumes() -> None:
    told = Layout((Dim("<b>", (Cut("tp"),)),))._repr_html_()
    drawn = ET.fromstring(told)
    assert_names(drawn.get("aria-label", ""), 2)
    assert "<b>" in "".join(drawn.itertext())
    assert "<b>" not in told
