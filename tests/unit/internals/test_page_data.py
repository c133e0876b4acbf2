"""The data of the page: what dumps and statistics have, within bounds; damage is reported."""

from __future__ import annotations

import base64
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_flex as mf
from megatron_flex import figures
from megatron_flex.compare import compare
from megatron_flex.dump.reader import open_damaged_dump
from megatron_flex.errors import DumpError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.page import dump_damage
from megatron_flex.page.data_pane import divergence_json, dump_source, statistics_source
from megatron_flex.page.dump_pictures import PageBounds
from megatron_flex.page.tensor_tables import (
    DAMAGED,
    INFINITIES,
    NANS,
    PARTLY,
    THERE,
    choose_evenly,
    quantise,
    shrink,
)
from tests.support import dumps, measured
from tests.support.dumps import COLUMN, NORM, SEQUENCE, SUMMED, WEIGHT, Given, random
from tests.support.messages import any_names, assert_names, raises

FIRST, SECOND = "decoder.layers.0:output", "decoder.layers.1:output"
NAMES = [FIRST, "decoder.layers.0.mlp:output", SECOND]
SCORES = Layout((Dim("b"), Dim("n", (Cut("tp"),)), Dim("s"), Dim("s")))
MESH = {"pp": 2, "tp": 2}
EVIL = "decoder.layers.0.</script><img src=x onerror=alert(1)>\u2028:output"


def sites(count: int = 3) -> dict[str, Given]:
    return {
        FIRST: Given(random(count, 4, 8, 16, seed=1), COLUMN, random(count, 4, 8, 16, seed=2)),
        SECOND: Given(random(count, 4, 8, 16, seed=3), SEQUENCE, stage=1),
    }


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    dumps.write(tmp_path / "dump", sites(), mesh=MESH, iterations=[0, 10, 20])
    return tmp_path / "dump"


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    """As the page's script reads it."""
    codes = np.frombuffer(base64.b64decode(packed["q"]), np.uint8).astype(np.float64)
    values = packed["lo"] + codes * (packed["hi"] - packed["lo"]) / 252
    values[codes == 255], values[codes == 254], values[codes == 253] = math.nan, math.inf, -math.inf
    return values.reshape(packed["shape"]) if "shape" in packed else values


class Shown:
    """A source as the page's script reads it, after a way through strict JSON."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = json.loads(json.dumps(content, allow_nan=False))
        self.names: list[str] = self.content["names"]
        self.iterations: list[int] = self.content["iterations"]
        self.notes = [n["text"] for n in self.content["notes"]]
        self.damage = [n["text"] for n in self.content["notes"] if n["kind"] == "damage"]

    def state(self, iteration: int, name: str) -> int:
        return self.content["state"][self._at(iteration, name)]

    def measure(self, which: str, iteration: int, name: str) -> float:
        value = self.content["measures"][which][self._at(iteration, name)]
        return 0.0 if value is None else value

    def trouble(self, iteration: int, name: str) -> str:
        at = self.iterations.index(iteration)
        texts = [
            self.content["texts"][k]
            for t, i, k in self.content["troubles"]
            if (self.names[t], i) == (name, at)
        ]
        return texts[0] if texts else ""

    def heat(self, iteration: int, name: str) -> dict[str, Any] | None:
        several = self.content["heats"].get(str(self.names.index(name)), [])
        return next((h for h in several if h["at"] == self.iterations.index(iteration)), None)

    def _at(self, iteration: int, name: str) -> int:
        return self.iterations.index(iteration) * len(self.names) + self.names.index(name)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def part(dump: Path, iteration: int, rank: int, run: int = 0) -> Path:
    (found,) = (dump / f"run-{run:04d}" / f"{iteration:010d}").glob(f"{rank:05d}-*.safetensors")
    return found


# -- what is shown is what was dumped --------------------------------------------------------------------


def test_numbers_and_heat_maps_are_those_of_the_dump(dump: Path) -> None:
    found = Shown(dump_source(dump, NAMES))
    assert found.names == [FIRST, FIRST + ".grad", SECOND]
    assert (found.content["kinds"], found.content["sites"]) == ([0, 1, 0], [0, 0, 2])
    assert (found.iterations, found.notes) == ([0, 10, 20], [])
    with mf.open_dump(dump) as opened:
        for name in found.names:
            whole = opened[name].torch().double()
            for at, iteration in enumerate(found.iterations):
                values = whole[at]
                assert found.state(iteration, name) == THERE
                assert found.measure("rms", iteration, name) == pytest.approx(rms(values))
                assert found.measure("absmax", iteration, name) == pytest.approx(float(values.abs().max()))
                heat = found.heat(iteration, name)
                assert heat is not None
                error = np.abs(unpacked(heat) - values[0].numpy())
                assert error.max() <= (heat["hi"] - heat["lo"]) / 504 * 1.001
                assert_names(heat["caption"], f"iteration {iteration}", "sample 0")


def test_histograms_hold_all_values(dump: Path) -> None:
    found = Shown(dump_source(dump, NAMES))
    histogram = found.content["histograms"]["0"]
    with mf.open_dump(dump) as opened:
        values = opened[FIRST].torch()
    assert histogram["at"] == [0, 1, 2]
    assert [sum(counts) for counts in histogram["counts"]] == [4 * 8 * 16] * 3
    edges = histogram["edges"]
    for low, high, count in zip(edges, edges[1:], histogram["counts"][0], strict=False):
        if 0 < low < high:
            assert count == int(((values[0] >= low) & (values[0] < high)).sum())
    assert histogram["counts"][0][0] > 0 or any(c[0] for c in histogram["counts"])


def test_what_is_nearest_to_zero_is_in_one_bin_without_the_zeros(tmp_path: Path) -> None:
    value = torch.cat([random(1, 1, 8, 250), torch.full((1, 1, 8, 1), 1e-9), torch.zeros(1, 1, 8, 9)], -1)
    for name, given in (("signed", value), ("magnitudes", value.abs())):
        dumps.write(tmp_path / name, {FIRST: Given(given)})
        histogram = Shown(dump_source(tmp_path / name, [FIRST])).content["histograms"]["0"]
        (counts,), edges, linear = histogram["counts"], histogram["edges"], histogram["linear"]
        assert histogram["zeros"] == [8 * 9]
        sizes = given[given != 0].abs()
        assert (sizes < linear).double().mean() >= 0.9 > (sizes < linear / 2).double().mean()
        assert sum(counts) == len(sizes)
        near = [-linear / 32, linear / 32] if name == "signed" else [0, linear / 32]
        assert [edge for edge in edges if abs(edge) <= linear / 32] == near
        nonzero = given[given != 0]
        for low, high, count in zip(edges, edges[1:], counts, strict=False):
            inside = (nonzero > low) & (nonzero <= high) if high <= 0 else (nonzero >= low) & (nonzero < high)
            assert count == int(inside.sum())


@pytest.mark.parametrize("sign", [1, -1])
def test_the_axis_of_a_histogram_has_zero_where_there_are_zeros(tmp_path: Path, sign: int) -> None:
    value = sign * torch.tensor([1.0, 1.5, 3.0, 0.0]).reshape(1, 1, 4, 1)
    for name, given, ends in (("zeros", value, [0, 4]), ("none", value[:, :, :3], [1, 4])):
        dumps.write(tmp_path / name, {FIRST: Given(given)})
        edges = Shown(dump_source(tmp_path / name, [FIRST])).content["histograms"]["0"]["edges"]
        assert sorted([abs(edges[0]), abs(edges[-1])]) == ends


def test_a_histogram_of_zeros_alone_has_no_values(tmp_path: Path) -> None:
    dumps.write(tmp_path / "d", {FIRST: Given(torch.zeros(1, 1, 8, 4))})
    histogram = Shown(dump_source(tmp_path / "d", [FIRST])).content["histograms"]["0"]
    assert histogram == {"at": [0], "edges": [-1, 1], "counts": [[0]], "zeros": [32], "linear": 1}


def test_parameters_and_their_gradients_have_norms(tmp_path: Path) -> None:
    parameters = {
        "decoder.layers.0.mlp.linear_fc1.weight": Given(
            random(2, 8, 4, seed=4), WEIGHT, random(2, 8, 4, seed=5)
        ),
        "decoder.final_layernorm.weight": Given(random(2, 8, seed=6), NORM),
    }
    dumps.write(tmp_path / "d", sites(2), mesh=MESH, parameters=parameters)
    found = Shown(dump_source(tmp_path / "d", NAMES))
    assert found.content["kinds"] == [0, 1, 0, 2, 3, 2]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for tensor, given in ((name, parameters[name].value), (name + ".grad", parameters[name].gradient)):
        assert given is not None
        assert found.measure("rms", 1, tensor) == pytest.approx(rms(given[1]))
        assert found.heat(1, tensor) is None


def test_names_with_markup_stay_names_and_every_number_is_strict_json(tmp_path: Path) -> None:
    value = random(1, 2, 8, 4)
    value[0, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf, 7.0])
    dumps.write(tmp_path / "d", {EVIL: Given(value)})
    found = Shown(dump_source(tmp_path / "d", [EVIL]))
    assert found.names == [EVIL]
    assert found.state(0, EVIL) == NANS + INFINITIES
    heat = found.heat(0, EVIL)
    assert heat is not None
    assert math.isfinite(heat["hi"])
    first = unpacked(heat)[0]
    assert math.isnan(first[0])
    assert first[1:3].tolist() == [math.inf, -math.inf]
    assert first[3] == pytest.approx(7, abs=0.1)
    good = value[value.isfinite()]
    assert found.measure("rms", 0, EVIL) == pytest.approx(rms(good))


def test_attention_patterns_are_those_of_the_dump(tmp_path: Path) -> None:
    probs = torch.softmax(random(1, 2, 8, 4, 8), -1)  # iteration, sample, query, head, key
    name = "decoder.layers.3.self_attention.core_attention:probs"
    dumps.write(tmp_path / "d", {name: Given(probs, SCORES)}, mesh={"tp": 2})
    with mf.open_dump(tmp_path / "d") as opened:
        assert opened[name].dims[:3] == ("iteration", "sample", "token")
    (one,) = Shown(dump_source(tmp_path / "d", [name])).content["attention"]
    assert (one["layer"], one["shape"], one["of"]) == (3, [4, 8, 8], [1, 1])
    error = np.abs(unpacked(one) - probs[0, 0].transpose(0, 1).numpy())
    assert error.max() <= (one["hi"] - one["lo"]) / 504 * 1.001
    few = Shown(dump_source(tmp_path / "d", [name], bounds=PageBounds(side=4)))
    assert few.content["attention"][0]["shape"] == [4, 4, 4]
    assert any_names(few.notes, 4)


def test_the_logit_lens_is_of_the_last_iteration_and_of_few_tokens(tmp_path: Path) -> None:
    parameters = {
        "decoder.final_layernorm.weight": Given(random(2, 16, seed=7), NORM),
        "output_layer.weight": Given(random(2, 12, 16, seed=8), WEIGHT),
    }
    dumps.write(tmp_path / "d", sites(2), mesh=MESH, parameters=parameters)
    manifest = tmp_path / "d" / "run-0000" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["model"] = {"normalization": "RMSNorm", "layernorm_epsilon": 1e-5}
    manifest.write_bytes(dumps.sealed_again(json.dumps(content).encode()))
    found = Shown(dump_source(tmp_path / "d", NAMES, bounds=PageBounds(tokens=5, top=3)))
    lens = found.content["lens"]
    assert (lens["at"], lens["layers"], lens["tokens"]) == (1, [1, 2], list(range(5)))
    whole = figures.logit_lens(tmp_path / "d", 1, top=3)
    assert lens["ids"] == whole.ids[:, :5].tolist()
    assert np.allclose(lens["shares"], whole.probabilities[:, :5], rtol=1e-2)
    assert any_names(found.notes, 5)


def test_what_a_dump_lacks_is_said_with_what_to_dump(dump: Path) -> None:
    found = dump_source(dump, NAMES)
    assert "core_attention:probs" in found["lacks"]["attention"]
    assert_names(found["lacks"]["lens"], "flex.interp.run_with_cache")
    assert found["lens"] is None


# -- bounds ----------------------------------------------------------------------------------------------


def test_iterations_tensors_and_heat_maps_stay_within_bounds(dump: Path) -> None:
    bounds = PageBounds(tensors=2, iterations=2, heats=2 * 32 * 32)
    found = Shown(dump_source(dump, NAMES, bounds=bounds))
    assert (found.iterations, found.names) == ([0, 20], [FIRST, SECOND])
    assert [len(several) for several in found.content["heats"].values()] == [1, 1]
    assert sum(any_names([note], "2 of 3") for note in found.notes) == 2, "iterations and tensors"
    assert any_names(found.notes, 20), "the iteration of the heat maps"


def test_heat_maps_are_means_over_blocks_of_at_most_128(tmp_path: Path) -> None:
    value = random(1, 1, 130, 300)
    dumps.write(tmp_path / "d", {FIRST: Given(value)})
    found = Shown(dump_source(tmp_path / "d", [FIRST]))
    heat = found.heat(0, FIRST)
    assert heat is not None
    assert (heat["shape"], heat["of"], heat["mean"]) == ([65, 100], [2, 3], True)
    assert len(base64.b64decode(heat["q"])) <= 128 * 128
    wanted = value[0, 0].abs().reshape(65, 2, 100, 3).mean((1, 3)).numpy()
    assert np.abs(unpacked(heat) - wanted).max() <= (heat["hi"] - heat["lo"]) / 504 * 1.001
    assert any_names(found.notes, "128 x 128")


def test_no_more_values_are_read_than_allowed(tmp_path: Path) -> None:
    value = random(1, 8, 64, 64)
    dumps.write(tmp_path / "d", {FIRST: Given(value)})
    found = Shown(dump_source(tmp_path / "d", [FIRST], bounds=PageBounds(values=1 << 12)))
    assert sum(found.content["histograms"]["0"]["counts"][0]) == 1 << 12
    assert found.measure("rms", 0, FIRST) == pytest.approx(rms(value[0, 0]))
    assert any_names(found.notes, "1 of 1")


@pytest.mark.parametrize(("count", "most"), [(5, 9), (100, 7), (3, 1), (4, 2)])
def test_few_of_many_have_both_ends(count: int, most: int) -> None:
    found = choose_evenly(range(count), most)
    assert len(found) == min(count, most)
    assert found == sorted(set(found))
    assert found[-1] == count - 1
    assert most < 2 or found[0] == 0


def test_blocks_of_an_uneven_table_are_means_too() -> None:
    table, block = shrink(np.arange(35.0).reshape(1, 5, 7), (2, 3))
    assert block == (3, 3)
    assert table.tolist() == [[[8.0, 11.0, 13.0], [25.5, 28.5, 30.5]]]


@pytest.mark.parametrize("values", [[[0.0, 0.0]], [[math.nan, math.inf]], [[-3e38, 3e38]], [[2.5, -1.0]]])
def test_quantised_values_come_back(values: list[list[float]]) -> None:
    packed = quantise(np.array(values))
    back = unpacked(packed)
    bound = (packed["hi"] - packed["lo"]) / 504 * 1.001
    assert np.array_equal(np.isfinite(back), np.isfinite(values[0]))
    good = np.isfinite(values[0])
    assert np.all(np.abs(back[good] - np.array(values[0])[good]) <= bound)


# -- damage ----------------------------------------------------------------------------------------------


def lose(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def spoil_header(path: Path) -> None:
    flip(path, 100)


def spoil_values(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [lose, truncate, spoil_header], ids=["missing", "truncated", "header"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_file_takes_only_what_was_in_it(dump: Path, harm: Any, rank: int) -> None:
    harm(part(dump, 10, rank))
    found = Shown(dump_source(dump, NAMES))
    (text,) = found.damage
    assert_names(text, rank)
    assert FIRST in text
    assert str(dump) not in text
    assert found.iterations == [0, 10, 20]
    for name in (FIRST, FIRST + ".grad"):
        assert [found.state(i, name) for i in (0, 10, 20)] == [THERE, DAMAGED, THERE]
        assert found.heat(10, name) is None
        assert_names(found.trouble(10, name), name, "iteration 10", f"tp={rank}")
    assert [found.state(i, SECOND) for i in (0, 10, 20)] == [THERE] * 3
    heat = found.heat(10, SECOND)
    assert heat is not None
    assert (
        np.abs(unpacked(heat) - sites()[SECOND].value[1, 0].numpy()).max() <= (heat["hi"] - heat["lo"]) / 500
    )


def test_a_wrong_checksum_is_told_and_the_value_not_shown(dump: Path) -> None:
    spoil_values(part(dump, 20, 3))
    found = Shown(dump_source(dump, NAMES))
    (text,) = found.damage
    assert_names(text, 3, 20, SECOND)
    assert found.state(20, SECOND) == DAMAGED
    assert found.trouble(20, SECOND)
    assert not found.trouble(20, FIRST)
    assert found.state(20, FIRST) == THERE


def test_a_rank_that_never_wrote(tmp_path: Path) -> None:
    dumps.write(tmp_path / "d", sites(), mesh=MESH, absent=[3])
    with raises(DumpError, FIRST, tmp_path / "d"):
        mf.open_dump(tmp_path / "d")[FIRST].torch()
    found = Shown(dump_source(tmp_path / "d", NAMES))
    assert len(found.damage) == 3
    for text in found.damage:
        assert_names(text, 3)
    assert [found.state(i, FIRST) for i in found.iterations] == [THERE] * 3
    assert found.measure("rms", 2, FIRST) == pytest.approx(rms(sites()[FIRST].value[2]))
    assert SECOND in found.names
    assert [found.state(i, SECOND) for i in found.iterations] == [DAMAGED] * 3


def test_what_one_rank_had_alone_is_lost_with_it(tmp_path: Path) -> None:
    given = {FIRST: Given(random(2, 4, 8, 16)), SECOND: Given(random(2, 4, 8, 16), stage=1)}
    dumps.write(tmp_path / "d", given, mesh=MESH)
    with mf.open_dump(tmp_path / "d") as whole:
        written = whole.stored_iteration((1, 0))
        (rank,) = [
            r for r in (0, 1) if whole.entries(written, FIRST, "value", 0, 0)[0][3] == written.run.coords[r]
        ]
    lose(part(tmp_path / "d", 1, rank))
    found = Shown(dump_source(tmp_path / "d", NAMES))
    assert [found.state(i, FIRST) for i in (0, 1)] == [THERE, DAMAGED]
    assert_names(found.trouble(1, FIRST), FIRST, "iteration 1")
    assert [found.state(i, SECOND) for i in (0, 1)] == [THERE, THERE]


def test_samples_of_a_replica_that_is_gone_are_left_out(tmp_path: Path) -> None:
    value = random(1, 4, 8, 16)
    dumps.write(tmp_path / "d", {FIRST: Given(value, SUMMED)}, mesh={"dp": 2}, absent=[1])
    found = Shown(dump_source(tmp_path / "d", NAMES))
    assert found.state(0, FIRST) == PARTLY
    assert_names(found.trouble(0, FIRST), FIRST)
    assert sum(found.content["histograms"]["0"]["counts"][0]) == 2 * 8 * 16
    heat = found.heat(0, FIRST)
    assert heat is not None
    assert np.abs(unpacked(heat) - value[0, 0].numpy()).max() <= (heat["hi"] - heat["lo"]) / 500


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', "\x00\xff"])
def test_a_manifest_that_cannot_be_read_of_one_of_two_runs(dump: Path, text: str) -> None:
    dumps.write(dump, sites(2), mesh=MESH, iterations=[30, 40])
    (dump / "run-0000" / "manifest.json").write_text(text)
    with raises(DumpError, dump / "run-0000" / "manifest.json"):
        mf.open_dump(dump)
    found = Shown(dump_source(dump, NAMES))
    assert found.iterations == [30, 40]
    assert [found.state(i, SECOND) for i in (30, 40)] == [THERE] * 2
    assert any("run 0" in note and "manifest" in note for note in found.damage)


def test_no_manifest_at_all_still_says_so(dump: Path) -> None:
    (dump / "run-0000" / "manifest.json").unlink()
    found = Shown(dump_source(dump, NAMES, label="B"))
    assert (found.names, found.iterations, found.content["label"]) == ([], [], "B")
    assert found.damage


def test_a_dump_of_which_every_file_is_gone(dump: Path) -> None:
    for folder in (dump / "run-0000").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    found = Shown(dump_source(dump, NAMES))
    assert found.damage
    assert found.iterations == []


def test_no_dump_at_all_is_an_error(tmp_path: Path) -> None:
    with raises(DumpError, "run-0000", tmp_path):
        dump_source(tmp_path, NAMES)
    with raises(DumpError, tmp_path / "nowhere"):
        dump_source(tmp_path / "nowhere", NAMES)


def test_many_damaged_files_are_told_in_few_notes(tmp_path: Path) -> None:
    count = 30
    dumps.write(tmp_path / "d", sites(count), mesh=MESH)
    for iteration in range(count):
        lose(part(tmp_path / "d", iteration, 0))
    found = Shown(dump_source(tmp_path / "d", NAMES))
    assert len(found.damage) == 25
    assert "6 more" in found.damage[-1]


def test_a_large_dump_is_checked_by_its_names(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_damage, "MAX_BYTES", 0)
    assert Shown(dump_source(dump, NAMES)).damage == []
    lose(part(dump, 10, 0))
    (said,) = Shown(dump_source(dump, NAMES)).damage
    assert_names(said, 0, 10)


def test_remains_of_a_whole_dump_are_the_dump(dump: Path) -> None:
    with mf.open_dump(dump) as whole, open_damaged_dump(dump) as rest:
        assert (rest.iterations, rest.sites, rest.order) == (whole.iterations, whole.sites, whole.order)
        for name in whole.sites:
            assert torch.equal(rest[name].torch(), whole[name].torch())


def test_what_another_run_has_whole_is_read_from_there(dump: Path) -> None:
    lose(part(dump, 10, 0))
    dumps.write(dump, sites(), mesh=MESH, iterations=[0, 10, 20])
    with open_damaged_dump(dump) as rest:
        assert torch.equal(rest[FIRST].torch(), sites()[FIRST].value)
    assert Shown(dump_source(dump, NAMES)).damage == []


# -- statistics and comparisons --------------------------------------------------------------------------


def test_statistics_show_numbers_and_say_what_they_lack(tmp_path: Path) -> None:
    writers = measured.begin(tmp_path / "s")
    for n in range(5):
        writers.write(n, measured.rows(n))
    writers.close()
    (path,) = (tmp_path / "s").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-3])
    stats = mf.open_statistics(tmp_path / "s")
    found = Shown(statistics_source(stats, list(stats.sites), bounds=PageBounds(iterations=3)))
    assert found.names == stats.sites
    assert found.iterations == choose_evenly(stats.iterations, 3)
    for name in found.names:
        series = stats[name]
        for at, iteration in enumerate(series.iterations):
            if iteration in found.iterations and math.isfinite(series.rms[at]):
                assert found.measure("rms", iteration, name) == pytest.approx(series.rms[at])
    assert found.damage
    assert "mf.Dump" in found.content["lacks"]["attention"]
    assert found.content["heats"] == {}


def compared(*rows: tuple[str, int, float, float]) -> Any:
    every = [SimpleNamespace(name=n, iteration=i, error=e, tolerance=t) for n, i, e, t in rows]
    first = next((r for r in every if not r.error <= r.tolerance), None)
    return SimpleNamespace(
        a="A's",
        b="B's",
        rows=every,
        first=first,
        verdict="diverges" if first else "not distinguishable from round-off",
        incomparable="",
        hints=["a hint"],
        notes=[],
    )


def test_a_comparison_marks_the_first_and_tells_what_is_no_number(tmp_path: Path) -> None:
    given = sites(1)
    dumps.write(tmp_path / "a", given, mesh=MESH)
    value = given[SECOND].value.clone()
    value[0, 1, 2, 3] += 5
    dumps.write(tmp_path / "b", {**given, SECOND: Given(value, SEQUENCE, stage=1)}, mesh={"pp": 2, "tp": 1})
    comparison = compare(tmp_path / "a", tmp_path / "b")
    found = divergence_json(comparison, NAMES)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["verdict"], found["first"]) == ("diverges", NAMES.index(SECOND))
    row = found["rows"][found["first_row"]]
    assert (row[0], found["names"][row[4]]) == (NAMES.index(SECOND), SECOND)
    assert row[2] > row[3]
    assert found["hints"] == list(comparison.hints)
    assert [found["names"][r[4]] for r in found["rows"]] == [r.name for r in comparison.rows]

    odd = divergence_json(compared((FIRST, 0, math.nan, 1e-5), (SECOND + ".grad", 0, math.inf, 1e-5)), NAMES)
    assert [(r[0], r[2], r[5]) for r in odd["rows"]] == [(0, None, "NaN"), (2, None, "inf")]
    assert odd["first_row"] == 0


def test_a_long_comparison_keeps_the_first_divergence() -> None:
    rows = [(f"site{n}", i, 1.0 if (n, i) == (37, 5) else 0.0, 0.1) for i in range(9) for n in range(50)]
    for most in (100, 20):
        found = divergence_json(compared(*rows), [f"site{n}" for n in range(50)], most=most)
        assert len(found["rows"]) <= most + 1
        assert found["first"] == 37
        assert found["rows"][found["first_row"]][:3] == [37, 5, 1.0]
        assert_names(found["notes"][0]["text"], 50)


def test_nothing_compared_is_said() -> None:
    found = divergence_json(compared(), NAMES)
    assert (found["rows"], found["first"]) == ([], None)
    assert_names(found["notes"][0]["text"], "A", "B")
