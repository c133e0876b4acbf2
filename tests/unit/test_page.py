"""The page: its values are whole, names stay text, it stays small, ranks are where the mesh has them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_flex.page
from megatron_flex import Dim, FlexError, Layout, Mesh
from megatron_flex.estimate import HookSpec, Placement, TensorSizes, estimate_pass
from megatron_flex.estimate.site_estimates import estimate_sites
from megatron_flex.layout import Cut, coordinates, replicated, spans
from megatron_flex.mesh import Axis
from megatron_flex.page import Page, RankGrid, grid_of_mesh, grid_of_ranks, grid_of_sizes, html, write
from megatron_flex.page.html_page import damage_note
from megatron_flex.page.page_builder import fill_page
from megatron_flex.sites import Site
from megatron_flex.view import TreeHook
from tests.support import dumps, measured
from tests.support.dumps import COLUMN, GATED, REPLICATED, SEQUENCE, Given, random
from tests.support.messages import assert_names, missing_values, raises

ROOT = Path(__file__).parents[2]
ASSETS = Path(megatron_flex.page.__file__).parent / "assets"
GRID = grid_of_sizes({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"edp": 2, "ep": 4, "etp": 1})
NASTY = '</script><img src=x onerror="alert(1)">&amp;\u2028<!--'
GROUPED = Layout((Dim("s"), Dim("b"), Dim("g", (Cut("tp", copies=2),)), Dim("d")))


def model(layers: int = 4, points: int = 1) -> list[Site]:
    out = [Site("embedding:output", replicated("s", "b", "h"), ("s", "b", 8))]
    for n in range(layers):
        stage = 2 * n // layers
        out.append(Site(f"decoder.layers.{n}:output", SEQUENCE, ("s", "b", 8), stage))
        parts = (f"decoder.layers.{n}.mlp.part{p}.linear_fc1:output" for p in range(points))
        out += [Site(name, GATED, ("s", "b", 32), stage) for name in parts]
    return [*out, Site("loss:output", replicated("b", "s"), ("b", "s"), 1, hidden="no labels")]


class Elements(HTMLParser):
    """The elements of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.title = ""
        self._at = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._at = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._at = ""

    def handle_data(self, data: str) -> None:
        if self._at == "script":
            self.scripts[-1] += data
        if self._at == "title":
            self.title += data


def read(page: Page) -> dict[str, Any]:
    """The values of a page out of its file's text."""
    told: dict[str, Any] = json.loads(Elements(html(page)).scripts[0])
    return told


def sizes(
    lengths: Mapping[str, int],
    dtype: torch.dtype | None = torch.bfloat16,
    axes: Mapping[str, int] = GRID.sizes,  # of frozen data
) -> TensorSizes:
    return TensorSizes(axes, lengths, lambda _: dtype)


def test_every_number_in_the_values_leads_somewhere() -> None:
    sites = model()
    estimates = estimate_sites(sites, sizes({"s": 16, "b": 2}), GRID.mesh())
    hooks = {
        sites[1].name: [TreeHook("reads", groups=("probe",))],
        sites[2].name: [TreeHook("reads", active=False)],
    }
    told = read(Page("a model", GRID, sites, hooks, frozenset({sites[3].name}), estimates))
    columns = told["sites"]
    assert {len(column) for column in columns.values()} == {len(sites)}
    assert columns["name"] == [s.name for s in sites]
    for column, table in (
        ("layout", "layouts"),
        ("shape", "shapes"),
        ("reason", "reasons"),
        ("estimate", "estimates"),
    ):
        assert set(columns[column]) - {-1} == set(range(len(told[table])))
    assert columns["state"] == [0, 1, 0, 2, 0, 0, 0, 0, 0, 3]
    assert told["reasons"] == ["no labels"]
    assert told["hooks"] == {"1": ["reads [probe]"], "2": ["reads, off"]}
    assert told["groups"] == {"probe": [1]}
    assert len(told["layouts"]) == 4
    assert told["version"] == 1


def named(*names: str) -> list[Site]:
    return [Site(name, replicated("s", "b", "h"), ("s", "b", 8)) for name in names]


def test_sites_are_in_the_order_of_execution() -> None:
    layer = "decoder.layers.0"
    given = [  # as the adapter lists them, with norms inside of Transformer Engine's linears
        "embedding:output",
        "decoder:output",
        f"{layer}:input",
        f"{layer}:mid",
        f"{layer}:output",
        f"{layer}.input_layernorm:input",
        f"{layer}.pre_mlp_layernorm:input",
        f"{layer}.self_attention:input",
        f"{layer}.self_attention.linear_qkv:output",
        f"{layer}.mlp:input",
        f"{layer}.mlp.linear_fc1:output",
        "decoder.layers.1:output",
        "decoder.final_layernorm:output",
        "output_layer:output",
        "loss:output",
    ]
    wanted = [n for n in given if n != "decoder:output" and "pre_mlp" not in n]
    wanted.insert(wanted.index(f"{layer}.mlp:input"), f"{layer}.pre_mlp_layernorm:input")
    wanted.insert(wanted.index("output_layer:output"), "decoder:output")
    assert [s.name for s in Page("", GRID, named(*given)).sites] == wanted
    assert read(Page("", GRID, named(*given)))["sites"]["name"] == wanted
    deep = ".".join("abc" * 4000) + ":output"  # a name of a dump may be of any depth
    assert [s.name for s in Page("", GRID, named(deep)).sites] == [deep]


def test_axes_of_experts_are_there_where_experts_are() -> None:
    dense = read(Page("", GRID, model()))
    assert dense["mesh"]["experts"] == []
    assert [a["name"] for a in dense["mesh"]["axes"]] == ["pp", "dp", "cp", "tp"]
    routed = read(Page("", GRID, [*model(), *named("decoder.layers.0.mlp.experts.3.linear_fc1:output")]))
    assert [a["name"] for a in routed["mesh"]["experts"]] == ["edp", "ep", "etp"]
    cut = Site("x:output", Layout((Dim("s", (Cut("ep"),)),)), ("s",))
    assert read(Page("", GRID, [cut]))["mesh"]["experts"] != []


def chosen(page: Page) -> str:
    told = read(page)
    return "" if told["chosen"] < 0 else told["sites"]["name"][told["chosen"]]


def test_a_page_opens_with_a_recorded_site() -> None:
    sites = model()
    numbers = {s.name: n for n, s in enumerate(Page("", GRID, sites).sites)}
    fc1 = [f"decoder.layers.{n}.mlp.part0.linear_fc1:output" for n in range(4)]
    recorded = [numbers[n] for n in ("embedding:output", "decoder.layers.0:output", *fc1)]
    data = [{"sites": [-1, *recorded]}]
    assert chosen(Page("", GRID, sites)) == ""
    assert chosen(Page("", GRID, sites, data=data)) == fc1[0], "what most layers have, and the first of it"
    assert chosen(Page("", GRID, sites, data=data, chosen=fc1[2])) == fc1[2]
    differs = {"first": numbers["decoder.layers.2:output"]}
    assert chosen(Page("", GRID, sites, data=data, divergence=differs)) == "decoder.layers.2:output"
    assert chosen(Page("", GRID, sites, data=[{"sites": [-1]}])) == ""


def test_names_from_files_stay_text() -> None:
    site = Site(f"{NASTY}:output", replicated("s"), ("s",), hidden=NASTY)
    text = html(
        Page(
            NASTY, GRID, [site], {site.name: [TreeHook("reads", groups=(NASTY,))]}, notes=[damage_note(NASTY)]
        )
    )
    plain, found = Elements(html(Page("", GRID, []))), Elements(text)
    assert found.tags == plain.tags
    assert found.title == NASTY
    assert "\u2028" not in text.partition("<body>")[2]
    told = json.loads(found.scripts[0])
    assert told["sites"]["name"] == [site.name]
    assert told["title"] == told["reasons"][0] == told["notes"][0]["text"] == NASTY


def test_names_that_no_encoding_has_are_written_even_so(tmp_path: Path) -> None:
    site = Site("a\udcff:output", replicated("s"), ("s",))
    written = write(Page("b\udcff", GRID, [site]), tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads(Elements(written).scripts[0])["sites"]["name"] == [site.name]


def test_scripts_of_the_page_take_no_markup_and_load_nothing() -> None:
    paths = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert {path.parent for path in paths} == {ASSETS, ASSETS / "alignment"}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        ), path
        links = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not links, path
        assert "</script" not in text.lower() or path.name == "model.html"
        assert len(text.splitlines()) <= 350, path
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html(Page("", GRID, [])))
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")


def test_the_package_has_the_assets() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "page/assets/*" in settings["package-data"]["megatron_flex"]
    text = html(Page("", GRID, []))
    for path in ASSETS.iterdir():
        if path.suffix in (".js", ".css"):
            assert path.read_text(encoding="utf-8") in text


def test_a_page_that_is_too_large_is_not_written(tmp_path: Path) -> None:
    page, path = Page("a model", GRID, model(4, 20)), tmp_path / "page.html"
    with raises(FlexError, path, "0.05 MB", "most_bytes", "--most-megabytes"):
        write(page, path, most_bytes=50_000)
    assert list(tmp_path.iterdir()) == []
    assert write(page, path, most_bytes=None) == path
    assert list(tmp_path.iterdir()) == [path]
    with raises(FlexError, tmp_path / "nowhere" / "page.html"):
        write(page, tmp_path / "nowhere" / "page.html")


def test_ten_thousand_sites_on_sixteen_thousand_ranks_stay_small() -> None:
    grid = grid_of_sizes({"pp": 16, "dp": 16, "cp": 8, "tp": 8}, {"edp": 16, "ep": 64, "etp": 1})
    sites = model(100, 100)
    assert len(sites) > 10_000
    estimates = estimate_sites(sites, sizes({"s": 8192, "b": 1}, axes=grid.sizes), grid.mesh())
    page = Page("large", grid, sites, estimates=estimates)
    assert grid.ranks == 16384
    assert len(html(page)) < 2_000_000
    assert len(page.to_json()["estimates"]) < 8


# -- ranks ---------------------------------------------------------------------------------------------


def live(sizes: Mapping[str, int], order: tuple[str, ...], rank: int, offset: int = 0) -> Mesh:
    """What a rank sees of a mesh whose ranks are counted along the last of `order` first."""
    lengths = [sizes[a] for a in order]
    places = list(product(*map(range, lengths)))
    mine = dict(zip(order, places[rank], strict=True))

    def axis(name: str) -> Axis:
        ranks = [
            places.index(tuple(n if a == name else mine[a] for a in order)) + offset
            for n in range(sizes[name])
        ]
        return Axis(name, sizes[name], mine[name], None, tuple(ranks))

    return Mesh(tuple(map(axis, ("pp", "dp", "cp", "tp"))))


@pytest.mark.parametrize(
    "order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"), ("pp", "tp", "dp", "cp")]
)
@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_is_where_the_mesh_has_it(order: tuple[str, ...], rank: int) -> None:
    sizes = {"pp": 2, "dp": 3, "cp": 2, "tp": 2}
    grid = grid_of_mesh(live(sizes, order, rank, offset=8))
    assert grid.sure
    for number, place in enumerate(product(*(range(sizes[a]) for a in order))):
        assert grid.coords(number + 8) == dict(zip(order, place, strict=True))


def test_ranks_of_a_dump_are_where_its_manifest_has_them() -> None:
    sizes = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    told = [
        (number, dict(zip(("dp", "pp", "cp", "tp"), place, strict=True)))
        for number, place in enumerate(product(range(2), range(2), range(1), range(2)))
    ]
    grid = grid_of_ranks(sizes, {}, told)
    assert grid.sure
    assert all(grid.coords(number) == coords for number, coords in told)


def test_ranks_that_follow_no_rule_are_told_of() -> None:
    told = [(0, {"tp": 0}), (1, {"tp": 1}), (2, {"tp": 3}), (3, {"tp": 2})]
    grid = grid_of_ranks({"tp": 4}, {}, told)
    assert not grid.sure
    (note,) = read(Page("", grid, []))["notes"]
    assert note["text"]
    uneven = Mesh((Axis("tp", 3, 0, None, (0, 1, 5)),))
    assert not grid_of_mesh(uneven).sure


@pytest.mark.parametrize("layout", [REPLICATED, SEQUENCE, COLUMN, GATED, GROUPED])
def test_blocks_of_the_picture_are_what_each_rank_holds(layout: Layout) -> None:
    grid = grid_of_sizes({"pp": 1, "dp": 2, "cp": 2, "tp": 4})
    shown = read(Page("", grid, [Site("x:output", layout, ("s",) * len(layout.dims))]))["layouts"][0][
        "picture"
    ]
    names = [d.name for d in layout.dims]
    for coords in coordinates(layout, grid.sizes):
        held = [
            [spans(layout.dims[names.index(n)], length, coords, grid.sizes) if n else [(0, 1)]]
            for n, length in zip(shown["names"], shown["lengths"], strict=True)
        ]
        want = {(rows, columns) for rows in held[0][0] for columns in held[1][0]}
        mine = [
            (tuple(b["rows"]), tuple(b["columns"]))
            for b in shown["blocks"]
            if any(all(coords.get(a, 0) == c for a, c in rank.items()) for rank in b["ranks"])
        ]
        assert sorted(mine) == sorted(want)
    area = sum(prod(b - a for a, b in (block["rows"], block["columns"])) for block in shown["blocks"])
    assert area == prod(shown["lengths"])


# -- what hooks would send -----------------------------------------------------------------------------


def test_estimates_are_those_of_the_estimate() -> None:
    site = Site("x:output", COLUMN, ("s", "b", 32))
    lengths = {"s": 16, "b": 2}
    held = sizes(lengths).activation(site)
    assert held.local == (8, 2, 16)
    told = estimate_sites([site], sizes(lengths), GRID.mesh())[site.name]
    wanted = estimate_pass(HookSpec("**", "general"), held, site, GRID.mesh(), Placement(GRID.sizes, 8))
    assert told["edit"]["sent"] == [[s.op, s.axis, s.ranks, s.nbytes, s.backward] for s in wanted.collectives]
    assert ("all_gather", "tp") in [(op, axis) for op, axis, *_ in told["edit"]["sent"]]
    assert told["read"]["sent"] == []
    assert told["read"]["whole"] == 16 * 2 * 32 * 2
    assert told["read"]["part"] == 8 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("more", "lengths", "dtype", "unknown"),
    [
        ({}, {}, torch.bfloat16, ("s", "b")),
        ({}, {"s": 16}, torch.bfloat16, ("b",)),
        ({}, {"s": 16, "b": 1}, None, ()),
        ({"inferred": True}, {"s": 16, "b": 1}, torch.bfloat16, ()),
    ],
)
def test_what_only_the_data_tell_is_said(
    more: Mapping[str, Any], lengths: Mapping[str, int], dtype: torch.dtype | None, unknown: tuple[str, ...]
) -> None:
    site = Site("x:output", COLUMN, ("s", "b", 32), **more)
    told = estimate_sites([site], sizes(lengths, dtype), GRID.mesh())
    for why in (told["x:output"]["read"]["why"], told["x:output"]["edit"]["why"]):
        assert why
        assert missing_values(why, "s", "b") == [n for n in ("s", "b") if n not in unknown]


def test_a_place_that_can_be_read_only_says_so() -> None:
    site = Site("x:output", COLUMN, (16, 2, 32), read_only_reason="it is boolean")
    told = estimate_sites([site], sizes({}, torch.bool), GRID.mesh())["x:output"]
    assert told["read"]["whole"] == 1024
    assert_names(told["edit"]["why"], "it is boolean")
    assert read(Page("", GRID, [site]))["sites"]["state"] == [4]


# -- dumps and statistics ------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    given = {f"decoder.layers.{n}": Given(random(2, 4, 8, 8, seed=n), COLUMN, stage=n // 2) for n in range(4)}
    dumps.write(
        tmp_path / "dump", given, mesh={"pp": 2, "dp": 2, "tp": 2}, microbatches=2, iterations=[0, 10]
    )
    return tmp_path / "dump"


def test_a_page_of_a_dump(dump: Path) -> None:
    page = fill_page(None, [dump], title="a dump")
    told = read(page)
    assert told["sites"]["state"] == [2, 2, 2, 2]
    assert told["sites"]["stage"] == [0, 0, 1, 1]
    assert told["mesh"]["ranks"] == 8
    assert told["notes"] == []
    (estimate,) = told["estimates"]
    assert estimate["read"]["whole"] == page.estimates[page.sites[0].name]["read"]["whole"] > 0
    (source,) = told["data"]
    assert source["iterations"] == [0, 10]
    assert source["sites"][:4] == [0, 1, 2, 3]


def test_a_dump_brings_its_data_to_the_page_of_a_model(dump: Path) -> None:
    sites = [Site(f"decoder.layers.{n}", COLUMN, ("s", "b", 8), n // 2) for n in range(5)]
    told = read(fill_page(Page("a model", GRID, sites), [dump, dump]))
    assert told["sites"]["state"] == [2, 2, 2, 2, 0]
    assert told["title"] == "a model"
    assert [one["label"] for one in told["data"]] == ["A", "B"]


def test_damaged_dumps_are_shown_with_what_is_missing(dump: Path) -> None:
    part = next((dump / "run-0000").glob("*/*.safetensors"))
    part.write_bytes(part.read_bytes()[:100])
    told = read(fill_page(None, [dump]))
    assert len(told["sites"]["name"]) == 4
    assert any(n["kind"] == "damage" for n in told["notes"])
    (dump / "run-0000" / "manifest.json").write_text("{")
    told = read(fill_page(None, [dump], title="nothing left"))
    assert told["sites"]["name"] == []
    assert any(n["kind"] == "damage" for n in told["notes"])


def test_a_page_of_statistics(tmp_path: Path) -> None:
    from megatron_flex.statistics.statistics_reader import open_statistics

    measured.write(tmp_path, [0, 1])
    told = read(fill_page(None, statistics=[open_statistics(tmp_path)]))
    assert told["sites"]["name"] == list(measured.SITES)
    assert set(told["sites"]["state"]) == {2}
    assert told["data"][0]["kind"] == "statistics"


def test_more_than_two_sources_are_refused(dump: Path) -> None:
    with raises(FlexError, 3, 2):
        fill_page(None, [dump] * 3)


def test_the_mesh_of_a_grid_has_its_sizes() -> None:
    assert dict(GRID.mesh().sizes) == GRID.sizes
    assert RankGrid(()).ranks == 1
