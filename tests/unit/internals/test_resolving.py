"""Settings made into hooks, dumps and statistics; functions by name; words for numbers."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_flex import edits
from megatron_flex.dump import Dump, sampled
from megatron_flex.errors import FlexError
from megatron_flex.launch.launch_settings import DumpSettings, EditSettings, Settings, StatisticsSettings
from megatron_flex.launch.settings_resolver import FILE_MODULE_PREFIX, load_function, resolve_settings
from megatron_flex.ranges import parse_numbers
from megatron_flex.runtime import HookFunction
from megatron_flex.statistics import Statistics
from tests.support.messages import raises

HOOKS = """
import sys
sys.counted = getattr(sys, "counted", 0) + 1

def double(current_module, inputs, save_ctx, modules):
    return inputs * 2

def short(inputs):
    return inputs

class Inner:
    @staticmethod
    def triple(current_module, inputs, save_ctx, modules):
        return inputs * 3

number = 3
"""


@pytest.fixture(autouse=True)
def nothing_stays_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "counted", 0, raising=False)
    yield
    for name in set(sys.modules) - before:
        if name.startswith((FILE_MODULE_PREFIX, "flex_named")):
            del sys.modules[name]


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path / "hooks.py"


def ran(edit: Any, value: float = 1.0) -> float:
    return float(edit(None, torch.tensor([value]), Namespace(), nn.ModuleDict()))


# --- functions by name


def test_functions_of_files(hooks: Path) -> None:
    assert ran(load_function("hooks.py:double")) == 2
    assert ran(load_function(f"{hooks}:Inner.triple")) == 3
    assert ran(load_function("./hooks.py:double")) == 2
    assert sys.counted == 1, "a file is run once, whatever it is called by"
    assert "hooks" not in sys.modules
    assert str(hooks.parent) not in sys.path


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for n in (2, 3):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "hooks.py").write_text(f"def f(m, inputs, c, ms): return inputs * {n}")
    assert [ran(load_function(f"{n}/hooks.py:f")) for n in (2, 3)] == [2, 3]


def test_a_file_can_be_what_dataclasses_and_pickles_want(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n"
        "@dataclass\nclass Scale:\n    factor: float = 4.0\n"
        "    def __call__(self, module, inputs, context, modules): return inputs * self.factor\n"
        "scale = pickle.loads(pickle.dumps(Scale()))\n"
    )
    assert ran(load_function("data.py:scale")) == 4


def test_functions_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flex_named").mkdir()
    (tmp_path / "flex_named" / "__init__.py").write_text("")
    (tmp_path / "flex_named" / "hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    assert ran(load_function("flex_named.hooks:double")) == 2
    assert ran(load_function("flex_named.hooks:Inner.triple")) == 3
    with raises(FlexError, "flex_named.hoks", "file.py"):
        load_function("flex_named.hoks:double")


def test_nothing_is_imported_that_is_not_named(hooks: Path) -> None:
    for name in ("hooks.py", "hooks.double"):
        with raises(FlexError, name):
            load_function(name)
    resolve_settings(Settings(sites=("a",), edits=(EditSettings(edit="zero"),)))
    assert sys.counted == 0


def test_presets_and_functions_one_behind_the_other(hooks: Path) -> None:
    assert repr(load_function("scale=2 | clamp=-1@1")) == repr(edits.parse("scale=2 | clamp=-1@1"))
    assert repr(load_function("ablate_heads=0:4")) == repr(edits.ablate_heads(slice(0, 4)))
    both = load_function("scale=5 | hooks.py:double|scale=0.5")
    assert repr(both) == "scale(5.0) | double | scale(0.5)"
    assert ran(both, 3) == 15


def test_to_ablate_is_to_put_zeros() -> None:
    assert isinstance(load_function("zero"), edits.zero)
    assert repr(load_function("zero@positions=-1")) == repr(edits.zero(positions=-1))
    assert ran(load_function("zero"), 3) == 0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("hooks.py:dubble", ("hooks.py", "dubble", "double")),
        ("hooks.py:Inner.tripel", ("hooks.py", "Inner.tripel", "triple")),
        ("hooks.py:number", ("hooks.py:number", "int")),
        ("hooks.py", ("hooks.py", "file.py")),
        ("hooks.py:", ("hooks.py:", "file.py")),
        ("none.py:f", ("none.py",)),
        ("flex_none:f", ("flex_none", "file.py")),
        ("flex_none.inner:f", ("flex_none", "file.py")),
        ("os.path.join", ("os.path.join", "os.path:join")),
        ("sclae=2", ("sclae", "scale")),
        ("scale=x", ("scale", "factor='x'")),
        ("scale=2 |", ()),
    ],
)
def test_what_cannot_be_named(said: str, message: tuple[str, ...], hooks: Path) -> None:
    with raises(FlexError, *message):
        load_function(said)


@pytest.mark.parametrize(
    ("source", "error", "line"),
    [
        ("\ndef f(:\n", "SyntaxError: invalid syntax", 2),
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("import flex_nowhere\n", "ModuleNotFoundError: No module named 'flex_nowhere'", 1),
        ("\n\nraise RuntimeError('one\\ntwo')\n", "RuntimeError: one two", 3),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
        ("import torch\n\ntorch.zeros(2).reshape(3)\n", "RuntimeError", 3),
        ("import json\njson.loads('x')\n", "JSONDecodeError", 2),  # raised in the standard library
        ("from packaging.version import Version\nVersion('x')\n", "InvalidVersion", 2),  # in site-packages
        ("def g():\n    return h\ng()\n", "NameError: name 'h' is not defined", 2),
    ],
)
def test_errors_in_a_file_are_told_with_its_line(source: str, error: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    loaded = {name for name in sys.modules if name.startswith(FILE_MODULE_PREFIX)}  # by other tests
    for _ in range(2):  # not half imported the second time
        with raises(FlexError, "broken.py", file, line, error):
            load_function("broken.py:f")
    assert {name for name in sys.modules if name.startswith(FILE_MODULE_PREFIX)} == loaded


def test_errors_in_a_module_are_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flex_named_wrong.py").write_text("\nimport flex_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(FlexError, "flex_nowhere", "flex_named_wrong.py", "2"):
        load_function("flex_named_wrong:f")


# --- edits


def test_edits_are_hooks_where_they_are_wanted(hooks: Path) -> None:
    out = resolve_settings(
        Settings(
            sites=("a", "b:mid", "a"),
            edits=(
                EditSettings(edit="hooks.py:double", groups=("mine",), enabled=False),
                EditSettings(site="c", edit="zero", hook_type="tensor", run="once"),
            ),
        )
    )
    assert [(h.where, h.hook_type, h.run, h.save) for h in out.edits] == [
        ("a", "forward", "replicated", False),
        ("b:mid", "forward", "replicated", False),
        ("c", "tensor", "once", False),
    ]
    assert out.edits[0].editing_function is out.edits[1].editing_function
    assert [h.groups for h in out.edits] == [{"edit", "mine"}, {"edit", "mine"}, {"edit"}]
    assert out.waiting == out.edits[:2]
    assert [h.on_error for h in out.edits] == ["raise"] * 3
    assert (out.dumps, out.statistics) == ((), ())


def test_edits_that_fail_are_left_out_if_that_is_said() -> None:
    out = resolve_settings(Settings(on_error="skip", edits=(EditSettings(edit="zero", site="a"),)))
    assert [h.on_error for h in out.edits] == ["skip"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"edit": "hooks.py:short", "site": "a"},
            ("--flex-edit hooks.py:short", "short(inputs)"),
        ),
        ({"edit": "hooks.py:dubble", "site": "a"}, ("--flex-edit hooks.py:dubble", "dubble", "double")),
        ({"edit": "scalee=2", "site": "a"}, ("--flex-edit scalee=2", "scalee", "scale")),
        ({"edit": "zero"}, ("--flex-edit zero", "--flex-sites")),
        ({"edit": "zero", "site": " "}, ("--flex-edit zero", "--flex-sites")),
        (
            {"edit": "zero", "site": "a", "groups": ["all"]},
            ("--flex-edit zero", "all"),
        ),
    ],
)
def test_edits_that_cannot_be(edit: dict[str, Any], message: tuple[str, ...], hooks: Path) -> None:
    with raises(FlexError, *message):
        resolve_settings(Settings(edits=(EditSettings(**edit),)))


# --- dumps and statistics

DUMPS: dict[str, tuple[Any, Any]] = {  # what is set, and what the Dump then has
    "path": ("there", "there"),
    "sites": (["x"], ["x"]),
    "every": (3, 3),
    "iterations": ("0:9:3", slice(0, 9, 3)),
    "microbatches": ("1", frozenset({1})),
    "samples": ("0,2:4", frozenset({0, 2, 3})),
    "tokens": ("random:4", sampled(4)),
    "reduce": ("mean", "mean"),
    "dtype": ("bf16", torch.bfloat16),
    "gradients": (True, True),
    "parameters": (["w"], ["w"]),
    "when_full": ("drop", "drop"),
    "on_error": ("raise", "raise"),
    "replicas": (True, True),
    "durable": (True, True),
    "order": ("blocks", "blocks"),
    "runs": ("all", "all"),
    "queue_bytes": (5, 5),
    "part_bytes": (7, 7),
    "groups": (["t"], ("dump", "t")),
}
MEASURED: dict[str, tuple[Any, Any]] = {
    "path": ("there", "there"),
    "sites": (["x"], ["x"]),
    "every": (3, 3),
    "gradients": (True, True),
    "parameters": (["w"], ["w"]),
    "histogram": (False, False),
    "writers": (False, False),
    "groups": (["t"], ("stats", "t")),
}


def dump_of(**fields: Any) -> Dump:
    (out,) = resolve_settings(Settings(sites=("a",), dumps=(DumpSettings(**{"path": "d", **fields}),))).dumps
    return out


def statistics_of(**fields: Any) -> Statistics:
    (out,) = resolve_settings(Settings(sites=("a",), statistics=StatisticsSettings(**fields))).statistics
    return out


def test_a_dump_with_nothing_said_is_a_dump_with_nothing_said() -> None:
    assert vars(dump_of()) == vars(Dump("d", ["a"], groups=["dump"]))
    assert vars(statistics_of()) == vars(Statistics("flex-stats", ["a"], groups=["stats"]))


@pytest.mark.parametrize("name", DumpSettings.model_fields)
def test_each_setting_of_a_dump_reaches_it(name: str) -> None:
    said, wanted = DUMPS[name]
    plain, made = vars(dump_of()), vars(dump_of(**{name: said}))
    assert {n for n in plain if plain[n] != made[n]} == {name}
    assert made[name] == wanted


@pytest.mark.parametrize("name", StatisticsSettings.model_fields)
def test_each_setting_of_statistics_reaches_them(name: str) -> None:
    said, wanted = MEASURED[name]
    plain, made = vars(statistics_of()), vars(statistics_of(**{name: said}))
    assert {n for n in plain if plain[n] != made[n]} == {name}
    assert made[name] == wanted


def test_what_is_not_said_comes_from_the_top() -> None:
    top: dict[str, Any] = {"sites": ("a", "a", "b"), "every": 5, "tokens": "0,1", "gradients": True}
    dumps = (
        DumpSettings(path="d"),
        DumpSettings(path="e", sites=("c",), every=2, tokens="3", gradients=False),
    )
    own = StatisticsSettings(sites=("c",), every=2, gradients=False)
    out = resolve_settings(Settings(**top, dumps=dumps, statistics=own))
    first, second = out.dumps
    assert (first.sites, first.every, first.tokens, first.gradients) == (["a", "b"], 5, (0, 1), True)
    assert (second.sites, second.every, second.tokens, second.gradients) == (["c"], 2, (3,), False)
    (measured,) = out.statistics
    assert (measured.sites, measured.every, measured.gradients) == (["c"], 2, False)
    (measured,) = resolve_settings(Settings(**top, statistics=StatisticsSettings())).statistics
    assert (measured.sites, measured.every, measured.gradients) == (["a", "b"], 5, True)


def test_parameters_alone_are_enough() -> None:
    (dump,) = resolve_settings(Settings(dumps=(DumpSettings(path="d", parameters=("w",)),))).dumps
    assert (dump.sites, dump.parameters) == ([], ["w"])


def test_the_home_folder_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dump_of(path="~/d").path == str(tmp_path / "d")
    assert statistics_of(path="~/d").path == str(tmp_path / "d")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"dumps": [{"path": "d"}]}, ("--flex-dump d", "--flex-sites PATTERN")),
        ({"statistics": {}}, ("--flex-stats flex-stats", "--flex-sites PATTERN")),
        ({"sites": ["a"]}, ("--flex-dump", "--flex-stats")),
        ({"every": 3}, ("--flex-dump", "--flex-stats")),
        ({"control": "x"}, ("--flex-dump", "--flex-stats")),
        ({"sites": ["a"], "dumps": [{"path": "d"}, {"path": "./d"}]}, ("{cwd}/d",)),
        ({"sites": ["a"], "dumps": [{"path": "d"}], "statistics": {"path": "d"}}, ("{cwd}/d",)),
    ],
)
def test_settings_that_cannot_be(said: dict[str, Any], message: tuple[str, ...], tmp_path: Path) -> None:
    with raises(FlexError, *(m.format(cwd=tmp_path) for m in message)):
        resolve_settings(Settings.model_validate(said))


@pytest.mark.parametrize("said", [{}, {"cpu": True}, {"estimate": True}, {"verify": 1}, {"list_sites": "**"}])
def test_no_hooks_where_none_are_wanted(said: dict[str, Any]) -> None:
    out = resolve_settings(Settings(sites=("a",) if said.keys() - {"cpu"} else (), **said))
    assert (out.edits, out.dumps, out.statistics) == ((), (), ())


# --- numbers in words


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("3", [3]),
        ("5,3,5", [5, 3, 5]),
        ("0:10:3", slice(0, 10, 3)),
        (":", slice(None)),
        ("4:", slice(4, None)),
        ("1,4:6,10:20:5", [1, 4, 5, 10, 15]),
    ],
)
def test_numbers_as_they_are_said(said: str, means: Any) -> None:
    assert parse_numbers(said, "--flex-dump-iterations") == means


@pytest.mark.parametrize(
    "said", ["", "x", "1,", "-1", "5:2", "0:9:0", "-3:4", "0:9:-1", "1:2:3:4", "1,4:", "0.5"]
)
def test_numbers_that_cannot_be_said(said: str) -> None:
    with raises(FlexError, "--flex-dump-iterations"):
        parse_numbers(said, "--flex-dump-iterations")


def test_hooks_have_every_setting_of_an_edit() -> None:
    """A setting that resolving forgets would be a flag that does nothing."""
    taken = {"edit", "site", "enabled"}
    assert set(EditSettings.model_fields) - taken <= set(vars(HookFunction("a")))
