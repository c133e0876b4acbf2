"""Statistics on disk: what is written is read; killed runs, full and stalled disks, several starts."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, setrlimit

import pytest

import megatron_flex as mf
from megatron_flex.checksums import ZERO_CHECKSUM, seal_json
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.statistics import Statistics, open_writers
from megatron_flex.statistics.statistics_files import create_file
from megatron_flex.statistics.statistics_writers import MAX_QUEUED
from tests.support import measured
from tests.support.measured import SITES, begin, header, row, rows, write
from tests.support.messages import assert_names, raises, warns

ROOT = Path(__file__).parents[2]
COUNT = 64


def test_what_is_written_is_read(tmp_path):
    odd = [
        row(COUNT, "b.grad", 1, mean=None, kurtosis=None, nans=3, infinities=2),
        row(COUNT, "c", 2, histogram=()),
        row(COUNT, "d.weight.grad", 3, kind="parameter_gradient", histogram=(0,) * measured.BINS),
        row(COUNT, "é\n\"'", 4, count=2**53 + 1),
    ]
    wanted = [*(r for n in range(COUNT) for r in rows(n)), *odd]
    writers = begin(tmp_path / "new" / "folder")
    for n in range(COUNT):
        writers.write(n, rows(n))
    writers.write(COUNT, odd)
    writers.close()
    writers.close()
    found = mf.open_statistics(tmp_path / "new" / "folder")
    assert list(found.rows()) == wanted
    assert found.incomplete == 0
    assert found.iterations == list(range(COUNT + 1))
    assert found.headers == [header(every=1)]
    table = found.table()
    assert table["rms"] == [r.rms for r in wanted]
    assert found.pandas()["site"].tolist() == [r.site for r in wanted]


def test_lines_are_strict_json_whatever_a_number_is(tmp_path):
    writers = begin(tmp_path)
    writers.write(0, [row(0, mean=math.inf, std=math.nan)])
    writers.close()
    (path,) = tmp_path.iterdir()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["format"] == "megatron_flex statistics"
    assert (lines[1]["mean"], lines[1]["std"], lines[1]["rms"]) == (None, None, 1.0)
    series = mf.open_statistics(path)["decoder.layers.0"]
    assert math.isnan(series.mean[0])
    assert series.rms == [1.0]


def test_sites_have_their_names_and_those_of_their_modules(tmp_path):
    writers = begin(tmp_path)
    names = ["a:output", "a:output.grad", "b:input", "b:partial", "c:mid"]
    for n in (0, 5):
        writers.write(n, [row(n, name, order) for order, name in enumerate(names)][: 5 - n // 5])
    writers.close()
    found = mf.open_statistics(tmp_path)
    assert found.sites == names
    assert found["a"].site == "a:output"
    assert found["a.grad"].rms == [row(n, "a:output.grad", 1).rms for n in (0, 5)]
    assert found["c"].site == "c:mid"
    assert (found["c"].iterations, found["a"].iterations) == ([0], [0, 5])
    assert found["a"].histogram[1] == row(5, "a:output").histogram
    assert len(found["c"]) == 1
    for name, values in (("b", ("b:input", "b:partial")), ("a:outptu", ("a:outptu", "a:output"))):
        with raises(FlexError, *values):
            found[name]


def test_sites_that_are_wanted_are_read_alone(tmp_path):
    write(tmp_path, [0, 1])
    assert mf.open_statistics(tmp_path, "decoder.layers.1").sites == ["decoder.layers.1:output"]
    assert mf.open_statistics(tmp_path, ["*fc1"]).sites == [n for n in SITES if "fc1" in n]
    with raises(FlexError, tmp_path, "decoder.layer.1", "decoder.layers.1:output"):
        mf.open_statistics(tmp_path, "decoder.layer.1")


def test_later_starts_win_where_they_repeat_an_iteration(tmp_path):
    write(tmp_path, range(8))
    again = begin(tmp_path, SITES[:1])
    for n in range(4, 6):
        again.write(n, [row(n, SITES[0], 0, rms=100.0 + n)])
    again.close()
    found = mf.open_statistics(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "statistics-0000.jsonl",
        "statistics-0001.jsonl",
    ]
    assert found.iterations == list(range(8))
    whole = [row(n).rms for n in range(8)]
    assert found[SITES[0]].rms == [*whole[:4], 104.0, 105.0, *whole[6:]]
    assert found[SITES[1]].iterations == [0, 1, 2, 3, 6, 7], "an iteration is all from one start"
    assert len(found.headers) == 2
    only = mf.open_statistics(tmp_path / "statistics-0000.jsonl")
    assert only[SITES[0]].rms == whole


def test_an_iteration_that_a_killed_start_did_not_complete_is_read_from_the_start_before(tmp_path):
    write(tmp_path, range(4))
    again = begin(tmp_path)
    for n in (2, 3):
        again.write(n, [row(n, site, order, rms=100.0 + n) for order, site in enumerate(SITES)])
    again.close()
    file = tmp_path / "statistics-0001.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # in the last line of iteration 3
    found = mf.open_statistics(tmp_path)
    assert found[SITES[0]].rms == [row(0).rms, row(1).rms, 102.0, row(3).rms]
    (text,) = found.replaced
    assert_names(text, "iteration 2", "statistics-0000", "statistics-0001.jsonl")


def test_starts_at_one_time_have_files_of_their_own(tmp_path):
    together = threading.Barrier(8)

    def start(_):
        together.wait()
        return create_file(tmp_path, header())

    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(start, range(8)))
    for file in files:
        file.close()
    assert sorted(f.path.name for f in files) == [f"statistics-{n:04d}.jsonl" for n in range(8)]


def test_a_file_cut_anywhere_has_its_whole_lines(tmp_path):
    write(tmp_path / "all", [0, 1])
    (path,) = (tmp_path / "all").iterdir()
    data = path.read_bytes()
    ends = [n + 1 for n, c in enumerate(data) if c == ord("\n")]
    cut = tmp_path / "statistics-0000.jsonl"
    for size in {*range(0, len(data), 7), *ends, *(e - 1 for e in ends), *(e + 1 for e in ends[:-1])}:
        cut.write_bytes(data[:size])
        found = mf.open_statistics(tmp_path)
        whole = sum(end <= size for end in ends)
        assert len(list(found.rows())) == max(0, whole - 1)
        assert found.incomplete == (size not in ends)


def sealed(line):
    return seal_json(json.dumps({**line, "checksum": ZERO_CHECKSUM.decode()}).encode()).decode() + "\n"


def test_lines_that_are_no_rows_are_counted(tmp_path):
    write(tmp_path, [0])
    (path,) = tmp_path.iterdir()
    good = json.loads(path.read_text().splitlines()[1])
    bad = [{**good, "iteration": "1"}, {**good, "rms": "x"}, {**good, "kind": "x"}]
    bad += [{**good, "histogram": [10**9, 1]}, {**good, "histogram": [0.5, 1]}, {**good, "count": True}]
    with path.open("a") as file:
        file.writelines(map(sealed, bad))
        file.writelines(["[]\n", "1\n", "\x00" * 50 + "\n", json.dumps(good) + "\n"])
        file.write(sealed({**good, "iteration": 9}))
    with warns(FlexWarning, "statistics-0000.jsonl"):
        found = mf.open_statistics(tmp_path)
    assert found.incomplete == len(bad) + 4
    assert found.iterations == [0, 9]


def forked(work, *words):
    """Run in a process of its own, and return its exit status."""
    process = get_context("fork").Process(target=work, args=words)
    process.start()
    process.join(100)
    return process.exitcode


def _wait(writers):
    while writers._back._queue or writers._back._busy:
        time.sleep(0.001)


def _killed(path):
    writers = begin(path)
    for n in range(200):
        writers.write(n, rows(n))
    _wait(writers)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_what_it_had_written(tmp_path):
    assert forked(_killed, tmp_path) == -signal.SIGKILL
    found = mf.open_statistics(tmp_path)
    assert found.iterations == list(range(200))
    assert found.incomplete == 0
    assert next(found.rows()) == row(0)
    write(tmp_path, [3])
    assert len(mf.open_statistics(tmp_path).headers) == 2


LEFT = """
import sys
from pathlib import Path
from tests.support.measured import begin, rows
writers = begin(Path(sys.argv[1]))
for n in range(100):
    writers.write(n, rows(n))
"""


def test_a_run_that_ends_without_closing_leaves_everything(tmp_path):
    words = [sys.executable, "-c", LEFT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert mf.open_statistics(tmp_path).iterations == list(range(100))


def _full(path, told):
    def limit(size):
        setrlimit(RLIMIT_FSIZE, (size, RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writers = begin(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(30):
            if n in (10, 20):
                _wait(writers)
                limit(24_000 if n == 10 else RLIM_INFINITY)
            writers.write(n, rows(n))
        limit(RLIM_INFINITY)
        writers.close()
    told.write_text(json.dumps([writers.lost, [str(w.message) for w in caught]]))


def test_a_full_disk_is_told_and_what_follows_is_written(tmp_path):
    assert forked(_full, tmp_path / "it", tmp_path / "told") == 0
    lost, (first, last) = json.loads((tmp_path / "told").read_text())
    assert_names(first, "statistics-0000.jsonl", "File too large", 1)
    assert_names(last, "statistics-0000.jsonl", lost)
    found = mf.open_statistics(tmp_path / "it")
    there = Counter(r.iteration for r in found.rows())
    whole = sorted(n for n, count in there.items() if count == len(SITES))
    assert whole == [*range(20 - lost), *range(20, 30)]
    assert 0 < lost < 10
    assert found.incomplete == 1


class Broken:
    """A file that cannot be written to for a while."""

    def __init__(self, path: Path) -> None:
        self.path, self.lost, self.goes, self.got = path, 0, threading.Event(), []

    def write(self, rows):
        self.goes.wait()
        self.got += rows

    def close(self):
        pass


def test_a_disk_that_takes_nothing_holds_nobody_up_for_long(tmp_path, monkeypatch):
    broken = Broken(tmp_path / "statistics-0000.jsonl")
    monkeypatch.setattr("megatron_flex.statistics.statistics_writers.create_file", lambda *_: broken)
    monkeypatch.setattr(flex_config, "dump_seconds", 0.3)
    writers = begin(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(MAX_QUEUED + 4):
            writers.write(n, rows(n))
    assert writers.lost == 3, "one is being written, and so many wait"
    (told,) = caught
    assert issubclass(told.category, FlexWarning)
    assert_names(told.message, "0.3 s")
    with warns(FlexWarning, "statistics-0000.jsonl", MAX_QUEUED + 4):
        writers.close()
    broken.goes.set()


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    broken = Broken(tmp_path / "statistics-0000.jsonl")
    monkeypatch.setattr("megatron_flex.statistics.statistics_writers.create_file", lambda *_: broken)
    writers = begin(tmp_path)
    threading.Timer(0.3, broken.goes.set).start()
    for n in range(2 * MAX_QUEUED):
        writers.write(n, rows(n))
    writers.close()
    assert [r.iteration for r in broken.got] == [n for n in range(2 * MAX_QUEUED) for _ in SITES]
    assert writers.lost == 0


def test_pandas_writes_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    told = write(tmp_path / "s", range(3))
    mf.open_statistics(tmp_path / "s").pandas().to_parquet(tmp_path / "s.parquet")
    frame = pandas.read_parquet(tmp_path / "s.parquet")
    assert sorted(zip(frame.iteration, frame.site, frame.rms, strict=True)) == sorted(
        (r.iteration, r.site, r.rms) for r in told
    )
    assert [list(h) for h in frame.histogram] == [list(r.histogram) for r in told]


@pytest.mark.parametrize(
    "make",
    [lambda p: p.write_text(""), lambda p: p.symlink_to(p / "a")],
)
def test_where_nothing_can_be_written_is_an_error_at_once(tmp_path, make):
    make(tmp_path / "taken")
    with raises(FlexError, tmp_path / "taken"):
        begin(tmp_path / "taken")


def test_ranks_that_write_nothing_make_no_file(tmp_path):
    writers = open_writers(Statistics(tmp_path / "new", ["**"]), header(), False)
    assert not writers.reads_statistics
    writers.write(0, rows(0))
    writers.close()
    assert not (tmp_path / "new").exists()


def test_what_is_no_statistics_is_an_error(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with raises(FlexError, path):
            mf.open_statistics(path)
    path = tmp_path / "statistics-0000.jsonl"
    told = header().to_json()
    for other, values in (({**told, "version": 2}, (2, 1)), ({**told, "format": "x"}, ()), ({"a": 1}, ())):
        path.write_text(json.dumps(other) + "\n")
        with raises(FlexError, path.name, *values):
            mf.open_statistics(tmp_path)


def test_an_iteration_again_in_one_file_is_as_it_was_last(tmp_path):
    writers = begin(tmp_path)
    for rms in (1.0, 2.0):
        writers.write(7, [replace(row(7), rms=rms)])
    writers.close()
    assert mf.open_statistics(tmp_path)[SITES[0]].rms == [2.0]
