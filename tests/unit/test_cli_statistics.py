"""`megatron-flex stats`: what it prints, for people and for programs, and its errors."""

import errno
import json
import os
from dataclasses import replace

import pytest

from tests.support.commands import Command
from tests.support.measured import SITES, begin, row, write
from tests.support.messages import assert_names


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


@pytest.fixture
def stats(tmp_path):
    """Two starts, the second one from iteration 30 on, with trouble in its last one; one torn line."""
    path = tmp_path / "stats"
    write(path, range(40))
    writers = begin(path)
    for n in range(30, 60):
        told = [row(n, site, order) for order, site in enumerate(SITES)]
        if n == 59:
            told[2] = replace(told[2], nans=3, infinities=1, rms=None)
        writers.write(n, told)
    writers.close()
    with (path / "statistics-0001.jsonl").open("a") as file:
        file.write('{"iteration":60,"si')
    return path


@pytest.mark.parametrize("width", [80, 140])
def test_ls_and_show_fit_the_terminal(command, stats, width):
    command.width(width)
    for words, values in (
        (["ls", "stats"], [*SITES, "dp=2 x tp=2", "59"]),
        (["show", "stats"], [*SITES, "0.3073", "1.229", "█"]),
        (
            ["show", "stats", "-s", "*fc1*", "--of", "kurtosis", "-i", "0:20:5"],
            [*(s for s in SITES if "fc1" in s), "kurtosis", "3.813", "0, 5, 10, 15"],
        ),
    ):
        done = command("stats", *words)
        assert (done.status, done.err) == (0, "")
        lines = [line for line in done.out.splitlines() if not line.startswith("note:")]
        assert max(map(len, lines)) <= width
        assert [value for value in values if value not in done.out] == []


def test_json_is_strict_and_has_every_value(command, stats):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    told = json.loads(command("stats", "show", "stats", "--json").out, parse_constant=refuse)
    assert list(told) == SITES
    for order, site in enumerate(SITES):
        want = [row(n, site, order).rms for n in range(60)]
        want[59] = None if order == 2 else want[59]
        one = told[site]
        assert (one["iterations"], one["rms"]) == (list(range(60)), want)
        there = [v for v in want if v is not None]
        assert (one["first"], one["last"]) == (want[0], want[-1])
        assert (one["min"], one["max"]) == (min(there), max(there))
        assert (one["nans"], one["infinities"]) == ((3, 1) if order == 2 else (0, 0))
    listed = json.loads(command("stats", "ls", "stats", "--json").out, parse_constant=refuse)
    assert (listed["tensors"], listed["iterations"], listed["incomplete"]) == (SITES, list(range(60)), 1)
    assert [s["axes"]["tp"] for s in listed["starts"]] == [2, 2]


def test_a_curve_of_equal_values_and_of_none(command, tmp_path):
    writers = begin(tmp_path / "flat")
    for n in range(3):
        writers.write(n, [row(n, "a:output", rms=2.0, kurtosis=None, histogram=())])
    writers.close()
    assert "2     2    2    2  ▁▁▁" in command("stats", "show", "flat").out
    assert "–     –    –    –" in command("stats", "show", "flat", "--of", "kurtosis").out


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["ls", "nowhere"], ["nowhere", os.strerror(errno.ENOENT)]),
        (["ls", "."], ["statistics-0000.jsonl"]),
        (["show", "stats", "--of", "norms"], ["--of", "norms", "norm"]),
        (["show", "stats", "-i", "70"], [70, "stats", 0, 59]),
        (["show", "stats", "-s", "encoder.*"], ["stats", "'encoder.*'"]),
    ],
)
def test_errors_are_one_line(command, stats, words, values):
    done = command("stats", *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("megatron-flex: ")
    assert done.err.count("\n") == 1
    assert_names(done.err, *values)


def test_curves_of_ascii_where_there_is_no_more(command, stats, monkeypatch):
    monkeypatch.setattr("megatron_flex.document.terminal.supports_unicode", lambda file: False)
    assert "  ##%*++==--...___\n" in command("stats", "show", "stats", "-s", SITES[0]).out
