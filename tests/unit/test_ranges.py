"""Numbers, ranges and paths of flags and constructors: a right answer, or one error before anything runs."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
import torch
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import megatron_flex as mf
from megatron_flex import edits
from megatron_flex.cli.app import app
from megatron_flex.compare import compare
from megatron_flex.dump import sampled
from megatron_flex.dump.dump_settings import parse_token_setting
from megatron_flex.dump.token_selection import select_positions
from megatron_flex.errors import MAX_MESSAGE, FlexError, format_value
from megatron_flex.estimate import Links, parse_read_hook
from megatron_flex.launch.settings_file import validate_settings
from megatron_flex.ranges import (
    MAX_LISTED,
    is_selected,
    normalize_numbers,
    normalize_spans,
    parse_count,
    parse_numbers,
    parse_spans,
    select_present,
)
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import SEQUENCE, Given, random
from tests.support.messages import raises

SITE = "decoder.layers.0"

# --- texts

NUMBERS = st.one_of(
    st.integers(-20, 20).map(str),
    st.sampled_from(
        ["0", "", "-0", "+3", "9" * 18, "9" * 5000, "1e3", "0.5", "nan", "inf", "1_0", "٣", "²", "x", " 4 "]
    ),
)
TEXTS = st.one_of(
    st.lists(st.lists(NUMBERS, min_size=1, max_size=4).map(":".join), min_size=1, max_size=4).map(",".join),
    st.text(alphabet="0123456789-+:,._e randomnf\x00٣", max_size=30),
    NUMBERS.map("random:{}".format),
    st.sampled_from(["0.0", "1.0", ".5", "5.", ".", "1.5", "0.1", "00.1", "0:20000000", "0:20000000,5"]),
)


def _refused(build: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether an argument is refused, by one short line; else what was built."""
    try:
        return False, build()
    except FlexError as error:
        text = str(error)
    assert "\n" not in text
    assert len(text) <= MAX_MESSAGE
    return True, None


@settings(max_examples=600)
@given(TEXTS)
@example("::0")
@example("5:3")
@example("::-1")
@example("0:1000:100")
def test_any_text_is_a_selection_that_python_agrees_with_or_one_error(text: str) -> None:
    for from_end in (False, True):
        refused, found = _refused(lambda end=from_end: parse_numbers(text, "--tokens", end))
        if refused:
            continue
        if isinstance(found, list):
            assert len(found) <= MAX_LISTED
            assert text.count(":") or found == [int(word) for word in text.split(",")]
            continue
        start, stop, step = (int(word) if word.strip() else None for word in [*text.split(":"), ""][:3])
        assert found == slice(start, stop, step)
        chosen = range(40)[found]
        assert chosen.step > 0
        if not from_end:
            assert [n for n in range(40) if is_selected(n, found)] == list(chosen)
    refused, tokens = _refused(lambda: parse_token_setting(text))
    if not refused and not isinstance(tokens, float):
        dump = mf.Dump("d", SITE, tokens=tokens)
        assert set(select_positions(dump.tokens, 16, 0, 0)) <= set(range(16))
    elif not refused:
        assert 0 < tokens <= 1
    for parse in (parse_spans, parse_count):
        _refused(lambda parse=parse: parse(text, "--iterations"))


@settings(max_examples=200)
@given(TEXTS)
def test_any_text_in_a_setting_or_a_notation_is_accepted_or_one_error(text: str) -> None:
    for field in ("iterations", "microbatches", "samples", "tokens"):
        _refused(
            lambda field=field: validate_settings(
                {"sites": [SITE], "dumps": [{"path": "d", field: text}]}, str
            )
        )
    for option in ("positions", "samples", "heads", "neurons"):
        _refused(lambda option=option: parse_read_hook(f"{SITE}@{option}={text}"))
        _refused(lambda option=option: edits.parse(f"zero,positions={text}"))


# --- arguments


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError

    def __index__(self) -> int:
        return 10**30


INTEGERS = st.one_of(
    st.integers(-5, 20),
    st.sampled_from([10**5000, -(10**30), 1 << 62, 1 << 64, True, _Hostile(), np.int64(3)]),
)
SCALARS = st.one_of(
    INTEGERS,
    st.none(),
    st.floats(),
    st.sampled_from(["", "3", "~", "~/x", "a\x00b", b"12", "\udcff", 1j, object(), _Hostile, Path("~")]),
)
SLICES = st.builds(slice, SCALARS, SCALARS, SCALARS) | st.builds(
    slice, INTEGERS, INTEGERS, st.integers(-2, 3)
)
RANGES = st.builds(
    range, st.integers(-10, 10**12), st.integers(-10, 10**12), st.integers(-3, 10**6).filter(lambda n: n)
)
VALUES = st.one_of(
    SCALARS,
    SLICES,
    RANGES,
    st.lists(SCALARS | SLICES, max_size=4),
    st.sets(st.integers(-3, 9), max_size=4),
    st.sampled_from(
        [
            *(
                torch.tensor(3),
                torch.tensor([1, 2]),
                torch.tensor([True, False]),
                torch.ones(2),
                torch.eye(2),
            ),
            *(
                np.arange(4),
                np.array(2),
                np.array([], dtype=np.int64),
                {},
                {1: 2},
                bytearray(b"1"),
                iter([1, 2]),
            ),
        ]
    ),
    st.builds(itertools.count),
)


def _used_dump(name: str, value: Any) -> None:
    dump = mf.Dump("d", SITE, **{name: value})
    assert len(str(dump.to_json())) < 22 * MAX_LISTED  # numbers have at most 20 characters, and ", "
    for number in (0, 7, 10**12):
        dump.wants_iteration(number)
        dump.wants_microbatch(number)
        is_selected(number, dump.samples)
    select_positions(dump.tokens, 16, 0, 0)


def _used_path(value: Any) -> None:
    assert "~" not in Path(mf.Dump(value, SITE).path).parts
    mf.Statistics(value, SITE)
    with suppress(FlexError):
        mf.open_dump(value)
    with suppress(FlexError):
        mf.open_statistics(value)
    mf.open_dump(value)


OPTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        f"Dump({name})": lambda value, name=name: _used_dump(name, value)
        for name in (
            "iterations",
            "microbatches",
            "samples",
            "tokens",
            "every",
            "queue_bytes",
            "part_bytes",
            "dtype",
            "reduce",
            "order",
            "runs",
            "when_full",
            "on_error",
        )
    },
    "Dump(path)": _used_path,
    "Statistics(every)": lambda value: mf.Statistics("d", SITE, every=value),
    **{
        f"Select({name})": lambda value, name=name: mf.Select(**{name: value})
        for name in ("positions", "sequences", "samples", "heads", "neurons", "of")
    },
    **{
        f"scale({name})": lambda value, name=name: edits.scale(2.0, **{name: value})
        for name in ("positions", "samples", "heads", "features")
    },
    "sampled(count)": lambda value: sampled(value).positions(16, 0, 0),
    "sampled(seed)": lambda value: sampled(4, value).positions(16, 0, 0),
    **{
        f"Links({name})": lambda value, name=name: Links(**{name: value})
        for name in ("gpus_per_node", "nvlink", "network", "pcie")
    },
    "compare(iterations)": lambda value: compare("absent", "absent", iterations=value),
    "compare(learning_rate)": lambda value: compare("absent", "absent", learning_rate=value),
    "compare(tolerance)": lambda value: compare("absent", "absent", value),
}


@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES)
def test_any_argument_is_used_or_refused_in_one_line(option: str, value: Any) -> None:
    _refused(lambda: OPTIONS[option](value))


@pytest.mark.parametrize(
    ("given_value", "normalized"),
    [
        (range(20_000_000), slice(0, 20_000_000, 1)),
        (range(10, 0, -3), slice(1, 11, 3)),
        (range(-2, 2), (-2, -1, 0, 1)),
        (slice(None, None, 8), slice(None, None, 8)),
        (torch.tensor([4, 1]), (4, 1)),
        ({3}, (3,)),
        (-1, (-1,)),
    ],
)
def test_an_argument_keeps_its_numbers(given_value: Any, normalized: Any) -> None:
    assert normalize_numbers("tokens", given_value, from_end=True) == normalized


def test_a_long_range_of_iterations_costs_nothing() -> None:
    dump = mf.Dump("d", SITE, iterations=range(0, 20_000_000, 5))
    assert dump.to_json()["iterations"] == {"slice": [0, 19_999_996, 5]}
    assert [n for n in (0, 5, 7, 19_999_995, 20_000_000) if dump.wants_iteration(n)] == [0, 5, 19_999_995]


@pytest.mark.parametrize(
    "value",
    [
        slice(None, None, 0),
        slice(None, None, -1),
        slice(5, 3),
        slice(0, 0),
        slice(0.5, 2),
        range(3, 3),
        [True],
    ],
)
@pytest.mark.parametrize("name", ["iterations", "microbatches", "samples", "tokens"])
def test_nothing_selected_is_refused_where_it_is_given(name: str, value: Any) -> None:
    with raises(FlexError, f"{name}={format_value(value)}"):
        mf.Dump("d", SITE, **{name: value})


def test_more_numbers_than_a_selection_lists_are_refused_at_once() -> None:
    for value in (itertools.count(), [0] * (MAX_LISTED + 1)):
        with raises(FlexError, "samples", f"{MAX_LISTED:,}"):
            mf.Dump("d", SITE, samples=value)
    with raises(FlexError, "--tokens", "0:20000000,5", f"{MAX_LISTED:,}"):
        parse_numbers("0:20000000,5", "--tokens")


def test_spans_select_of_the_numbers_there_are() -> None:
    there = [0, 100, 200, 1000]
    assert select_present(parse_spans("0:1000:100", "-i"), there, "d") == [0, 100, 200]
    assert select_present(parse_spans("1000,0:150", "-i"), there, "d") == [0, 100, 1000]
    assert select_present(normalize_spans("iterations", [range(0, 101), slice(900, None)]), there, "d") == [
        *(0, 100, 1000)
    ]
    for text, named in (("50", 50), ("1:99", "0, 100, 200, 1000")):
        with raises(FlexError, named, "d"):
            select_present(parse_spans(text, "-i"), there, "d")


# --- commands

HOSTILE = [
    "",
    "0",
    "-1",
    "0.0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "::0",
    "5:3",
    "::-1",
    "1:2:3:4",
    "9" * 5000,
    "²",
    "x\x01",
]
NUMERIC = {  # the options of commands whose values are numbers or ranges
    *(
        "--iterations",
        "--keep-every",
        "--before",
        "--rows",
        "--learning-rate",
        "--tolerance",
        "--every",
        "--disk",
    ),
    *(
        "--tokens",
        "--microbatches",
        "--gpus-per-node",
        "--nvlink",
        "--network",
        "--pcie",
        "--world-size",
        "--mesh",
    ),
    *("--stage", "--most-megabytes", "--processes"),
    *("--layers", "--temperature", "--iteration", "--vocabulary"),
}
PLAIN = {  # those whose values are names, paths or patterns
    *(
        "--version",
        "--json",
        "--html",
        "--allow-missing",
        "--reference",
        "--sites",
        "--parameters",
        "--gradients",
    ),
    *(
        "--per-iteration",
        "--format",
        "--force",
        "--all",
        "--dry-run",
        "--live",
        "--config",
        "--dtype",
        "--mean",
    ),
    *("--read", "--edit", "--dump", "--match", "--site", "--of", "--compare", "--out"),
    *("--against", "--without", "--checkpoint", "--no-parameters", "--dry", "--hidden"),
}
GPT = [
    "--num-layers",
    "2",
    "--hidden-size",
    "8",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--max-position-embeddings",
    "8",
]
GPT += ["--micro-batch-size", "1", "--global-batch-size", "2", "--vocab-size", "16"]
WORDS = {  # of each command, before and after the option
    "dump show": (["dump", "show", "dump", SITE], []),
    "dump export": (["dump", "export", "dump", "out"], []),
    "dump prune": (["dump", "prune", "dump", "--dry-run"], []),
    "compare": (["compare", "dump", "dump"], []),
    "stats show": (["stats", "show", "absent"], []),
    "estimate": (["estimate", "-s", SITE], ["--", *GPT]),
    "sites": (["sites"], ["--", *GPT]),
    "rollout": (["rollout", "absent.jsonl", "dump"], []),
    "view": (["view", "dump", "--out", "page.html"], []),
    "align": (["align", "absent"], ["--", "absent.py"]),
    "two-layouts": (["two-layouts", "--dry", "--against", "--a 1"], ["--", "absent.py", "--a", "2"]),
}
FINE = {("dump prune", "--before"), ("align", "--tokens")}  # any number is one; the name of a file


def _options() -> Iterator[tuple[str, str]]:
    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        for inner in getattr(command, "commands", {}).values():
            yield from walk(inner, f"{name} {inner.name}".strip())
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield name, next(o for o in parameter.opts if o.startswith("--"))

    yield from walk(typer.main.get_command(app), "")


def test_every_option_of_a_command_is_known_to_these_tests() -> None:
    assert {option for _, option in _options()} - PLAIN <= NUMERIC


@pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(n, o, id=f"{n} {o}") for n, o in sorted(_options()) if o in NUMERIC and n in WORDS],
)
def test_a_hostile_number_of_a_command_is_one_error(
    name: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = Command(monkeypatch, capsys, tmp_path)
    dumps.write(
        tmp_path / "dump", {SITE: Given(random(1, 2, 8, 4), SEQUENCE)}, mesh={"tp": 2}, gradients=False
    )
    before, after = WORDS[name]
    for value in HOSTILE:
        prefixed = f"tp={value}" if option == "--mesh" else value
        done = command(*before, f"{option}={prefixed}", *after)
        lines = done.err.splitlines()
        if done.status:
            usage = [line for line in lines if not line.startswith(("Usage: ", "Try ")) and line]
            assert len(usage) == 1, (value, lines)
            assert len(usage[0]) <= MAX_MESSAGE + 20, value
        if (name, option) not in FINE:
            assert done.status == 2 or _is_number(value), (value, done)


def _is_number(text: str) -> bool:
    """Whether some option may take the value: a count or a rate of 0 may be one, -1 a position."""
    return text in ("0", "-1", "0.0", "inf") or math.isfinite(_float(text))


def _float(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return math.nan


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["estimate", "-s", SITE, "--tokens", "::0"], ["--tokens", "::0", "0"]),
        (["estimate", "-s", SITE, "--disk", "0"], ["--disk", "0.0"]),
        (["estimate", "--read", SITE, "-s", SITE, "--tokens", "0.0"], ["--tokens", "0.0"]),
        (["estimate", "-s", SITE, "--mesh", "tp=²"], ["--mesh"]),
    ],
)
def test_a_number_is_refused_before_the_model_is_built(
    words: list[str], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    done = Command(monkeypatch, capsys, tmp_path)(*words, "--", "--no-such-flag")
    assert done.status == 2
    for value in named:
        assert value in done.err
    assert "no-such-flag" not in done.err
