"""The runner and `install()` on Megatron's own `pretrain()`: two tensor parallel ranks, flags."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_flex import open_dump
from tests.support.dumps import Given, random, write
from tests.support.launching import MODEL, SCRIPT, Done, Server, has_pretrain, torchrun
from tests.support.loggers import history
from tests.support.messages import assert_names

pytestmark = pytest.mark.skipif(not has_pretrain(), reason="needs megatron.training of 0.19 or newer")
NORM, FC1 = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.weight"
ODD = ["--flexible=--flex-dump d", "--words", "a b", "", "$HOME", "'\"", "é\n", "*", "flex-estimate"]
BOOM = """
calls = []

def boom(module, inputs, save_ctx, modules):
    calls.append(1)
    if len(calls) == 4:
        raise RuntimeError("too hot")
    return inputs * 0.5

def few(inputs):
    return inputs
"""


ACTOR = """
import os, sys
from megatron_flex.launch import install
assert sys.argv[1:] == ["-f", "kernel.json"]
os.environ["MEGATRON_FLEX_FLAGS"] = "--flex-config more.yaml"
install("hooks.yaml")
assert sys.argv[1:] == ["-f", "kernel.json"]
sys.argv[1:] = {argv!r}  # Megatron reads its own flags there
from tests.support.scripts import pretraining
pretraining.main()
"""


def command(out: Path, *words: object) -> list[str]:
    out.mkdir(exist_ok=True)
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--out", out, *words]
    return [str(word) for word in (SCRIPT, *flags)]


def made(out: Path) -> list[dict]:
    return [torch.load(out / f"made-{rank}.pt") for rank in range(2)]


def assert_same(out: Path, other: Path) -> None:
    """The losses of both runs, evaluation's too, and their weights have the same bits."""
    for one, two in zip(made(out), made(other), strict=True):
        assert len(one["losses"]) == 3 * 2 + 3 * 2  # iterations, and evaluations: at 2, and of both sets
        assert one["losses"] == two["losses"]
        assert one["weights"].keys() == two["weights"].keys()
        assert all(torch.equal(w, two["weights"][n]) for n, w in one["weights"].items())


@pytest.fixture(scope="module")
def plain(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without the runner, which saves a checkpoint."""
    out = tmp_path_factory.mktemp("plain")
    saving = ["--save", out / "saved", "--ckpt-format", "torch", "--save-interval", "3"]
    done = server(2, out, *command(out, *saving), plain=True)
    assert done.status == [0, 0], done.err[0]
    return out


def test_flags_absent(plain: Path, tmp_path: Path):
    """By torchrun: the script sees what it would see without us, and computes the same."""
    words = [*command(tmp_path), *ODD]
    script, *rest = words
    done = torchrun(2, tmp_path, "-m", "megatron_flex.launch", script, "--flex-cpu", *rest)
    assert done.status == [0], done.err[0]
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen["argv"] == words
        assert seen["words"] == ODD[2:]
        assert (seen["name"], seen["file"], seen["path"]) == ("__main__", script, str(SCRIPT.parent))
    assert done.told == []
    assert_same(plain, tmp_path)


def test_a_machine_without_a_gpu(tmp_path: Path):
    """The error of Megatron or torch names no remedy; the runner names the flags."""
    script, *rest = command(tmp_path)
    done = torchrun(2, tmp_path, "-m", "megatron_flex.launch", script, "--flex-estimate", *rest)
    assert done.status != [0]
    assert_names(done.err[0], "--flex-cpu", "--transformer-impl", "gloo")


def test_reading_only(server: Server, plain: Path, tmp_path: Path):
    """Dumps and statistics change no bit, and evaluation is in neither."""
    ours = ["--flex-sites", "decoder.layers.*", "decoder.layers.*.mlp.linear_fc1", "--flex-verify"]
    ours += ["--flex-dump", tmp_path / "dump", "--flex-stats", tmp_path / "stats", "--flex-cpu"]
    done = server(2, tmp_path, *command(tmp_path), *ours)
    assert done.status == [0, 0], done.err[0]
    begun, verified, written, named = (line.removeprefix("megatron-flex: ") for line in done.told)
    assert_names(begun, 4, f"{tmp_path}/dump", f"{tmp_path}/stats", "--flex-verify", "N is N + 1")
    assert_names(verified, "--flex-verify", 1)
    assert_names(written, f"{tmp_path}/dump", 3, "KiB", 2, 0)
    assert_names(named, "flex-report.txt")
    head, *lines = (tmp_path / "flex-report.txt").read_text().splitlines()
    assert re.match(r"# 20.* UTC: ", head)
    assert lines == [begun, verified, written]
    assert_same(plain, tmp_path)
    with open_dump(tmp_path / "dump") as dump:
        assert list(dump.iterations) == [0, 1, 2]
        assert tuple(dump["decoder.layers.1:output"].shape[:2]) == (3, 4)  # iterations, samples
    assert any((tmp_path / "stats").iterdir())


@pytest.mark.parametrize(
    "leaves",
    [[], ["--eval-iters", "0", "--eval-interval", "100"], ["--exit-interval", "2"]],
    ids=["at the end", "without evaluation", "by sys.exit()"],
)
def test_wandb_has_the_last_iteration(server: Server, tmp_path: Path, leaves: list[str]):
    """Megatron's own shutdown closes W&B before `pretrain()` returns, or in `train()` before it exits."""
    pytest.importorskip("wandb")
    theirs = ["--tensorboard-dir", tmp_path / "board", "--wandb-project", "p", "--wandb-exp-name", "n"]
    theirs += ["--wandb-save-dir", tmp_path, *leaves]
    ours = ["--flex-cpu", "--flex-stats", tmp_path / "stats", "--flex-sites", "decoder.layers.*"]
    done = server(2, tmp_path, *command(tmp_path, *theirs), *ours)
    assert done.status == [0, 0], done.err[1]
    (file,) = tmp_path.glob("wandb/offline*/*.wandb")
    steps = {int(told["_step"]): told for told in history(file) if any(n.startswith("flex/") for n in told)}
    assert sorted(steps) == ([1, 2] if "--exit-interval" in leaves else [1, 2, 3])
    assert all("flex/decoder.layers.1:output/rms" in told and "lm loss" in told for told in steps.values())


def test_without_a_command_line(server: Server, plain: Path, tmp_path: Path):
    """In a notebook or an actor `sys.argv` is another program's: YAML and the variable are enough."""
    (tmp_path / "hooks.yaml").write_text("dumps: [{path: d, iterations: 0:2}]\n")
    (tmp_path / "more.yaml").write_text("sites: [decoder.layers.*]\n")
    (tmp_path / "actor.py").write_text(ACTOR.format(argv=command(tmp_path)[1:]))
    done = server(2, tmp_path, tmp_path / "actor.py", "-f", "kernel.json", plain=True)
    assert done.status == [0, 0], done.err[0]
    assert_same(plain, tmp_path)
    with open_dump(tmp_path / "d") as dump:
        assert list(dump.iterations) == [0, 1]


def test_after_the_checkpoint_and_a_function_that_raises(server: Server, plain: Path, tmp_path: Path):
    """What is dumped of the first iteration are the loaded weights; the second one fails, as told."""
    (tmp_path / "own.py").write_text(BOOM)
    loading = ["--load", plain / "saved", "--ckpt-format", "torch", "--train-iters", "9", "--finetune"]
    ours = ["--flex-cpu", "--flex-edit", "decoder.layers.1", "own.py:boom", "--flex-dump", tmp_path / "dump"]
    done = server(2, tmp_path, *command(tmp_path, *loading), *ours, "--flex-dump-parameters", NORM, FC1)
    assert done.status == [2, 2], done.err[0]
    begun, named, line = done.told
    assert_names(begun, 1, 2, tmp_path / "dump")
    assert "flex-report.txt" in named
    assert "error: " in (tmp_path / "flex-report.txt").read_text()
    assert_names(line, "decoder.layers.1:output", 1, "too hot", "own.py")
    assert "own.py" in done.err[0]  # the function's own traceback
    assert "megatron_flex/launch" not in done.err[0]
    weights = [state["weights"] for state in made(plain)]
    with open_dump(tmp_path / "dump") as dump:
        assert list(dump.iterations) == [0]
        norm, fc1 = (dump.parameter(name)[0].torch() for name in (NORM, FC1))
    held = {n: [next(w for k, w in rank.items() if k.endswith(n)) for rank in weights] for n in (NORM, FC1)}
    assert torch.equal(norm, held[NORM][0])
    assert not torch.equal(norm, torch.ones_like(norm))  # as it was initialised
    assert torch.equal(fc1, torch.cat(held[FC1]))


def refused(server: Server, out: Path, *ours: object) -> str:
    """The one line that a launch ends with, on all ranks, before data are touched."""
    done = server(2, out, *command(out), "--flex-cpu", *ours)
    return line_of(done, out)


def line_of(done: Done, out: Path) -> str:
    assert done.status == [2, 2], done.err
    assert not (out / "touched").exists()
    assert not any("Traceback" in text for text in done.err)
    (line,) = done.told
    return line


def test_bad_input_before_anything_is_built(server: Server, tmp_path: Path):
    """An unknown flag, a bad key, and functions that are not there, or take something else."""
    (tmp_path / "own.py").write_text(BOOM)
    (tmp_path / "bad.yaml").write_text("sites: [decoder.layers.*]\ndumps:\n- path: d\n  evry: 2\n")
    line = refused(server, tmp_path, "--megatron-flex-site", "x")
    assert "--megatron-flex-site;" in line
    assert "--megatron-flex-sites" in line
    line = refused(server, tmp_path, "--flex-dump", "d")
    assert_names(line, "--flex-dump d")
    line = refused(server, tmp_path, "--flex-config", "bad.yaml")
    assert all(word in line for word in ("bad.yaml", "4", "evry", "every"))
    assert not (tmp_path / "seen-0.json").exists()
    line = refused(server, tmp_path, "--flex-edit", "decoder.layers.1", "own.py:bom")
    assert "bom" in line
    line = refused(server, tmp_path, "--flex-edit", "decoder.layers.1", "own.py:few")
    assert_names(line, "few", "(current_module, inputs, save_ctx, modules)")


def test_bad_input_that_the_model_shows(server: Server, tmp_path: Path):
    """Sites that there are not, and a folder that holds another model's dump, which is left as it is."""
    line = refused(server, tmp_path, "--flex-sites", "decoder.layrs.*", "--flex-dump", tmp_path / "d")
    assert "decoder.layrs.*" in line
    assert "decoder.layers" in line
    (tmp_path / "d").mkdir(exist_ok=True)
    assert list((tmp_path / "d").iterdir()) == []

    write(tmp_path / "other", {"decoder.layers.0:output": Given(random(1, 4, 16, 8))})
    there = sorted((tmp_path / "other").rglob("*"))
    line = refused(server, tmp_path, "--flex-sites", "decoder.layers.*", "--flex-dump", tmp_path / "other")
    assert_names(line, tmp_path / "other")
    assert sorted((tmp_path / "other").rglob("*")) == there


def test_sites_and_plans(server: Server, tmp_path: Path):
    """The first rank prints them, and all end before data are touched."""
    looks = ["--flex-list-sites", "decoder.layers.0.mlp.**", "--flex-estimate", "--flex-cpu"]
    asked = ["--flex-sites", "decoder.layers.*", "--flex-dump", tmp_path / "d", "--flex-edit", "scale=0.5"]
    done = server(2, tmp_path, *command(tmp_path), *looks, *asked)
    assert done.status == [0, 0], done.err[0]
    first, second = done.out
    (fc1,) = (
        line for line in first.splitlines() if line.startswith("decoder.layers.0.mlp.linear_fc1:output")
    )
    assert fc1.split("  ")[1:] != []
    assert "[s, b, f 64]" in fc1
    assert "[s, b, f/tp]" in fc1
    assert "3 iterations" in first
    assert "scale(0.5)" in first
    assert "linear_fc1" not in second
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "d").exists()


def test_what_never_fired_is_told_at_the_end(server: Server, tmp_path: Path):
    """In a run that only evaluates no gradient comes; the script is through before it is told."""
    (tmp_path / "f.yaml").write_text(
        "edits: [{site: decoder.layers.0, edit: zero, hook_type: full_backward}]\n"
    )
    done = server(2, tmp_path, *command(tmp_path, "--skip-train"), "--flex-cpu", "--flex-config", "f.yaml")
    assert done.status == [2, 2], done.err[0]
    begun, named, line = done.told
    assert_names(begun, 1)
    assert_names((tmp_path / "flex-report.txt").read_text(), "full_backward", "decoder.layers.0")
    assert "flex-report.txt" in named
    assert_names(line, "full_backward", "decoder.layers.0")
    assert all((tmp_path / f"through-{rank}").exists() for rank in range(2))


ONE_LINE = """
import sys
import megatron_flex as mf
from tests.support.scripts import pretraining
own = pretraining.more
pretraining.more = lambda parser: mf.add_flex_args(own(parser))
pretraining.main()
"""


def test_flags_in_the_scripts_own_parser(server: Server, plain: Path, tmp_path: Path):
    """One line: what Megatron parses is enough, though its code is imported and bound already."""
    (tmp_path / "one.py").write_text(ONE_LINE)
    words = [tmp_path / "one.py", *command(tmp_path)[1:]]
    done = server(
        2, tmp_path, *words, "--flex-dump", tmp_path / "d", "--flex-sites", "decoder.layers.*", plain=True
    )
    assert done.status == [0, 0], done.err[0]
    assert_same(plain, tmp_path)
    with open_dump(tmp_path / "d") as dump:
        assert list(dump.iterations) == [0, 1, 2]


def test_flags_that_a_codemod_put_into_the_script(server: Server, plain: Path, tmp_path: Path):
    """Two lines more in a copy of the script, and it takes them; without flags it does what it did."""
    pytest.importorskip("libcst")
    from megatron_flex_patches.command import main

    copy = tmp_path / "pretrain_copy.py"
    copy.write_bytes(SCRIPT.read_bytes())
    assert main(["--apply", str(copy)]) == 0
    words = [copy, *command(tmp_path)[1:]]
    done = server(2, tmp_path, *words, "--flex-dump", tmp_path / "d", "--flex-sites", FC1[:-7], plain=True)
    assert done.status == [0, 0], done.err[0]
    assert_same(plain, tmp_path)
    with open_dump(tmp_path / "d") as dump:
        assert list(dump.sites) == [f"{FC1[:-7]}:output"]
    assert main(["--revert", str(copy)]) == 0
    assert copy.read_bytes() == SCRIPT.read_bytes()


INSTALLS = """
import sys
import megatron.training.training as training
from megatron.training import pretrain
from megatron_flex.errors import FlexError
from megatron_flex.launch import Settings, install

def state():
    return {**vars(training), "bound": pretrain, "outer": vars(sys.modules["megatron.training"])["pretrain"]}

before, path = state(), list(sys.meta_path)
idle = install(Settings())
assert state() == before
idle.uninstall()
sys.argv += ["--flex-verify", "--other"]
there = install()
assert sys.argv[-1] == "--other" and "--flex-verify" not in sys.argv
changed = {name for name, value in state().items() if before[name] is not value}
wrapped = {"setup_model_and_optimizer", "train_step", "evaluate", "train", "pretrain"}
wrapped |= {"checkpoint_and_decide_exit"} & set(before)
assert changed == wrapped | {"bound", "outer"}
assert install() is there and install(Settings(verify=1)) is there
try:
    install(Settings(verify=2))
except FlexError as error:
    assert "uninstall()" in str(error), error
else:
    raise AssertionError("other settings were taken")
there.uninstall()
assert state() == before and list(sys.meta_path) == path
print("as it was")
"""


def test_install_and_uninstall(server: Server, tmp_path: Path):
    (tmp_path / "installs.py").write_text(INSTALLS)
    done = server(1, tmp_path, tmp_path / "installs.py", plain=True)
    assert done.status == [0], done.err[0]
    assert "as it was" in done.out[0]


POISON = """
calls = []

def poison(module, inputs, save_ctx, modules):
    calls.append(1)
    if len(calls) < 6:
        return inputs
    out = inputs.clone()
    out[3, 0, 5] = float("nan")
    return out
"""


def test_the_run_stops_before_the_optimizer_takes_a_value_that_is_not_finite(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    ours = ["--flex-cpu", "--flex-nonfinite", "stop", "--flex-edit", "decoder.layers.0", "poison.py:poison"]
    done = server(2, tmp_path, *command(tmp_path), *ours)
    assert done.status == [2, 2], done.err[0]
    assert_names(done.told[-1], 1, "decoder.layers.1:input", "ranks 0, 1", "1 NaN", [3, 0, 5], [16, 2, 32])
    checks = [line for line in done.told if "--no-check-for-nan-in-loss-and-grad" in line]
    assert len(checks) == 1, done.told
