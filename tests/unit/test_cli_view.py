"""`megatron-flex view`: a page of whatever is named, and what cannot be shown in one line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.support import dumps, measured
from tests.support.commands import Command
from tests.support.dumps import COLUMN, Given, random
from tests.support.messages import assert_names
from tests.unit.test_page import Elements

SIZES = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "vocab-size": 100,
    "micro-batch-size": 2,
}
FLAGS = ["--bf16", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    for name, factor in (("one", 1.0), ("two", 2.0)):
        given = {
            f"decoder.layers.{n}": Given(random(2, 4, 8, 8, seed=n) * (factor if n else 1.0), COLUMN)
            for n in range(3)
        }
        dumps.write(tmp_path / name, given, mesh={"tp": 2}, iterations=[0, 10])
    measured.write(tmp_path / "measured", [0, 1])
    return Command(monkeypatch, capsys, tmp_path)


def read(path: Path) -> dict:
    return json.loads(Elements(path.read_text(encoding="utf-8")).scripts[0])


def test_a_dump(command: Command) -> None:
    done = command("view", "one", "--out", "it.html")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("it.html: 0.")
    told = read(command.folder / "it.html")
    assert told["title"] == "one"
    assert told["sites"]["state"] == [2, 2, 2]
    assert told["divergence"] is None


def test_two_dumps_of_one_name_are_told_apart_by_their_parents(command: Command) -> None:
    for run, dump in (("run-1", "one"), ("run-2", "two")):
        (command.folder / run).mkdir()
        (command.folder / run / "dump").symlink_to(command.folder / dump)
    assert command("view", "run-1/dump", "run-2/dump").status == 0
    told = read(command.folder / "page.html")
    assert [d["words"].partition(" ")[0] for d in told["data"]] == ["run-1/dump", "run-2/dump"]


def test_two_dumps_are_compared(command: Command) -> None:
    assert command("view", "one", "two").status == 0
    told = read(command.folder / "page.html")
    assert_names(told["title"], "one", "two")
    assert [d["label"] for d in told["data"]] == ["A", "B"]
    first = told["sites"]["name"][told["divergence"]["first"]]
    assert first.startswith("decoder.layers.1")
    assert command("view", "one", "two", "--no-compare").status == 0
    assert read(command.folder / "page.html")["divergence"] is None


def test_statistics(command: Command) -> None:
    assert command("view", "measured").status == 0
    assert read(command.folder / "page.html")["sites"]["name"] == list(measured.SITES)


@pytest.mark.parametrize("with_dump", [False, True])
def test_a_configuration(command: Command, with_dump: bool) -> None:
    pytest.importorskip("megatron.core")
    more = ["one"] if with_dump else []
    done = command("view", *more, "--mesh", "tp=2,pp=2,dp=2", "--", *FLAGS)
    assert (done.status, done.err) == (0, "")
    told = read(command.folder / "page.html")
    assert told["mesh"]["ranks"] == 8
    assert "decoder.layers.3.mlp.linear_fc2:output" in told["sites"]["name"]
    assert set(told["sites"]["stage"]) == {0, 1}
    assert len(told["data"]) == with_dump
    name = told["sites"]["name"].index("decoder.layers.3.mlp.linear_fc1:output")
    estimate = told["estimates"][told["sites"]["estimate"][name]]
    assert estimate["read"]["whole"] == 32 * 2 * 256 * 2
    assert estimate["edit"]["sent"][0][:2] == ["all_gather", "tp"]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["nowhere"], ["nowhere", ".yaml", ".yml", ".json"]),
        (["."], ["run-0000"]),
        (["one", "--mesh", "tp=2"], ["--mesh", "--world-size"]),
        (["one", "--match", "x"], ["--match"]),
        (["one", "two", "one"], [3, 2]),
        (["measured", "measured", "one"], [1, 2]),
        (["one", "--most-megabytes", "0.01"], [0.01]),
        (["one", "--out", "no/where.html"], ["no/where.html", os.strerror(errno.ENOENT)]),
    ],
)
def test_what_cannot_be_shown_is_told_in_one_line(
    command: Command, words: list[str], values: list[object]
) -> None:
    done = command("view", *words)
    assert done.status == 2
    assert_names(done.err, *values)
    assert done.err.count("\n") == 1
