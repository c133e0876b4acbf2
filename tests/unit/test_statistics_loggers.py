"""Statistics in the writers of a framework: real TensorBoard and W&B files, read back."""

import json
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import megatron_flex as mf
from megatron_flex.adapters import training_writers
from megatron_flex.errors import FlexWarning
from megatron_flex.statistics import Statistics, open_writers
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN
from megatron_flex.statistics.statistics_writers import LARGEST_FLOAT, LOGGED_STATISTICS
from tests.support.loggers import history
from tests.support.measured import SITES, header, row, rows
from tests.support.messages import assert_names, warns


def attached(path, first=False, **found):
    """Writers of a rank that has those of a framework."""
    found = SimpleNamespace(**{"tensorboard": None, "wandb": None, "every": 1, **found})
    return open_writers(Statistics(path, ["**"]), header(), first, lambda: found)


@pytest.fixture
def writer(tmp_path):
    pytest.importorskip("tensorboard")
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "tensorboard"))
    yield writer
    writer.close()


def events(writer):
    writer.flush()
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(writer.log_dir, size_guidance={"histograms": 0, "scalars": 0})
    return found.Reload()


@pytest.mark.parametrize("bare", [False, True])
def test_a_real_tensorboard_file_has_them_beside_the_frameworks_curves(tmp_path, writer, bare):
    told = writer
    if bare:  # a writer that has nothing but its own methods
        names = ("add_scalar", "add_histogram_raw")
        told = SimpleNamespace(**{name: getattr(writer, name) for name in names})
    writers = attached(tmp_path / "stats", tensorboard=told)
    assert writers.reads_statistics
    gradient = row(0, "a:output.grad", 9, nans=2)
    for n in range(3):
        writers.write(n, [*rows(n), gradient])
        writer.add_scalar("lm loss", 10.0 - n, n + 1)  # as Megatron counts
    writers.close()
    found = events(writer)
    scalars = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert [step for step, _ in scalars.pop("lm loss")] == [1, 2, 3]
    wanted = {f"flex/{name}/{s}" for name in [*SITES, gradient.site] for s in LOGGED_STATISTICS}
    assert set(scalars) == wanted | {f"flex/{gradient.site}/{s}" for s in ("norm", "nans")}
    for order, name in enumerate(SITES):
        for statistic in LOGGED_STATISTICS:
            values = [(n + 1, getattr(row(n, name, order), statistic)) for n in range(3)]
            assert scalars[f"flex/{name}/{statistic}"] == [(n, pytest.approx(v, rel=1e-6)) for n, v in values]
    assert scalars[f"flex/{gradient.site}/nans"] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert not (tmp_path / "stats").exists(), "this rank writes no file"


def test_a_tensorboard_histogram_has_every_value(tmp_path, writer):
    counts = [0] * (2 * BINS_PER_SIGN + 1)
    counts[BINS_PER_SIGN] = 5  # zeros
    counts[BINS_PER_SIGN + 1] = 2
    counts[BINS_PER_SIGN - 3] = 7
    counts[0] = 1  # beyond the least power of two
    given = row(4, count=18, nans=2, infinities=1, mean=0.25, norm=3.0, absmax=1e9, histogram=tuple(counts))
    writers = attached(tmp_path, tensorboard=writer)
    writers.write(4, [given])
    (event,) = events(writer).Histograms(f"flex/{given.site}")
    told = event.histogram_value
    assert event.step == 5
    assert (told.num, told.sum, told.sum_squares, told.min) == (15, 0.25 * 15, 9.0, -1e9)
    assert sum(told.bucket) == 15
    limits = list(told.bucket_limit)
    assert limits == sorted(set(limits))
    by_limit = {limit: n for limit, n in zip(limits, told.bucket, strict=True) if n}
    smallest = sys.float_info.min
    assert by_limit == {-(2.0**23): 1, -(2.0**-38): 7, smallest: 5, 2.0**-39: 2}
    assert max(limits) <= LARGEST_FLOAT


def test_only_the_steps_that_the_framework_logs(tmp_path):
    got = []
    writer = SimpleNamespace(
        add_scalar=lambda tag, value, step: got.append(step), add_histogram_raw=lambda *_, **__: None
    )
    writers = attached(tmp_path, tensorboard=writer, every=4)
    for n in range(9):
        writers.write(n, rows(n))
    assert sorted(set(got)) == [4, 8]


def test_what_a_writer_raises_is_a_warning_and_the_file_has_it(tmp_path):
    def fails(*_, **__):
        raise RuntimeError("away")

    broken = SimpleNamespace(add_scalar=fails, add_histogram_raw=fails)
    writers = attached(tmp_path, first=True, tensorboard=broken)
    with warns(FlexWarning, "tensorboard", "away"):
        writers.write(0, rows(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writers.write(1, rows(1))
        writers.write(2, rows(2))
    writers.close()
    assert mf.open_statistics(tmp_path).iterations == [0, 1, 2]


def test_no_writers_where_they_are_not_wanted(tmp_path):
    found = SimpleNamespace(tensorboard=object(), wandb=object(), every=1)
    writers = open_writers(Statistics(tmp_path, ["**"], writers=False), header(), False, lambda: found)
    assert not writers.reads_statistics
    writers.write(0, rows(0))


def test_megatrons_writers_are_found_when_they_are_there(monkeypatch):
    name = "megatron.training.global_vars"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert training_writers() == (None, None, 1)
    state = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, state)
    assert training_writers() == (None, None, 1)
    state._GLOBAL_TENSORBOARD_WRITER, state._GLOBAL_WANDB_WRITER = "a", "b"
    state._GLOBAL_ARGS = SimpleNamespace(tensorboard_log_interval=7)
    assert training_writers() == ("a", "b", 7)


def test_megatron_names_them_so():
    spec = find_spec("megatron")
    folders = [] if spec is None else [Path(p) / "training" for p in spec.submodule_search_locations or ()]
    path = next((f for f in folders if (f / "training.py").exists()), None)
    if path is None:
        pytest.skip("megatron.training is not installed: only the newest wheels have it")
    text = (path / "global_vars.py").read_text(encoding="utf-8")
    for name in ("_GLOBAL_TENSORBOARD_WRITER", "_GLOBAL_WANDB_WRITER", "_GLOBAL_ARGS"):
        assert f"\n{name} = None\n" in text
    training = (path / "training.py").read_text(encoding="utf-8")
    assert_names(training, "args.tensorboard_log_interval", "0")
    assert training.index("args.curr_iteration = iteration\n") < training.index("iteration += 1\n")


def test_a_real_wandb_run_has_one_row_of_each_step(tmp_path, monkeypatch):
    """As Megatron logs: several calls with the iteration's number, and ours of the step before them."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p", name="n"):
        writers = attached(tmp_path, wandb=wandb)
        wandb.log({"lm loss": 9.0}, 1)
        for n in range(3):  # the numbers of a step are there when the next one is over
            writers.write(n, rows(n)[:2])
            if n < 2:
                wandb.log({"lm loss": 8.0 - n}, n + 2)
                wandb.log({"learning-rate": 1.0}, n + 2)
    wandb.teardown()  # ends its process, which writes the file
    (path,) = tmp_path.glob("wandb/offline*/*.wandb")
    steps = {int(told["_step"]): told for told in history(path)}
    assert sorted(steps) == [1, 2, 3]
    for n, told in enumerate(steps.values()):
        assert float(told["lm loss"]) == 9.0 - n
        assert float(told[f"flex/{SITES[1]}/rms"]) == pytest.approx(row(n, SITES[1], 1).rms)
        assert told[f"flex/{SITES[0]}/histogram/_type"] == '"histogram"'
        values = json.loads(told[f"flex/{SITES[0]}/histogram/values"])
        assert sum(values) == row(n, SITES[0]).count
