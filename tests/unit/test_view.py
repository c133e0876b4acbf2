"""The model as a tree: nothing is lost by folding, words are right, names from files stay text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex import Dim, Layout, SiteError
from megatron_flex.layout import Cut, replicated
from megatron_flex.sites import Site
from megatron_flex.view import (
    TreeHook,
    TreeNode,
    build_tree,
    describe_layout,
    describe_numbers,
    fold_layers,
    sites_of_stage,
)
from megatron_flex.view.tree_document import describe_tree
from tests.support.messages import assert_names, raises

SIZES = {"tp": 2, "cp": 2, "pp": 2, "dp": 1}
STREAM = replicated("s", "b", "h")
FC1 = Layout((Dim("s"), Dim("b"), Dim("f", (Cut("tp"),), segments=(1, 1))))


def model(layers: int = 4, experts: int = 0, hidden: str = "") -> list[Site]:
    """Sites of a small model, the second half of its layers on another stage."""
    out = [Site("embedding:output", STREAM, ("s", "b", 8))]
    for n in range(layers):
        stage, at = 2 * n // layers, f"decoder.layers.{n}"
        out += [Site(f"{at}:input", STREAM, ("s", "b", 8), stage)]
        out += [Site(f"{at}.mlp.linear_fc1:output", FC1, ("s", "b", 32), stage, hidden=hidden)]
        out += [Site(f"{at}.mlp.experts.{e}:output", STREAM, ("s", "b", 8), stage) for e in range(experts)]
    return [*out, Site("loss:output", replicated("b", "s"), ("b", "s"), 1)]


def shown(root: TreeNode, **how: object) -> str:
    out = io.StringIO()
    describe_tree(root, "", "a model").print(out, **how)  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def count(node: TreeNode) -> int:
    return node.count * (len(node.points) + sum(map(count, node.children)))


@given(st.lists(st.integers(0, 60)))
def test_series_of_numbers_say_each_of_them(numbers: list[int]) -> None:
    said: list[int] = []
    for word in filter(None, describe_numbers(numbers).split(",")):
        ends, _, step = word.partition(":")
        first, _, last = ends.partition("-")
        said += range(int(first), int(last or first) + 1, int(step or 1))
    assert said == sorted(set(numbers))


@pytest.mark.parametrize(
    ("numbers", "words"), [(range(32), "0-31"), (range(0, 9, 2), "0-8:2"), ([0, 2, 3], "0,2-3"), ([], "")]
)
def test_series_of_numbers_are_short(numbers: Iterator[int], words: str) -> None:
    assert describe_numbers(numbers) == words


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (STREAM, "[s, b, h]"),
        (FC1, "[s, b, f/tp in 2 segments]"),
        (replace(STREAM, partial=("tp",)), "[s, b, h] summed over tp"),
        (
            Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("b"), Dim("h"))),
            "[s/cp zigzag/tp, b, h]",
        ),
        (Layout((Dim("s"), Dim("g", (Cut("tp", copies=2),)))), "[s, g/tp in 2 copies]"),
        (Layout((Dim("b"), Dim("s", (Cut("cp"),))), permute=(1, 0)), "[s/cp, b]"),
        (Layout((Dim("s", (Cut("dp"),)),)), "[s]"),
    ],
)
def test_layouts_in_words(layout: Layout, words: str) -> None:
    assert describe_layout(layout, SIZES) == words


@pytest.mark.parametrize("experts", [0, 3])
def test_folding_loses_no_place_and_unfolded_all_are_there(experts: int) -> None:
    sites = model(6, experts)
    root = build_tree(sites, SIZES)
    assert count(root) == count(fold_layers(root)) == len(sites)
    assert root.children[1].children[0].label == "layers"
    (layers,) = fold_layers(root).children[1].children[0].children
    assert (layers.label, layers.count, layers.stages) == ("0-5", 6, {0, 1})


def test_layers_that_differ_are_shown_apart() -> None:
    sites = [replace(s, layout=STREAM) if s.name.startswith("decoder.layers.2.mlp") else s for s in model(4)]
    layers = fold_layers(build_tree(sites, SIZES)).children[1].children[0].children
    assert [n.label for n in layers] == ["0-1,3", "2"]


def test_hooks_are_told_where_they_stand() -> None:
    steer, read = TreeHook("edits", "scale(2.0)", ("steer",)), TreeHook("reads", active=False)
    everywhere = {s.name: [read] for s in model() if s.name.endswith(":input")}
    content = shown(
        fold_layers(
            build_tree(model(), SIZES, {"decoder.layers.2.mlp.linear_fc1:output": [steer], **everywhere})
        )
    )
    assert "● :output" in content
    assert_names(content, "scale(2.0) [steer] at 2")
    assert "◌ :input" in content
    assert "reads, off" in content


@pytest.mark.parametrize("width", [60, 100])
def test_the_printed_tree_fits_the_terminal(width: int) -> None:
    root = build_tree(model(4, 2, hidden="a fused kernel"), SIZES)
    folded, full = shown(fold_layers(root), width=width), shown(root, width=width)
    for text in (folded, full):
        assert max(map(len, text.splitlines())) <= width
        assert [
            w for w in ("a fused kernel", "linear_fc1", "[s, b, f/tp in 2 segments]") if w not in text
        ] == []
    assert (folded.count("linear_fc1"), full.count("linear_fc1")) == (1, 4)


def test_a_terminal_of_ascii_gets_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    describe_tree(fold_layers(build_tree(model(), SIZES)), "", "a model").print(out)
    out.flush()
    assert b"o :output" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_markup_in_a_name_stays_text() -> None:
    site = Site("[red]x[/red]:output", STREAM, ("s", "b", 8), hidden="[bold]no")
    content = shown(build_tree([site], SIZES))
    assert "[red]x[/red]" in content
    assert "[bold]no" in content


def test_a_stage_without_sites_is_refused() -> None:
    assert {s.stage for s in sites_of_stage(model(), 1)} == {1}
    with raises(SiteError, 7, "0-1"):
        sites_of_stage(model(), 7)


def test_plain_values_have_all_of_it() -> None:
    content = build_tree(model(2), SIZES, {"loss:output": [TreeHook("reads", groups=("a",))]}).to_json()
    (loss,) = [c for c in content["children"] if c["label"] == "loss"]
    assert loss["places"] == [
        {
            "point": "output",
            "layout": "[b, s]",
            "shape": "b x s",
            "hidden": "",
            "fixed": "",
            "hooks": ["reads [a]"],
        }
    ]
