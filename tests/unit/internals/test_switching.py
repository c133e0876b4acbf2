"""What a control file may hold, and which hooks its words mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import megatron_flex as mf
from megatron_flex.launch.hook_control import MAX_CONTROL_BYTES, parse_control_words, read_control_file
from megatron_flex.runtime.hook_groups import Switches, parse_switches
from tests.support.messages import assert_names, raises

KNOWN = ["edit", "steer", "dump"]


@pytest.mark.parametrize(
    ("words", "groups", "enabled", "on"),
    [
        ((), ("edit",), True, True),
        ((), ("edit",), False, False),
        (("+edit",), ("edit",), False, True),
        (("-edit",), ("edit", "steer"), True, False),
        (("-edit", "+steer"), ("edit", "steer"), True, True),
        (("+steer", "-edit"), ("edit", "steer"), True, False),
        (("none",), (), True, False),
        (("none", "+steer"), ("dump",), True, False),
        (("none", "+steer"), ("edit", "steer"), False, True),
        (("all", "-dump"), ("edit",), False, True),
        (("-all",), ("edit",), True, False),
        (("+dump",), (), False, False),
    ],
)
def test_of_the_words_that_mean_a_hook_the_last_counts(
    words: tuple[str, ...], groups: tuple[str, ...], enabled: bool, on: bool
) -> None:
    assert parse_switches(words, KNOWN) == Switches(words)
    assert Switches(words).selects(groups, enabled) is on


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+stear", ("stear", "steer")),
        ("steer", ("steer", "-group")),
        ("+", ()),
    ],
)
def test_words_that_cannot_be(word: str, said: tuple[str, ...]) -> None:
    with raises(mf.HookError, *said):
        parse_switches([word], KNOWN)


def test_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "control"
    assert read_control_file(path) is None
    path.write_text("# off for the night\nnone  \n+steer # but this\n\n  -dump\t+edit\n")
    content = read_control_file(path)
    assert isinstance(content, bytes)
    assert parse_control_words(content) == ("none", "+steer", "-dump", "+edit")
    assert parse_control_words(b"") == ()
    with raises(mf.FlexError, "-dump"):
        parse_control_words(b"\x80\xff\x00")
    path.write_bytes(b"#" * (MAX_CONTROL_BYTES + 1))
    assert_names(read_control_file(path), path, 65536)
    assert_names(read_control_file(tmp_path), tmp_path, "Is a directory")
    path.chmod(0)
    if os.geteuid() != 0:
        assert_names(read_control_file(path), path, "Permission denied")
