"""`megatron-flex run --dry`: what is checked before anything is started; and another prefix of the flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("megatron_flex.cli", exc_type=ImportError)

import megatron_flex as mf
from megatron_flex.errors import FlexError, SiteError
from megatron_flex.launch.argparse_flags import add_flex_args
from megatron_flex.launch.flag_prefix import LONG_PREFIX, flag_prefix
from megatron_flex.launch.flags import (
    describe_foreign_flags,
    format_help,
    settings_from_argv,
    settings_of,
    split_argv,
)
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.sites import SiteTable, check_pattern
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import Given, random

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
    assert done.err.splitlines() == [
        "script train.py: can be parsed",
        "edit: forward on decoder.layers.[0-2] editing by double",
        "dump: 2 patterns to out",
    ]
    assert not Path("out").exists()


def test_what_a_run_finds_is_said(command: Command) -> None:
    for name, written in (("out", 1), ("more", 2)):
        for _ in range(written):
            dumps.write(Path(name), {"decoder.layers.0": Given(random(1, 2, 3, 4))})
    sites = ["--flex-sites", "decoder.layers.0"]
    one = command("run", "--dry", "train.py", "--flex-dump", "out", *sites).err
    assert "dump: 1 pattern to out; 1 run is there, and this one continues it" in one
    assert (
        "checks before training: list-sites" in command("run", "--dry", "train.py", "--flex-list-sites").err
    )
    assert "the script would run without hooks" in command("run", "--dry", "train.py", "--lr", "1").err
    passed = command("run", "--dry", "train.py", "--flex-dmup", "out").err
    assert "no flag of megatron_flex has this name: --flex-dmup (nearest: --flex-dump)" in passed
    assert command("run", "--dry", "-m", "json.tool").status == 0


DUMP = ["--flex-dump", "out"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "no script none.py"),
        (["torn.py"], "torn.py, line 2: invalid syntax; Python would not start it"),
        (["-m", "no_such_module_here"], "no module 'no_such_module_here' on Python's path"),
        (["train.py", *DUMP], "nothing is named; give --flex-sites PATTERN"),
        (["train.py", "--flex-every", "0"], "--flex-every: '0' is less than 1"),
        (["train.py", "--flex-sites", "decoder.*"], "nothing to do"),
        (["train.py", "--megatron-flex-dmup", "x"], "no flag --megatron-flex-dmup"),
        (["train.py", *DUMP, "--flex-sites", "a[0-3"], "'[' and ']' do not match; write [0-3]"),
        (["train.py", *DUMP, "--flex-sites", "a|b"], "has '|', which no name has"),
        (["train.py", *DUMP, "--flex-dump-parameters", "a..b"], "has an empty part"),
        (["train.py", "--num-layers=4", *DUMP, "--flex-sites", "decoder.layers.4.mlp"],
         "'decoder.layers.4.mlp' names layer 4, and --num-layers is 4; of decoder.layers there are 0-3"),
        (["train.py", "--flex-edit", "a nowhere.py:f"], "no file nowhere.py"),
        (["train.py", "--flex-edit", "a mine.py:duble"], "mine.py has no 'duble'; nearest: double"),
        (["train.py", "--flex-edit", "a scael=2"], "no preset 'scael'; nearest: scale"),
        (["train.py", *DUMP, "--flex-stats", "out", "--flex-sites", "a"], "dump and statistics; name two"),
        ([], "no script, none is named"),
    ],
)  # fmt: skip
def test_what_would_fail_is_said_in_one_line(command: Command, words: list[str], said: str) -> None:
    done = command("run", "--dry", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err


@pytest.mark.parametrize(
    "pattern", ["a", "a.b:c", "**", "a.*.b:*", "a.[0-3].b", "a.[!0]", "a:output[1]", "a.b#0"]
)
def test_patterns(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "a b", "a/b", "(a)", "a.", ".a", "a:", "a:b:c", "[", "a]", "a[]", "$"]
)
def test_texts_that_match_no_name(pattern: str) -> None:
    with pytest.raises(SiteError):
        check_pattern(pattern)
    with pytest.raises(SiteError):
        SiteTable().match(pattern)


# -- another prefix ----------------------------------------------------------------------------------------


@pytest.fixture
def hooks_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLEX_PREFIX", "--hooks-")
    monkeypatch.delenv("MEGATRON_FLEX_FLAGS", raising=False)


def test_another_prefix(hooks_prefix: None) -> None:
    words = ["--flex-sites", "theirs", "--hooks-dump", "out", "--hooks-sites", "a", "b", "--lr", "1"]
    found, rest = settings_from_argv([*words, f"{LONG_PREFIX}every", "5"])
    assert rest == ["--flex-sites", "theirs", "--lr", "1"]
    assert (found.sites, found.every, found.dumps[0].path) == (("a", "b"), 5, "out")
    assert describe_foreign_flags(["--flex-strict"]) == ""
    assert "--hooks-dmup (nearest: --hooks-dump)" in describe_foreign_flags(["--hooks-dmup"])
    assert "--hooks-dump DIR" in format_help()
    assert "at --hooks-sites" in format_help()
    with pytest.raises(FlexError, match="--hooks-dump needs a value"):
        split_argv(["--hooks-dump"])


def test_the_variable_holds_either_prefix(hooks_prefix: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("--flex-dump out --flex-sites a", "--hooks-dump out --hooks-sites a"):
        monkeypatch.setenv("MEGATRON_FLEX_FLAGS", text)
        assert settings_from_argv([])[0].dumps[0].path == "out"


def test_a_parser_has_the_prefix(hooks_prefix: None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--flex-sites")
    add_flex_args(parser)
    found = parser.parse_args(["--flex-sites", "theirs", "--hooks-stats", "--hooks-sites", "a"])
    assert settings_of(found, {}) == Settings.model_validate({"sites": ["a"], "statistics": {}})
    assert found.flex_sites is not None


def test_errors_are_said_with_the_prefix(hooks_prefix: None, command: Command) -> None:
    done = command("run", "--dry", "train.py", "--hooks-dump", "out")
    assert (
        done.err
        == "megatron-flex: --hooks-dump out: nothing is named; give --hooks-sites PATTERN, or parameters\n"
    )
    assert "--hooks-dump comes before it" in command("run", "--dry", "--hooks-dump", "out", "train.py").err


@pytest.mark.parametrize("prefix", ["hooks-", "--hooks", "-h-", "--", "--A-", "--a b-"])
def test_what_is_no_prefix(prefix: str) -> None:
    with pytest.raises(
        FlexError, match="a prefix is two dashes, small letters, and a dash, such as --hooks-"
    ):
        flag_prefix({"MEGATRON_FLEX_PREFIX": prefix})
    assert flag_prefix({}) == flag_prefix({"MEGATRON_FLEX_PREFIX": ""}) == "--flex-"


def test_a_name_that_nothing_can_match_says_why() -> None:
    import torch

    flex = mf.FlexModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(SiteError, match="several patterns are given one by one"):
        flex.sites("0|1")
    flex.restore()
