"""The command line: what it prints, its errors and exit statuses, in a terminal and in a pipe."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.cli import main
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import COLUMN, NORM, SEQUENCE, WEIGHT, Given, random
from tests.support.messages import assert_names, raises

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "megatron_flex.cli"]
MESH = {"pp": 2, "dp": 2, "tp": 2}
TOKENS, SAMPLES = 8, 4
UNNAMED = Layout((Dim(),))
HEADS = Layout((Dim("s"), Dim("b"), Dim("n", (Cut("tp"),)), Dim("d")))


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def sites(count: int = 3) -> dict[str, Given]:
    """Four layers on two stages, `[iteration, sample, token, ...]`."""
    out = {}
    for layer in range(4):
        for n, (end, width, layout) in enumerate(((".mlp.linear_fc1", 8, COLUMN), ("", 4, SEQUENCE))):
            value, gradient = (
                random(count, SAMPLES, TOKENS, width, seed=100 * layer + 10 * n + g) for g in (0, 1)
            )
            out[f"decoder.layers.{layer}{end}"] = Given(value, layout, gradient, stage=layer // 2)
    return out


@pytest.fixture
def dump(tmp_path: Path, written: Path) -> Path:
    (tmp_path / "dump").symlink_to(written)
    return tmp_path / "dump"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dumps") / "dump"
    parameters = {
        "decoder.layers.0.mlp.linear_fc1.weight": Given(random(3, 8, 4), WEIGHT, random(3, 8, 4, seed=1)),
        "decoder.final_layernorm.weight": Given(random(3, 4), NORM, stage=1),
    }
    dumps.write(
        path,
        sites(),
        mesh=MESH,
        parameters=parameters,
        microbatches=2,
        iterations=[0, 10, 20],
        versions={"torch": "2.13.0"},
    )
    return path


@pytest.mark.parametrize("width", [80, 140])
def test_ls_and_show_fit_the_terminal(command, dump, width):
    command.width(width)
    for words, values in (
        (
            ["ls", "dump"],
            ["0, 10, 20", "decoder.layers.{0–3}.mlp.linear_fc1", "decoder.final_layernorm.weight"],
        ),
        (["ls", "dump", "--all"], ["pp=2 x dp=2 x tp=2", *sites()]),
        (
            ["show", "dump", "decoder.layers.1", "--gradients", "-i", "10,20"],
            ["decoder.layers.1", "256", "█"],
        ),
    ):
        done = command("dump", *words)
        assert (done.status, done.err) == (0, "")
        assert max(map(len, done.out.splitlines())) <= width
        assert [value for value in values if value not in done.out] == []


def test_ls_folds_experts_and_layers_and_leaves_out_names_that_a_dim_lacks(command, tmp_path):
    names = [f"decoder.layers.{n}.mlp.experts.local_experts.{e}.fc1.weight" for n in (1, 3) for e in range(4)]
    parameters = {name: Given(random(1, 8, 4), WEIGHT) for name in names}
    parameters["decoder.layers.3.mlp.experts.local_experts.4.fc1.weight"] = Given(random(1, 8, 4), WEIGHT)
    parameters["decoder.final_layernorm.weight"] = Given(random(1, 4), UNNAMED)
    dumps.write(tmp_path / "dump", {}, mesh=MESH, parameters=parameters, microbatches=1, iterations=[0])
    command.width(140)
    out = command("dump", "ls", tmp_path / "dump").out
    rows = [line.split()[0] for line in out.splitlines() if "local_experts" in line]
    path = "mlp.experts.local_experts"
    assert rows == [
        f"decoder.layers.1.{path}.{{0–3}}.fc1.weight",
        f"decoder.layers.3.{path}.{{0–4}}.fc1.weight",
    ]
    (norm,) = [line for line in out.splitlines() if line.startswith("decoder.final_layernorm")]
    assert "[4]" in norm


def test_help_of_patch_has_every_option(command):
    pytest.importorskip("typer")
    listed = command("patch", "--help").out.partition("Options:")[2]
    assert [o for o in ("--check", "--diff", "--apply", "--revert") if f"  {o} " not in listed] == []


def test_no_line_of_help_ends_within_a_name(command):
    command.width(60)
    names = ["sites", "view", "estimate", "compare", "align", "run", "two-layouts", "stats"]
    for words in ([], ["dump", "prune"], ["dump", "verify"], ["stats", "show"], *([name] for name in names)):
        shown = command(*words, "--help").out
        assert shown.startswith("Usage: megatron-flex")
        assert [line for line in shown.splitlines() if re.search(r"\w-$", line.rstrip())] == []
        assert "\N{NON-BREAKING HYPHEN}" not in shown


def test_json_of_ls_has_every_tensor(command, dump):
    told = json.loads(command("dump", "ls", dump, "--json").out)
    rows = {t["name"]: t for t in told["tensors"]}
    for name, given in sites().items():
        for one in (name, name + ".grad"):
            assert rows[one]["shape"] == [SAMPLES, TOKENS, given.value.shape[-1]]
            assert rows[one]["iterations"] == [0, 10, 20]
            assert rows[one]["nbytes"] == given.value.nbytes
    assert rows["decoder.layers.0.mlp.linear_fc1.weight.grad"]["nbytes"] == 3 * 8 * 4 * 4
    assert "decoder.final_layernorm.weight.grad" not in rows
    assert told["runs"][0]["whole"] == [0, 10, 20]
    assert told["runs"][0]["mesh"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2}


def test_show_tells_what_torch_computes(command, dump):
    told = json.loads(
        command("dump", "show", dump, "decoder.layers.2", "-g", "--iterations", "10:", "--json").out
    )
    given = sites()["decoder.layers.2"]
    assert list(told) == ["decoder.layers.2", "decoder.layers.2.grad"]
    for one, whole in zip(told.values(), (given.value, given.gradient), strict=True):
        value = whole[1:].double()
        assert one["count"] == value.numel()
        assert one["mean"] == pytest.approx(float(value.mean()))
        assert one["std"] == pytest.approx(float(value.std(correction=0)))
        assert one["rms"] == pytest.approx(float(value.square().mean().sqrt()))
        assert one["absmax"] == float(value.abs().max())
        assert sum(one["counts"]) + one["below"] + one["above"] == value.numel()


def test_calls_of_a_site_have_numbers(command, tmp_path):
    dumps.write(tmp_path / "twice", {"decoder.layers.0": Given(random(1, 2, 3, 4), calls=2)})
    names = [t["name"] for t in json.loads(command("dump", "ls", "twice", "--json").out)["tensors"]]
    assert names == ["decoder.layers.0#0", "decoder.layers.0#1"]
    first, second = (json.loads(command("dump", "show", "twice", name, "--json").out)[name] for name in names)
    assert second["absmax"] == 2 * first["absmax"] > 0


@pytest.fixture(scope="module")
def pointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose sites have points, as those of a run have."""
    path = tmp_path_factory.mktemp("pointed") / "run"
    given = {}
    for layer in (1, 11):
        for n, (end, width) in enumerate(((":input", 4), (":output", 4), (".mlp.linear_fc1:output", 8))):
            value, gradient = (
                random(2, SAMPLES, TOKENS, width, seed=layer + 20 * n + 100 * g) for g in (0, 1)
            )
            given[f"decoder.layers.{layer}{end}"] = Given(value, SEQUENCE, gradient)
    given["decoder.layers.1.self_attention.core_attention:q"] = Given(random(2, SAMPLES, TOKENS, 4, 2), HEADS)
    weight = {"decoder.layers.1.mlp.linear_fc1.weight": Given(random(2, 8, 4), WEIGHT)}
    dumps.write(path, given, mesh={"tp": 2}, parameters=weight, iterations=[0, 10])
    return path


@pytest.mark.parametrize(
    ("text", "names", "entries"),
    [
        ("decoder.layers.1", ["decoder.layers.1:output"], (...,)),
        ("layers.11", ["decoder.layers.11:output"], (...,)),
        ("1:input", ["decoder.layers.1:input"], (...,)),
        ("1.mlp.linear_fc1", ["decoder.layers.1.mlp.linear_fc1:output"], (...,)),
        ("core_attention", ["decoder.layers.1.self_attention.core_attention:q"], (...,)),
        ("linear_fc1.weight", ["decoder.layers.1.mlp.linear_fc1.weight"], (...,)),
        ("decoder.layers.*", ["decoder.layers.1:output", "decoder.layers.11:output"], (...,)),
        ("decoder.layers.1:*", ["decoder.layers.1:input", "decoder.layers.1:output"], (...,)),
        ("decoder.layers.1.grad", ["decoder.layers.1:output.grad"], (...,)),
        ("decoder.layers.1@gradient", ["decoder.layers.1:output.grad"], (...,)),
        ("decoder.layers.1@positions=-1", ["decoder.layers.1:output"], (..., [-1], slice(None))),
        ("decoder.layers.*@samples=1:3@neurons=0,2", ["decoder.layers.1:output", "decoder.layers.11:output"],
         (slice(None), slice(1, 3), slice(None), [0, 2])),
        ("core_attention@heads=2", ["decoder.layers.1.self_attention.core_attention:q"],
         (..., [2], slice(None))),
    ],
)  # fmt: skip
def test_show_takes_what_python_takes(command, pointed, text, names, entries):
    told = json.loads(command("dump", "show", pointed, text, "--json").out)
    assert list(told) == names
    opened = mf.open_dump(pointed)
    for name, one in told.items():
        array = opened.parameter(name) if name.endswith("weight") else opened[name]
        value = array[entries].torch().double()
        assert one["count"] == value.numel()
        assert one["mean"] == pytest.approx(float(value.mean()))
    if len(names) == 1 and "@" not in text and not text.endswith("weight"):
        assert opened[text].name == opened[names[0]].name or torch.equal(
            opened[text].torch(), opened[names[0]].torch()
        )


def test_a_pattern_shows_a_row_for_each(command, pointed):
    done = command("dump", "show", pointed, "decoder.layers.*@positions=-1")
    rows = [line.split()[0] for line in done.out.splitlines()]
    assert rows == ["site", "decoder.layers.1:output", "decoder.layers.11:output"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("mlp.linear_fc1", [f"decoder.layers.{n}.mlp.linear_fc1:output" for n in (1, 11)]),
        ("decoder.layers.2", ["decoder.layers", 1, 11, "`dump ls`"]),
        ("decoder.layers.1@heads=0", ["decoder.layers.1:output", "iteration, sample, token, h"]),
        ("decoder.layers.1@positions=8", [8, "'token'"]),
        ("decoder.layers.1@mean=s", ["decoder.layers.1@mean=s"]),
        ("decoder.layers.1@position=1", ["decoder.layers.1@position=1", "'position=1'", "positions"]),
        ("decoder.layers.1:input.grad.grad", ["'decoder.layers.1:input.grad.grad'"]),
    ],
)
def test_what_show_cannot_find_is_one_line(command, pointed, text, values):
    done = command("dump", "show", pointed, text)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert_names(done.err, *values)


def test_names_are_whole_at_any_width(command, dump, pointed):
    for width in (40, 60, 80, 100):
        command.width(width)
        for words, names in (
            (["dump", "ls", dump, "--all"], list(sites())),
            (["compare", dump, dump, "--rows", "200"], list(sites())),
            (["dump", "show", pointed, "decoder.layers.*:*"], ["decoder.layers.11:output"]),
        ):
            lines = command(*words).out.splitlines()
            assert all(any(name in line.split() for line in lines) for name in names), (width, words)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["dump", "ls", "nowhere"], ["nowhere", os.strerror(errno.ENOENT)]),
        (["dump", "ls", "."], ["run-0000"]),
        (["dump", "ls", "dump/run-0000"], ["dump/run-0000", "dump"]),
        (["dump", "show", "dump", "decoder.layer.1"], ["decoder.layer.1", "decoder.layers.1"]),
        (["dump", "show", "dump", "decoder.layers.1", "-i", "7"], [7, 0, 20]),
        (["dump", "show", "dump", "decoder.layers.1", "-i", "x"], ["'x'"]),
        (["dump", "show", "dump", "decoder.layers.1", "-i", "30:"], ["30:"]),
        (["dump", "export", "dump", "out", "-s", "encoder.*"], ["'encoder.*'"]),
        (["dump", "export", "dump", "out", "-f", "hdf5"], ["'hdf5'", "safetensors", "zarr", "datasets"]),
        (["dump", "prune", "dump", "--keep-every", "0"], ["keep-every", 0]),
        (["estimate"], ["--config", "--"]),
        (["compare", "dump", "dump", "-t", "x"], ["--tolerance", "x"]),
    ],
)  # fmt: skip
def test_errors_are_one_line(command, dump, words, values):
    done = command(*words)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("megatron-flex: ")
    assert done.err.count("\n") == 1
    assert_names(done.err, *values)


def test_what_is_missing_is_said_in_one_line(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert "\n" not in ended.value.code
    assert_names(ended.value.code, "megatron-flex", "typer", "pip install megatron-flex[cli]")


def test_the_package_imports_no_part_of_the_command_line():
    code = "import sys, megatron_flex.cli; print([m for m in ('typer', 'rich') if m in sys.modules])"
    assert _run([sys.executable, "-c", code]).stdout == "[]\n"


def test_the_entry_point_is_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"]["megatron-flex"] == "megatron_flex.cli:main"


def test_a_pipe_gets_plain_text_that_is_not_cut_whatever_its_encoding(dump):
    done = _run([*PYTHON, "dump", "ls", str(dump), "--all"], PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert all(name in done.stdout for name in sites())
    assert "decoder.layers.0.mlp.linear_fc1.weight.grad" not in done.stdout  # it is in a column of its own


def test_a_terminal_gets_colours_unless_it_wants_none(dump):
    words = [*PYTHON, "dump", "verify", str(dump)]
    with ThreadPoolExecutor() as both:
        coloured, plain = both.map(lambda more: _in_terminal(words, **more), ({}, {"NO_COLOR": "1"}))
    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in plain
    last, same = (re.sub(r"\x1b\[[0-9;?]*\w", "", text).split("\n")[-2] for text in (coloured, plain))
    assert last == same


def test_values_that_are_not_finite_are_counted(command, tmp_path):
    value = torch.tensor([float("nan"), float("inf"), 0.0, 1.0]).reshape(1, 1, 2, 2)
    dumps.write(tmp_path / "odd", {"decoder.layers.0": Given(value)})
    told = json.loads(command("dump", "show", "odd", "decoder.layers.0", "--json").out)["decoder.layers.0"]
    assert (told["nan"], told["infinite"], told["zeros"], told["mean"]) == (1, 1, 1, 0.5)
    assert_names(command("dump", "show", "odd", "decoder.layers.0").out, 1, 0.5)


def _environment(more: dict[str, str]) -> dict[str, str]:
    left_out = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    base = {k: v for k, v in os.environ.items() if k not in left_out}
    return {**base, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}


def _run(words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=ROOT, env=_environment(more)
    )


def _in_terminal(words: list[str], **more: str) -> str:
    mine, its = pty.openpty()
    with subprocess.Popen(
        words, stdin=its, stdout=its, stderr=its, cwd=ROOT, env=_environment(more)
    ) as process:
        os.close(its)
        out = b""
        try:
            while data := os.read(mine, 65536):
                out += data
        except OSError:
            pass  # the other end is closed: Linux tells it so
        os.close(mine)
    assert process.returncode == 0
    return out.decode()


def test_a_dump_that_has_begun_has_shapes_as_far_as_they_are_known(command, tmp_path):
    dumps.write(tmp_path / "new", {"decoder.layers.0": Given(random(0, 2, 3, 4))}, iterations=[])
    shown = command("dump", "ls", "new")
    assert (shown.status, shown.err) == (0, "")
    assert "decoder.layers.0  [s 2, b 3, h 4]" in shown.out
    checked = command("dump", "verify", "new")
    assert checked.status == 0
    assert json.loads(command("dump", "ls", "new", "--json").out)["runs"][0]["whole"] == []
    exported = command("dump", "export", "new", "out")
    assert exported.status == 2
    assert_names(exported.err, "new")


def test_sites_of_a_dump(command, dump):
    told = json.loads(command("sites", "--dump", "dump", "--json").out)
    assert [t["name"].partition(":")[0] for t in told] == list(sites())
    assert all(t["layout"] for t in told)
    shown = command("sites", "--dump", "dump").out
    assert [given for given in ("0-3 x 4", "mlp.linear_fc1", "[s/tp, b, h]") if given not in shown] == []


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), ["--dump"]),
        (("--dump", "dump", "--mesh", "tp=2"), ["--mesh", "--world-size"]),
        (("--dump", "dump", "--match", "decoder.layer.*"), ["decoder.layer.*", "decoder.layers.1"]),
        (("--dump", "dump", "--stage", "9"), [9]),
        (("--dump", "nowhere"), ["nowhere"]),
    ],
)
def test_sites_that_cannot_be_shown_are_told_in_one_line(command, dump, words, values):
    done = command("sites", *words)
    assert done.status == 2
    assert_names(done.err, *values)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["pretrain.py", "--lr", "1"], ["-m", "megatron_flex.launch", "pretrain.py", "--lr", "1"]),
        (
            ["--nproc-per-node", "8", "pretrain.py", "--flex-dump", "out"],
            ["--nproc-per-node", "8", "-m", "megatron_flex.launch", "pretrain.py", "--flex-dump", "out"],
        ),
        (["-m", "mine.train", "x"], ["-m", "megatron_flex.launch", "-m", "mine.train", "x"]),
        (
            ["--standalone", "--", "pretrain.py", "-m"],
            ["--standalone", "-m", "megatron_flex.launch", "pretrain.py", "-m"],
        ),
    ],
)
def test_the_runner_stands_behind_torchruns_options(words: list[str], command: list[str]) -> None:
    pytest.importorskip("typer")
    from megatron_flex.cli.app import torchrun_command

    assert torchrun_command(words) == [sys.executable, "-m", "torch.distributed.run", *command]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], ["megatron-flex run"]),
        (["--flex-dump", "out", "pretrain.py"], ["--flex-dump", "megatron-flex run"]),
        (["--no-python", "pretrain.py"], ["--no-python"]),
    ],
)
def test_what_leaves_no_place_for_the_runner_is_an_error(words: list[str], values: list[str]) -> None:
    pytest.importorskip("typer")
    from megatron_flex.cli.app import torchrun_command

    with raises(FlexError, *values):
        torchrun_command(words)
