"""`megatron-flex run --dry`: what is checked before anything is started."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("megatron_flex.cli", exc_type=ImportError)

import megatron_flex as mf
from megatron_flex.errors import SiteError
from megatron_flex.sites import SiteTable, check_pattern
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import Given, random
from tests.support.messages import assert_names, raises

STARTED = "raise SystemExit('the script was started')\n"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    (tmp_path / "train.py").write_text(STARTED)
    (tmp_path / "torn.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "mine.py").write_text(
        "def double(module, inputs, save_ctx, modules):\n    return 2 * inputs\n"
    )
    return Command(monkeypatch, capsys, tmp_path)


def test_a_run_that_would_start(command: Command) -> None:
    words = ["--nproc-per-node", "2", "train.py", "--num-layers", "4", "--flex-dump", "out"]
    words += [
        "--flex-sites",
        "decoder.layers.3",
        "**.mlp",
        "--flex-edit",
        "decoder.layers.[0-2]",
        "mine.py:double",
    ]
    done = command("run", "--dry", *words)
    assert done.status == 0
    runner = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "megatron_flex.launch"]
    assert shlex.split(done.out) == [sys.executable, *runner, *words[2:]]
    script, edit, dump = done.err.splitlines()
    assert_names(script, "train.py")
    assert_names(edit, "forward", "decoder.layers.[0-2]", "double")
    assert_names(dump, 2, "out")
    assert not Path("out").exists()


def test_what_a_run_finds_is_said(command: Command) -> None:
    for name, written in (("out", 1), ("more", 2)):
        for _ in range(written):
            dumps.write(Path(name), {"decoder.layers.0": Given(random(1, 2, 3, 4))})
    sites = ["--flex-sites", "decoder.layers.0"]
    one = command("run", "--dry", "train.py", "--flex-dump", "out", *sites).err
    assert_names(one, "out", 1)
    assert_names(command("run", "--dry", "train.py", "--flex-list-sites").err, "list-sites")
    assert_names(command("run", "--dry", "train.py", "--lr", "1").err, "train.py")
    passed = command("run", "--dry", "train.py", "--flex-dmup", "out").err
    assert_names(passed, "megatron_flex", "--flex-dmup", "--flex-dump")
    assert command("run", "--dry", "-m", "json.tool").status == 0


DUMP = ["--flex-dump", "out"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], ("none.py", "-m MODULE")),
        (["torn.py"], ("torn.py", 2)),
        (["-m", "no_such_module_here"], ("no_such_module_here",)),
        (["train.py", *DUMP], ("--flex-dump out", "--flex-sites PATTERN")),
        (["train.py", "--flex-every", "0"], ("--flex-every", 0, 1)),
        (["train.py", "--flex-sites", "decoder.*"], ("--flex-dump", "--flex-stats", "--flex-edit")),
        (["train.py", "--megatron-flex-dmup", "x"], ("--megatron-flex-dmup", "--megatron-flex-dump")),
        (["train.py", *DUMP, "--flex-sites", "a[0-3"], ("a[0-3", "[0-3]", "[14]")),
        (["train.py", *DUMP, "--flex-sites", "a|b"], ("a|b", "|")),
        (["train.py", *DUMP, "--flex-dump-parameters", "a..b"], ("a..b", "decoder.layers.*")),
        (["train.py", "--num-layers=4", *DUMP, "--flex-sites", "decoder.layers.4.mlp"],
         ("decoder.layers.4.mlp", 4, "--num-layers", "decoder.layers", "0-3")),
        (["train.py", "--flex-edit", "a nowhere.py:f"], ("--flex-edit nowhere.py:f", "nowhere.py")),
        (["train.py", "--flex-edit", "a mine.py:duble"], ("mine.py", "duble", "double")),
        (["train.py", "--flex-edit", "a scael=2"], ("--flex-edit scael=2", "scael", "scale")),
        (["train.py", *DUMP, "--flex-stats", "out", "--flex-sites", "a"], ("out",)),
        ([], ("SCRIPT",)),
    ],
)  # fmt: skip
def test_what_would_fail_is_said_in_one_line(
    command: Command, words: list[str], said: tuple[object, ...]
) -> None:
    done = command("run", "--dry", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert_names(done.err, *said)


@pytest.mark.parametrize(
    "pattern", ["a", "a.b:c", "**", "a.*.b:*", "a.[0-3].b", "a.[!0]", "a:output[1]", "a.b#0"]
)
def test_patterns(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "a b", "a/b", "(a)", "a.", ".a", "a:", "a:b:c", "[", "a]", "a[]", "$"]
)
def test_texts_that_match_no_name(pattern: str) -> None:
    with raises(SiteError, repr(pattern)):
        check_pattern(pattern)
    with raises(SiteError, repr(pattern)):
        SiteTable().match(pattern)


def test_a_name_that_nothing_can_match_says_why() -> None:
    import torch

    flex = mf.FlexModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with raises(SiteError, "0|1", "|", "[0-3]"):
        flex.sites("0|1")
    flex.restore()
