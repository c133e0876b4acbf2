"""Flags of launchers: out of a command line, out of argparse, and the help that they are held to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_flex as mf
from megatron_flex.errors import FlexError
from megatron_flex.launch import settings_of
from megatron_flex.launch.flags import (
    FLAGS,
    FLAGS_BY_OPTION,
    FLAGS_VARIABLE,
    Flag,
    describe_foreign_flags,
    format_help,
    load_settings,
    split_argv,
    values_of,
)
from megatron_flex.launch.flags import settings_from_argv as found
from megatron_flex.launch.launch_settings import (
    DumpSettings,
    EditSettings,
    Settings,
    StatisticsSettings,
    merge_values,
)
from tests.support.messages import assert_names, raises

# What each flag is given here, and what its field is then.
GIVEN: dict[str, tuple[list[str], Any]] = {
    "sites": (["a.*", "b:mid"], ("a.*", "b:mid")),
    "every": (["7"], 7),
    "tokens": (["::8"], "::8"),
    "gradients": ([], True),
    "edit": (["a.b", "scale=2"], (EditSettings(site="a.b", edit="scale=2"),)),
    "on-error": (["skip"], "skip"),
    "dump": (["folder"], "folder"),
    "dump-dtype": (["bf16"], "bf16"),
    "dump-parameters": (["w.*", "v"], ("w.*", "v")),
    "dump-iterations": (["0:10:2"], "0:10:2"),
    "dump-microbatches": (["0"], "0"),
    "dump-samples": (["0,3"], "0,3"),
    "dump-mean": ([], "mean"),
    "dump-when-full": (["drop"], "drop"),
    "dump-on-error": (["raise"], "raise"),
    "dump-replicas": ([], True),
    "stats": (["there"], "there"),
    "stats-parameters": (["w.*"], ("w.*",)),
    "list-sites": (["a.*"], "a.*"),
    "estimate": ([], True),
    "verify": (["3"], 3),
    "nonfinite": (["warn"], "warn"),
    "nonfinite-dir": (["shards"], "shards"),
    "control": (["file"], Path("file")),
    "report": (["r.txt"], Path("r.txt")),
    "align": (["llama"], "llama"),
    "align-tokens": (["tokens.json"], "tokens.json"),
    "gradient-norms": (["norms.jsonl"], "norms.jsonl"),
    "weights-digest": (["weights.json"], "weights.json"),
    "weights-digest-at": (["3"], 3),
    "align-report": (["align.json"], "align.json"),
    "cpu": ([], True),
}
NEEDS = {"dump": ["--flex-dump=folder"], "statistics": ["--flex-stats=folder"]}
ONLY_IN_FILES = {
    *(("edits", name) for name in ("hook_type", "run", "groups", "enabled")),
    *(("dump", name) for name in ("sites", "every", "tokens", "gradients", "durable", "groups")),
    *(("dump", name) for name in ("order", "runs", "queue_bytes", "part_bytes")),
    *(("statistics", name) for name in ("sites", "every", "gradients", "histogram", "writers", "groups")),
}


def parsed(words: list[str], environment: dict[str, str] | None = None) -> Settings:
    """By argparse, the namespace once in JSON and back, as a checkpoint may have it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    assert mf.add_flex_args(parser) is parser
    namespace = argparse.Namespace(**json.loads(json.dumps(vars(parser.parse_args(words)))))
    return settings_of(namespace, environment or {})


def taken(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    namespace, rest = split_argv(words)
    return values_of(namespace), rest


def field_of(flag: Flag, out: Settings) -> Any:
    if flag.field[0] == "dump":
        (dump,) = out.dumps
        return getattr(dump, flag.field[1])
    value: Any = out
    for name in flag.field:
        value = getattr(value, name)
    return value


# --- every flag and every field


@pytest.mark.parametrize("name", [f.name for f in FLAGS if f.field])
def test_a_flag_sets_its_field_and_no_other(name: str) -> None:
    flag, (words, wanted) = FLAGS_BY_OPTION[f"--flex-{name}"], GIVEN[name]
    others = [] if name in ("dump", "stats") else NEEDS.get(flag.field[0], [])
    others = others if name == "sites" else ["--flex-sites=s", *others]
    before, after = found(others, {})[0], found([*others, flag.option, *words], {})[0]
    assert field_of(flag, after) == wanted
    changed = {n for n in Settings.model_fields if getattr(before, n) != getattr(after, n)}
    assert changed == {"dumps" if flag.field[0] == "dump" else flag.field[0]}
    assert parsed([*others, flag.option, *words]) == after
    assert found([*others, flag.long_option, *words], {})[0] == after
    assert parsed([*others, flag.long_option, *words]) == after


def test_every_field_has_a_flag_or_is_known_to_have_none() -> None:
    parts = {"edits": EditSettings, "dump": DumpSettings, "statistics": StatisticsSettings}
    fields = {(n,) for n in Settings.model_fields if n not in ("edits", "dumps", "statistics")}
    fields |= {(name, n) for name, part in parts.items() for n in part.model_fields}
    flagged = {f.field for f in FLAGS if f.field and f.name != "edit"} | {
        ("edits", "site"),
        ("edits", "edit"),
    }
    assert fields - flagged == ONLY_IN_FILES
    assert flagged <= fields


def test_both_helps_list_every_flag() -> None:
    ours = format_help()
    assert max(map(len, ours.splitlines())) <= 100
    parser = mf.add_flex_args(argparse.ArgumentParser(allow_abbrev=False))
    for text in (ours, parser.format_help()):
        assert [f.option for f in FLAGS if f.option not in text] == []


# --- both ways say the same

WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
    lambda w: w.strip() and not w.startswith("-")
)
NUMBER = st.integers(1, 999).map(str)
VALUES = {
    "every": NUMBER,
    "verify": NUMBER,
    "weights-digest-at": NUMBER,
    "tokens": st.sampled_from(["0,5", "::8", "random:64", "3"]),
    "on-error": st.sampled_from(["raise", "skip"]),
    "nonfinite": st.sampled_from(["stop", "warn"]),
    "dump-dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
    "dump-when-full": st.sampled_from(["wait", "drop"]),
    "dump-on-error": st.sampled_from(["warn", "raise"]),
    **dict.fromkeys(
        ("dump-iterations", "dump-microbatches", "dump-samples"), st.sampled_from(["0", "1,2", "0:9:3", "4:"])
    ),
}
COUNTS = {"none": (0, 0), "one": (1, 1), "once": (1, 1), "optional": (0, 1), "many": (1, 3), "edit": (1, 2)}


@st.composite
def given_flag(draw: st.DrawFn, flag: Flag) -> list[str]:
    least, most = COUNTS[flag.takes]
    words = draw(st.lists(VALUES.get(flag.name, WORD), min_size=least, max_size=most))
    if len(words) == 1 and draw(st.booleans()):
        return [f"{flag.option}={words[0]}"]
    return [flag.option, *words]


COMMANDS = st.lists(
    st.sampled_from([f for f in FLAGS if f.name not in ("help", "config")]).flatmap(given_flag), max_size=8
)


def attempt(do: Any) -> Any:
    try:
        return do()
    except FlexError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(COMMANDS, st.lists(st.sampled_from(["--lr", "--x=1"]), max_size=3))
def test_argparse_gives_the_same_settings(flags: list[list[str]], theirs: list[str]) -> None:
    words = [w for flag in flags for w in flag]
    assert attempt(lambda: parsed(words)) == attempt(lambda: found(words, {})[0])
    mixed = [w for n, flag in enumerate(flags) for w in (*theirs[n : n + 1], *flag)] + theirs[len(flags) :]
    parts = attempt(lambda: split_argv(mixed))
    assert isinstance(parts, str) or parts[1] == theirs
    assert attempt(lambda: found(mixed, {})[0]) == attempt(lambda: found(words, {})[0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=6).filter(lambda w: not w.startswith("--flex-")), max_size=8))
def test_words_that_are_not_ours_stay_as_they_are(words: list[str]) -> None:
    assert taken(words) == ({}, words)
    assert taken(["--flex-cpu", *words]) == ({"cpu": True}, words)
    assert taken([*words, "--", "--flex-cpu", "--flex-no"]) == (
        {},
        [*words, "--", "--flex-cpu", "--flex-no"],
    )


@settings(max_examples=100, deadline=None)
@given(COMMANDS)
def test_values_in_a_namespace_are_plain(flags: list[list[str]]) -> None:
    parser = mf.add_flex_args(argparse.ArgumentParser(allow_abbrev=False))
    namespace = parser.parse_args([w for flag in flags for w in flag])

    def plain(value: Any) -> bool:
        return all(map(plain, value)) if type(value) is list else type(value) in (str, int, bool, NoneType)

    assert all(map(plain, vars(namespace).values()))
    assert all(name.startswith("flex_") for name in vars(namespace))


# --- how they are written


@pytest.mark.parametrize(
    ("words", "values", "rest"),
    [
        ("--flex-sites a b --lr 1", {"sites": ["a", "b"]}, "--lr 1"),
        ("--flex-sites a -c x", {"sites": ["a"]}, "-c x"),
        ("--flex-sites=a b", {"sites": ["a"]}, "b"),
        ("--flex-sites a --flex-sites b", {"sites": ["a", "b"]}, ""),
        ("--flex-every 2 3", {"every": "2"}, "3"),
        ("--flex-every 2 --flex-every=3", {"every": "3"}, ""),
        ("--flex-tokens -1,5", {"tokens": "-1,5"}, ""),
        ("--flex-gradients x", {"gradients": True}, "x"),
        ("--flex-stats --lr", {"statistics": {"path": "flex-stats"}}, "--lr"),
        ("--flex-stats d", {"statistics": {"path": "d"}}, ""),
        ("--flex-verify", {"verify": "1"}, ""),
        ("--flex-list-sites", {"list_sites": "**"}, ""),
        ("--flex-edit zero", {"edits": [{"edit": "zero"}]}, ""),
        ("--flex-dump a --flex-dump-mean", {"dump": {"path": "a", "reduce": "mean"}}, ""),
        ("--flex-dump a --flex-dump a", {"dump": {"path": "a"}}, ""),
        (
            "--flex-strict --flex-hetero-ffn 2 --flex-every 3",
            {"every": "3"},
            "--flex-strict --flex-hetero-ffn 2",
        ),
        ("--flex-sites a --flex-strict b", {"sites": ["a"]}, "--flex-strict b"),
        ("--flex-eve 3 --flex-", {}, "--flex-eve 3 --flex-"),
        ("--megatron-flex-sites a b --megatron-flex-every=2", {"sites": ["a", "b"], "every": "2"}, ""),
        ("--flexible --flex x -flex-cpu", {}, "--flexible --flex x -flex-cpu"),
        ("--flex-sites a -- --flex-x", {"sites": ["a"]}, "-- --flex-x"),
    ],
)
def test_how_flags_are_written(words: str, values: dict[str, Any], rest: str) -> None:
    assert taken(words.split()) == (values, rest.split())


@pytest.mark.parametrize(
    ("words", "site", "edit"),
    [
        (["zero"], None, "zero"),
        (["a.b zero"], "a.b", "zero"),
        (["a.b", "zero"], "a.b", "zero"),
        (["zero | scale=2"], None, "zero|scale=2"),
        (["a.b:mid  zero|  scale=2"], "a.b:mid", "zero|scale=2"),
        (["a.b", "my file.py:f"], "a.b", "my file.py:f"),
    ],
)
def test_edits_with_and_without_a_site(words: list[str], site: str | None, edit: str) -> None:
    wanted = {"edit": edit} if site is None else {"site": site, "edit": edit}
    assert taken(["--flex-edit", *words])[0] == {"edits": [wanted]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--megatron-flex-dmup x", ("--megatron-flex-dmup", "--megatron-flex-dump")),
        ("--megatron-flex-", ("--megatron-flex-", "--flex-help")),
        ("--flex-dump d", ("--flex-dump d", "--flex-sites PATTERN")),
        ("--flex-stats", ("--flex-stats flex-stats", "--flex-sites PATTERN")),
        ("--flex-edit zero", ("--flex-edit zero", "--flex-sites")),
        ("--flex-every", ("--flex-every N",)),
        ("--flex-every --flex-cpu", ("--flex-every N",)),
        ("--flex-sites", ("--flex-sites PATTERN ...",)),
        ("--flex-every=", ("--flex-every", "N")),
        ("--flex-cpu=1", ("--flex-cpu", "1")),
        ("--flex-every x", ("--flex-every", "x")),
        ("--flex-every 0", ("--flex-every", "0", "1")),
        ("--flex-verify -1", ("--flex-verify", "-1", "0")),
        ("--flex-tokens 0.5", ("--flex-tokens", "0.5")),
        ("--flex-on-error ignore", ("--flex-on-error", "ignore", "raise", "skip")),
        ("--flex-dump d --flex-dump-dtype fp8", ("--flex-dump-dtype", "fp8")),
        (
            "--flex-dump d --flex-dump-iterations 5:2",
            ("--flex-dump-iterations", "5:2"),
        ),
        ("--flex-dump d --flex-dump e", ("--flex-dump", "d", "e", "--flex-config")),
        ("--flex-dump-dtype bf16", ("--flex-dump-dtype", "--flex-dump DIR")),
        ("--flex-stats-parameters w", ("--flex-stats-parameters", "--flex-stats")),
        ("--flex-edit a b c", ("--flex-edit a b c", "SITE", "EDIT")),
        ("--flex-config /no/such.yaml", ("/no/such.yaml", "--flex-config")),
    ],
)
def test_what_cannot_be_said(words: str, said: tuple[str, ...]) -> None:
    with raises(FlexError, *said):
        found(words.split(), {})


def test_flags_of_a_script_that_begin_like_ours() -> None:
    """Megatron's elastic models have --flex-strict and --flex-hetero-ffn; a typing error is seen as well."""
    said = describe_foreign_flags(
        ["--lr", "--flex-strict", "--flex-hetero-ffn=2", "--flex-site", "--flexible"]
    )
    assert_names(said, "--flex-strict", "--flex-hetero-ffn", "--flex-site", "--flex-sites")
    assert "flexible" not in said
    assert describe_foreign_flags(["--lr", "1", "--", "--flex-strict"]) == ""


def test_a_parser_that_has_flags_of_our_names() -> None:
    """The script keeps them; ours have the longer prefix there."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--flex-verify", action="store_true", dest="theirs")
    parser.add_argument("--flex-strict", action="store_true")
    mf.add_flex_args(parser)
    words = ["--flex-verify", "--flex-strict", "--megatron-flex-verify", "3", "--flex-every", "2"]
    namespace = parser.parse_args(words)
    assert (namespace.theirs, namespace.flex_strict) == (True, True)
    assert settings_of(namespace, {}) == Settings(verify=3, every=2)


def test_settings_without_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook or an actor of Ray `sys.argv` is another program's: files and the variable count."""
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py", "-f", "kernel.json", "--flex-cpu"])
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("sites: [a]\nevery: 2\n")
    two.write_text("every: 3\n")
    assert load_settings(one, environment={}) == Settings(sites=("a",), every=2)
    variables = {FLAGS_VARIABLE: f"--flex-config {two} --flex-dump d"}
    both = Settings(sites=("a",), every=3, dumps=(DumpSettings(path="d"),))
    assert load_settings(one, environment=variables) == both
    assert load_settings(environment={FLAGS_VARIABLE: "--flex-every 5"}) == Settings(every=5)
    with raises(FlexError, "--flex-dump", "--flex-sites PATTERN"):
        load_settings(environment={FLAGS_VARIABLE: "--flex-dump d"})


# --- files, the environment and flags


def test_flags_count_on_top_of_the_environment_and_that_on_top_of_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("sites: [a]\nevery: 2\ndumps: [{path: x}]\nstatistics: {every: 3, histogram: false}")
    two.write_text("sites: b\ntokens: 5")
    environment = {FLAGS_VARIABLE: f"--flex-config {one} --flex-sites c --flex-every 5 --flex-dump 'y z'"}
    words = ["--flex-config", str(two), "--flex-sites", "d", "--flex-dump-mean", "--flex-stats=s", "--lr"]
    out, rest = found(words, environment)
    assert rest == ["--lr"]
    assert out == Settings(
        sites=("a", "b", "c", "d"),
        every=5,
        tokens="5",
        dumps=(DumpSettings(path="x"), DumpSettings(path="y z", reduce="mean")),
        statistics=StatisticsSettings(path="s", every=3, histogram=False),
    )
    assert parsed(words[:-1], environment) == out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--flex-sites 'a", (FLAGS_VARIABLE, "--flex-sites 'a")),
        ("--flex-evry 2", (FLAGS_VARIABLE, "--flex-evry")),
        ("--lr 2", (FLAGS_VARIABLE, "--lr", "--flex-")),
    ],
)
def test_an_environment_that_cannot_be(text: str, said: tuple[str, ...]) -> None:
    with raises(FlexError, *said):
        found([], {FLAGS_VARIABLE: text})


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, "--flex-every 9")
    assert found([])[0].every == 9
    assert found([], {})[0].every == 1


def test_statistics_of_a_file_are_refined_by_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("statistics: {sites: [a]}")
    out = found(["--flex-config", str(file), "--flex-stats-parameters", "w"], {})[0]
    assert out.statistics == StatisticsSettings(sites=("a",), parameters=("w",))


@pytest.mark.parametrize("parse", [parsed, found])
def test_the_first_rank_prints_the_help(
    parse: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, text in (("0", format_help()), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            parse(["--flex-help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == text


def test_a_namespace_of_another_parser_is_told() -> None:
    with raises(FlexError, "mf.add_flex_args"):
        settings_of(argparse.Namespace(lr=1), {})


def test_no_flags_are_nothing_wanted() -> None:
    assert found([], {})[0].idle
    assert parsed([]).idle
    assert not found(["--flex-estimate"], {})[0].idle


def test_lists_are_joined_and_mappings_merged() -> None:
    first = {"a": [1], "b": {"c": [1], "d": 1}, "e": 1}
    assert merge_values(first, {"a": (2,), "b": {"c": [2], "d": 2}, "e": 2, "f": 3}) == {
        "a": [1, 2],
        "b": {"c": [1, 2], "d": 2},
        "e": 2,
        "f": 3,
    }
    assert first == {"a": [1], "b": {"c": [1], "d": 1}, "e": 1}
