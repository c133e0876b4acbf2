"""What notebooks show: sites, trees, dumps, statistics, comparisons; bounded, and all text stays text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import megatron_flex as mf
from megatron_flex.compare import Comparison, compare
from megatron_flex.compare.comparison import ReplicaMismatch
from megatron_flex.compare.comparison import Row as ComparedRow
from megatron_flex.document import (
    MAX_TABLE_ROWS,
    Bars,
    Branch,
    Document,
    Note,
    Row,
    Span,
    Table,
    Tree,
    shorten_notes,
)
from megatron_flex.document.html import MAX_TEXT_LETTERS, MAX_TREE_ROWS
from megatron_flex.layout import Cut, Dim, Layout, replicated
from megatron_flex.sites import Site, SiteTable
from megatron_flex.view import TreeHook, build_tree, fold_layers
from megatron_flex.view.tree_document import describe_tree
from tests.support import dumps, measured
from tests.support.dumps import COLUMN, REPLICATED, WEIGHT, Given, random
from tests.support.markup import Shown
from tests.support.messages import assert_names

EVIL = "<script>alert('&\"')</script>"
MAX_BYTES = 400_000  # of any fragment
FIRST, SECOND = "decoder.layers.0:output", "decoder.layers.1:output"


def shown(found: object) -> Shown:
    html = found._repr_html_()  # type: ignore[attr-defined]
    assert len(html) < MAX_BYTES
    return Shown(html)


# -- the pieces ------------------------------------------------------------------------------------------


def test_text_stays_text() -> None:
    table = Table([EVIL], [Row([EVIL])], title=EVIL, count=2, rest=EVIL)
    tree = Tree([EVIL], [Branch(EVIL, EVIL, cells=[EVIL], more=EVIL, reason=EVIL)])
    notes = [Note(EVIL, "note"), Note((Span(EVIL, "bad"), Span(EVIL)))]
    content = shown(Document(EVIL, [*notes, table, tree, Bars(EVIL, [(EVIL, 1)])]))
    assert content.text.count(EVIL) == 15
    assert "script" not in content.tags


def test_long_text_says_that_it_is_cut() -> None:
    (content,) = shown(Document("", [Note("x" * 100_000)])).pieces
    assert content.startswith("x" * MAX_TEXT_LETTERS + "…")
    assert "100,000 letters" in content
    assert len(content) < MAX_TEXT_LETTERS + 50
    assert shown(Document("", [Note("y" * MAX_TEXT_LETTERS)])).text == "y" * MAX_TEXT_LETTERS


def test_rows_that_are_left_out_are_counted() -> None:
    rows = [Row((str(n), str(n))) for n in range(10_000)]
    content = shown(Document("", [Table(["a", ">b"], rows, rest="ask for them")]))
    assert len(content.rows) == MAX_TABLE_ROWS + 1
    assert_names(content.text, f"{10_000 - MAX_TABLE_ROWS:,}", "ask for them")
    assert "more" not in shown(Document("", [Table(["a"], rows[:1], rest="ask")])).text
    content = shown(Document("", shorten_notes(["x"] * 9, "note", 3, "ask")))
    assert content.text.count("x") == 3
    assert_names(content.text, 9 - 3)


# -- sites -----------------------------------------------------------------------------------------------


def sites(layers: int = 2, name: str = "decoder.layers") -> list[Site]:
    layout = Layout((Dim("s"), Dim("b"), Dim("4h", (Cut("tp"),))))
    return [
        Site(f"{name}.{n}.mlp:output", layout, ("s", "b", 8), stage=n, hidden=EVIL if n == 1 else "")
        for n in range(layers)
    ]


def test_a_list_of_sites_is_a_list_and_a_table() -> None:
    every = SiteTable(sites(3, f"{EVIL}.layers"))
    found = every.match("**")
    assert isinstance(found, list)
    assert found == list(every)
    assert [*found] == list(every)
    for one in (found, every):
        content = shown(one)
        assert_names(content.text, "3 sites", 1)
        assert (content.pieces[0] == "SiteTable") is (one is every)
        assert content.rows[1] == [f"{EVIL}.layers.0.mlp:output", "[s, b, 4h/tp]", "[s, b, 4h 8]", "0", ""]
        assert content.rows[2][-1] == f"no hook: {EVIL}"
        assert "script" not in content.tags


def test_many_sites_are_bounded() -> None:
    content = shown(SiteTable(sites(10_000)))
    assert len(content.rows) == MAX_TABLE_ROWS + 1
    assert_names(content.text, f"{10_000 - MAX_TABLE_ROWS:,}")
    assert "0 sites" in shown(SiteTable()).text


# -- the tree --------------------------------------------------------------------------------------------


def test_the_tree_folds_and_says_what_stands_where() -> None:
    hooks = {sites()[0].name: [TreeHook("edits", EVIL, ("steer",))]}
    content = shown(
        describe_tree(fold_layers(build_tree(sites(), {"tp": 2}, hooks)), f"model {EVIL}", "head")
    )
    assert "script" not in content.tags
    assert content.pieces[0] == f"model {EVIL}"
    assert content.summaries == ["decoder.layers ● 1", "0.mlp · stage 0 ● 1", "1.mlp · stage 1"]
    assert_names(content.text, f"{EVIL} [steer]")
    assert content.text.endswith(EVIL)
    assert "[s, b, 4h/tp] · s x b x 8" in content.text


def test_layers_that_are_alike_are_one() -> None:
    alike = [replace(s, hidden="") for s in sites(100)]
    content = shown(describe_tree(fold_layers(build_tree(alike, {"tp": 2})), "model", "head"))
    assert content.summaries == ["decoder.layers 0-99 x 100.mlp"]
    assert content.text.count(":output") == 1


def test_a_large_tree_is_bounded_and_says_so() -> None:
    many = [replace(s, name=f"decoder.layers.{n}.m{n}:output") for n, s in enumerate(sites(5000))]
    content = shown(describe_tree(fold_layers(build_tree(many, {})), "model", "head"))
    rows = len(content.summaries) + content.text.count(":output")
    assert rows == MAX_TREE_ROWS
    left = 1 + 2 * len(many) - rows
    assert_names(content.text, f"{left:,}", "flex.report.show()")


# -- dumps -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = {f"decoder.layers.{n}:output": Given(random(3, 2, 4, 8, seed=n), COLUMN) for n in range(3)}
    weight = {"decoder.layers.0.weight": Given(random(3, 8, 4), WEIGHT)}
    dumps.write(tmp_path / "d", values, mesh={"tp": 2}, parameters=weight, iterations=[0, 10, 20])
    return tmp_path / "d"


def test_a_dump_says_what_it_has(path: Path) -> None:
    with mf.open_dump(path) as dump:
        content = shown(dump)
        assert not dump.files.mapped, "no data is read"
    assert content.pieces[0] == f"OpenDump · {path}"
    assert_names(content.text, "1 run", "3 sites", "1 parameter", "(0 to 20)")
    assert content.summaries == ["runs", "tensors"]
    run = next(r for r in content.rows if r[0] == "0")
    assert run[3:] == ["tp=2", "2", "3", "3"]
    (site,) = (r for r in content.rows if r[0] == "decoder.layers.*:output (3)")
    assert site[1:] == ["site", "[s 2, b 4, 4h 8]", "[s, b, 4h/tp]", "0"]
    assert any(r[:2] == ["decoder.layers.0.weight", "parameter"] for r in content.rows)
    assert "incomplete" not in content.text


def test_a_dump_says_what_is_missing(path: Path) -> None:
    next((path / "run-0000" / f"{10:010d}").glob("00001-*")).unlink()
    (path / "run-0001").mkdir()
    with mf.open_dump(path) as dump:
        content = shown(dump)
    assert_names(content.text, "run-0001", "(0 to 20)")
    assert_names(content.text, 10, "run-0000", 1)
    assert_names(content.text, "run-0001")
    for part in path.glob("run-0000/*/00000-*"):
        part.unlink()
    with mf.open_dump(path) as dump:
        assert_names(shown(dump).text, "run-0000", "run-0001")


def test_a_dump_that_is_gone_is_told(path: Path, tmp_path: Path) -> None:
    dump = mf.open_dump(path)
    path.rename(tmp_path / "elsewhere")
    content = shown(dump)
    assert_names(content.text, "OpenDump", tmp_path / "d" / "run-0000")


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    values = {f"{EVIL}:output": Given(random(1, 2, 4, 8), Layout((Dim("s"), Dim("b"), Dim(EVIL))))}
    dumps.write(tmp_path / "d", values)
    manifest = tmp_path / "d" / "run-0000" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["framework"] = content["created"] = EVIL
    manifest.write_bytes(dumps.sealed_again(json.dumps(content).encode()))
    with mf.open_dump(tmp_path / "d") as dump:
        for one in (dump, dump[f"{EVIL}:output"]):
            found = shown(one)
            assert "script" not in found.tags
            assert EVIL in found.text


def test_a_layout_that_is_damaged_is_told(path: Path) -> None:
    manifest = path / "run-0000" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["sites"][1]["layout"] = {"dims": [{"name": "h", "cuts": [{"axis": "tp", "order": EVIL}]}]}
    manifest.write_bytes(dumps.sealed_again(json.dumps(content).encode()))
    with mf.open_dump(path) as dump:
        assert repr(EVIL) in shown(dump).text


def test_a_dump_of_many_sites_is_bounded(tmp_path: Path) -> None:
    names = [f"decoder.layers.0.m{chr(97 + n // 26)}{chr(97 + n % 26)}:output" for n in range(200)]
    dumps.write(tmp_path / "d", {n: Given(random(1, 1, 1, 1), REPLICATED) for n in names})
    with mf.open_dump(tmp_path / "d") as dump:
        content = shown(dump)
    assert_names(content.text, 200 - MAX_TABLE_ROWS, "dump.sites")


def test_an_array_is_drawn(path: Path) -> None:
    with mf.open_dump(path) as dump:
        content = shown(dump[FIRST])
        assert content.pieces[0] == f"DumpArray · {FIRST}"
        assert_names(content.text, "[iteration 3, sample 2, token 4, 4h 8]", "float32", "768 B")
        assert_names(content.text, "3 iterations", "(0 to 20)")
        assert_names(content.text, "[s, b, 4h/tp]")
        assert content.tags["rect"] == 2
        assert "tp 0" in content.pieces
        assert "tp 1" in content.pieces
        assert "[sample 2, 4h 8]" in shown(dump[FIRST][1, :, 0]).text
        assert_names(shown(dump.parameter("decoder.layers.0.weight")).text, "[iteration 3, out 8, in 4]")


def test_an_array_of_a_dump_without_iterations_says_so(tmp_path: Path) -> None:
    dumps.write(tmp_path / "d", {FIRST: Given(random(0, 2, 4, 8))}, iterations=[])
    with mf.open_dump(tmp_path / "d") as dump:
        assert_names(
            shown(dump[FIRST]).text,
            f"DumpArray · {FIRST}",
            tmp_path / "d",
        )


# -- statistics ------------------------------------------------------------------------------------------


def test_statistics_show_each_tensor_as_it_was_last(tmp_path: Path) -> None:
    writers = measured.begin(tmp_path, sites=["a", EVIL])
    writers.write(0, [measured.row(0, "a", 0, rms=1.0), measured.row(0, EVIL, 1)])
    writers.write(7, [measured.row(7, "a", 0, rms=2.5), measured.row(7, EVIL, 1, nans=3, mean=None)])
    writers.close()
    with next(tmp_path.glob("*.jsonl")).open("a") as file:
        file.write('{"torn')
    content = shown(mf.open_statistics(tmp_path))
    assert "script" not in content.tags
    assert_names(content.text, "2 tensors", "2 iterations", "(0 to 7)")
    assert_names(content.text, "(0 to 7)")
    broken, good = content.rows[1:]
    assert broken[:2] == [EVIL, "7"]
    assert broken[3] == "–"
    assert broken[-1] == "3 NaN, 0 infinite"
    assert good[:3] == ["a", "7", "2.5"]
    assert content.colours[1] != content.colours[2], "what is broken is marked"


def test_statistics_of_many_tensors_are_bounded(tmp_path: Path) -> None:
    names = [f"m{n}" for n in range(500)]
    writers = measured.begin(tmp_path, sites=names)
    writers.write(0, measured.rows(0, names))
    writers.close()
    content = shown(mf.open_statistics(tmp_path))
    assert_names(content.text, 500 - MAX_TABLE_ROWS, "found.sites")


# -- comparisons -----------------------------------------------------------------------------------------


def compared(tmp_path: Path, wrong: float) -> Comparison:
    for name, extra in (("a", 0.0), ("b", wrong)):
        values = {FIRST: random(1, 2, 4, 8), SECOND: random(1, 2, 4, 8, seed=1)}
        values[SECOND][0, 1, 2, 3] += extra
        dumps.write(tmp_path / name, {n: Given(v, COLUMN) for n, v in values.items()})
    return compare(tmp_path / "a", tmp_path / "b")


def test_a_comparison_says_its_verdict(tmp_path: Path) -> None:
    content = shown(compared(tmp_path, 0.0))
    assert content.pieces[0] == "Comparison · equal"
    assert_names(content.text, "2 tensors")
    assert "first" not in content.text
    assert len(set(content.colours[1:])) == 1


def test_the_first_divergence_is_marked(tmp_path: Path) -> None:
    found = compared(tmp_path, 1.0)
    content = shown(found)
    assert content.pieces[0] == "Comparison · diverges"
    assert [r[0] for r in content.rows[1:]] == ["", "→"]
    assert content.rows[2][1] == SECOND
    assert content.colours[1] != content.colours[2]
    for words in found.summary():
        assert words.strip() in content.text, "nothing that the summary says is left out"


def rows(count: int, first: int) -> list[ComparedRow]:
    return [
        ComparedRow(
            f"{EVIL}.{n}", "value", 0, 1, 0.0, 1.0, 0.0, 1.0 if n >= first else 0.0, 0.5, n < first, None
        )
        for n in range(count)
    ]


def test_a_long_comparison_says_what_it_leaves_out() -> None:
    out = [ReplicaMismatch("A", EVIL, n, 0, (1,)) for n in range(300)]
    content = shown(Comparison(EVIL, "b", rows(5000, 3000), out, [EVIL], [EVIL]))
    assert "script" not in content.tags
    shown_sites, replicas = content.rows[: MAX_TABLE_ROWS + 1], content.rows[MAX_TABLE_ROWS + 1 :]
    assert [str(one) for one in out[:MAX_TABLE_ROWS]] == [text for (text,) in replicas]
    assert [r[1] for r in shown_sites if r[0] == "→"] == [f"{EVIL}.3000"]
    assert_names(content.text, MAX_TABLE_ROWS, "5,000")
    assert_names(content.text, f"{5000 - MAX_TABLE_ROWS:,}", "found.rows")
    assert_names(content.summaries, "300")
    assert_names(content.text, 300 - MAX_TABLE_ROWS, "found.replicas")


# -- layouts ---------------------------------------------------------------------------------------------


def test_a_layout_is_drawn_with_all_that_is_said_of_it() -> None:
    cuts = ((), (), (), (), (Cut("cp", "zigzag"),), (Cut("tp"),))
    many = Layout(tuple(Dim(f"a long name {n}", cut) for n, cut in enumerate(cuts)))
    html = many._repr_html_()
    content = Shown(html)
    assert many.describe({"tp": 2, "cp": 2}).replace(" ", "") in "".join(content.pieces).replace(" ", "")
    assert all(len(piece) <= 80 for piece in content.pieces), "no line is longer than the picture is wide"
    assert content.tags["rect"] > 4
    assert Shown(replicated("s", "b")._repr_html_()).tags["rect"] == 1
