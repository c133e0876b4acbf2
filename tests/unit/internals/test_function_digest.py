"""What of an editing function ranks compare: its code and what it reads, not what may differ anyhow."""

from __future__ import annotations

import functools
import json
import pathlib
import random
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import HookError, edits
from megatron_flex.runtime import function_agreement as agreement
from megatron_flex.runtime.function_digest import MAX_VALUES, digest_function
from tests.support.messages import missing_values, raises
from tests.support.pages import ROOT, mine

GLOBAL = 2.0


class Colour(Enum):
    RED = 1
    BLUE = 2


def code(function: Any) -> dict[str, str]:
    return digest_function(function).code


def closing(value: Any) -> Callable[..., Any]:
    return lambda module, inputs, save_ctx, modules: (inputs, value)


def compiled(source: str, file: str = "edit.py", **names: Any) -> Any:
    scope = dict(names)
    exec(compile(source, file, "exec"), scope)
    return scope["edit"]


SOURCE = (
    "def edit(module, inputs, save_ctx, modules, k={default}):\n    return inputs * {constant} + {name}(k)\n"
)


def test_where_the_code_is_does_not_count() -> None:
    text = SOURCE.format(default=1, constant=2, name="len")
    one, two = compiled(text, "/node1/a.py"), compiled("\n\n" + text, "/node2/b.py")
    assert digest_function(one) == digest_function(two)
    assert one.__code__ != two.__code__


@pytest.mark.parametrize(
    ("changed", "traits"),
    [
        ({"default": 3}, {"defaults"}),
        ({"constant": 3}, {"constants"}),
        ({"constant": 2.0}, {"constants"}),
        ({"name": "abs"}, {"names"}),
        ({"constant": "k"}, {"constants", "bytecode"}),
    ],
)
def test_other_code_is_found(changed: dict[str, Any], traits: set[str]) -> None:
    usual = {"default": 1, "constant": 2, "name": "len"}
    one, two = (code(compiled(SOURCE.format(**usual | more))) for more in ({}, changed))
    assert {n for n in one if one[n] != two[n]} == traits


def test_constants_in_functions_inside_count() -> None:
    text = "def edit(module, inputs, save_ctx, modules):\n    return (lambda x: x * {})(inputs)\n"
    assert code(compiled(text.format(2))) != code(compiled(text.format(3)))


class Odd:
    """What no rank may stop over."""

    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("odd")


SAME: dict[str, Callable[[int], Any]] = {
    "paths": lambda n: pathlib.Path(f"/node{n}/vectors"),
    "texts that are paths": lambda n: f"/node{n}/vectors",
    "objects by their address": lambda n: object(),
    "generators": lambda n: torch.Generator().manual_seed(n),
    "generators of Python": random.Random,
    "generators of numpy": np.random.default_rng,
    "devices": lambda n: torch.device("cuda", n),
    "sets": lambda n: {f"{i}" for i in (range(20) if n else reversed(range(20)))},
    "dicts": lambda n: dict.fromkeys((1, 2) if n else (2, 1), 0),
    "modules": lambda n: nn.Linear(2, 2).requires_grad_(bool(n)).apply(nn.init.zeros_ if 0 else _zero),
    "odd objects": lambda n: Odd(),
    "lambdas": lambda n: lambda x: x,
    "partials": lambda n: functools.partial(closing(1), k=2),
    "files of code": lambda n: compiled("def edit(x):\n    return x", f"/node{n}.py"),
    "libraries": lambda n: torch.nn.functional.gelu,
}


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


@pytest.mark.parametrize("name", SAME)
def test_values_that_are_the_same(name: str) -> None:
    one, two = (digest_function(closing(SAME[name](n))) for n in (0, 1))
    assert one == two
    assert len(one.values) >= 1, "it is looked at"


class Scaled:
    kind = "a"
    __slots__ = ("__dict__", "scale")

    def __init__(self, scale: float, rank: int = 0, text: str = "") -> None:
        self.scale, self.rank, self.text = scale, rank, text

    def _scaled(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale * len(self.kind) * len(self.name)

    @property
    def name(self) -> str:
        return self.text

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return self._scaled(inputs)

    def edit(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return self._scaled(inputs)


class Net(nn.Module):
    def __init__(self, scale: float, weight: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), scale
        nn.init.constant_(self.linear.weight, weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return self.linear(inputs) * self.scale


def nested(scale: float) -> Any:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    return lambda module, inputs, save_ctx, modules: scaled(inputs)


def wrapped(scale: float) -> Any:
    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * scale

    @functools.wraps(edit)
    def around(*args: Any) -> Tensor:
        return edit(*args)

    return around


# The name of what differs with the number, and the function in which it does.
DIFFERENT: dict[str, tuple[str, Callable[[int], Any]]] = {
    "number": ("value", closing),
    "kind of number": ("value", lambda n: closing(1.0 if n == 1 else True)),
    "text": ("value", lambda n: closing(f"text {n}")),
    "list": ("value", lambda n: closing([1, (2, n)])),
    "dict": ("value", lambda n: closing({"a": {"b": n}})),
    "enum": ("value", lambda n: closing(Colour(n))),
    "dtype": ("value", lambda n: closing((torch.float32, torch.int8, torch.bool)[n])),
    "tensor": ("value", lambda n: closing(torch.full((300, 7), float(n)).t())),
    "last entry": ("value", lambda n: closing(torch.eye(9)[:, : 10 - n].tril()[-1])),
    "shape": ("value", lambda n: closing(torch.zeros(n, 2, device="meta"))),
    "array": ("value", lambda n: closing(np.zeros((3, n)))),
    "weights": ("value", lambda n: closing(Net(1, n))),
    "function": ("value", lambda n: closing((len, abs, max)[n])),
    "function inside": ("scale", nested),
    "cached": ("value", lambda n: functools.cache(closing(n))),
    "decorated": ("scale", wrapped),
    "argument": ("value", lambda n: functools.partial(_given, n)),
    "keyword": ("value", lambda n: functools.partial(_given, value=n)),
    "slot": ("scale", Scaled),
    "method": ("scale", lambda n: Scaled(n).edit),
    "property": ("text", lambda n: Scaled(1, text=str(n))),
    "parameter": ("linear", lambda n: Net(1, n)),
    "attribute of a module": ("scale", lambda n: Net(n, 1)),
    "global": ("GLOBAL", lambda n: compiled("def edit(m, x, c, t): return x * GLOBAL", GLOBAL=n)),
    "in a chain": ("value", lambda n: edits.scale(2.0) | closing(n)),
    "on parts": ("value", lambda n: mf.local()(closing(n))),
}


def _given(value: Any, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * value


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ(name: str) -> None:
    what, make = DIFFERENT[name]
    one, again, two = (digest_function(make(n)) for n in (1, 1, 2))
    assert one == again
    assert one.code == two.code, "its code is the same"
    assert one.values.keys() == two.values.keys()
    differing = [n for n in one.values if one.values[n] != two.values[n]]
    assert [n for n in differing if not missing_values(n, f"'{what}'")]
    assert all(len(text) <= 60 for text in one.values.values())


@pytest.mark.parametrize("name", [n for n in DIFFERENT if n != "in a chain"])  # which holds no mark
def test_what_is_declared_is_not_compared(name: str) -> None:
    variable, make = DIFFERENT[name]
    one, two = (make(n) for n in (1, 2))
    if name == "method":
        with raises(HookError, "rank_dependent()", "Scaled.edit"):
            mf.rank_dependent(variable)(one)
        one, two = (mf.rank_dependent(variable)(Scaled(n)).edit for n in (1, 2))
    else:
        one, two = (mf.rank_dependent(variable)(f) for f in (one, two))
    assert digest_function(one) == digest_function(two)


def test_declaring() -> None:
    for names in ((), (3,)):
        with raises(HookError, "rank_dependent()", "@mf.rank_dependent('rank')"):
            mf.rank_dependent(*names)
    with raises(HookError, "rank_dependent()", "<built-in function len>"):
        mf.rank_dependent("x")(len)

    @mf.rank_dependent("rank")
    @mf.rank_dependent("seed")
    def edit(m: Any, x: Tensor, c: Any, t: Any, rank: int = 1, seed: int = 2, scale: float = 3.0) -> Tensor:
        return x

    assert code(edit)["defaults"] == "scale=3.0"


def test_attributes_that_are_not_read_do_not_count() -> None:
    assert digest_function(Scaled(1.0, rank=0)) == digest_function(Scaled(1.0, rank=1))
    assert digest_function(Scaled(1.0, rank=0).edit) == digest_function(Scaled(1.0, rank=1).edit)


def test_what_is_of_the_model_does_not_count() -> None:
    for make in (lambda net: net, lambda net: net.linear, lambda net: net.linear.weight, nn.Sequential):
        found = []
        for n in (1, 2):
            net = Net(1, n)
            own = frozenset(id(one) for one in (*net.modules(), *net.parameters()))
            found.append(digest_function(closing(make(net)), own))
        assert found[0] == found[1]


def test_presets_say_themselves_what_they_are_and_a_persons_own_are_read() -> None:
    assert digest_function(edits.steer(torch.ones(3))) == ({}, {})

    class Half(edits.Edit):
        def declare(self) -> edits.EditTraits:
            return edits.EditTraits(unsharded_dims=())

        def edit(self, inputs: Tensor, module: Any, modules: Any) -> Tensor:
            return inputs * 0.5

    class Third(edits.Edit):
        def declare(self) -> edits.EditTraits:
            return edits.EditTraits(unsharded_dims=())

        def edit(self, inputs: Tensor, module: Any, modules: Any) -> Tensor:
            return inputs * 0.3

    assert code(Half()) == code(Half())
    assert code(Half())["constants"] != code(Third())["constants"]


def test_builtins_and_classes_are_compared_by_name() -> None:
    assert code(max) == code(max)
    assert code(max) != code(min)
    assert (
        code(functools.partial(max, key=id))["function"] != code(functools.partial(min, key=id))["function"]
    )


def test_functions_that_hold_each_other_end() -> None:
    table: dict[str, Any] = {}

    def one(*args: Any) -> Any:
        return table, two

    def two(*args: Any) -> Any:
        return table, one

    table["one"] = one
    assert digest_function(one) == digest_function(one)


def test_what_is_said_is_bounded() -> None:
    many = functools.partial(closing(1), **{f"k{n}": n for n in range(1000)})
    other = functools.partial(closing(1), **{f"k{n}": n + (n == 200) for n in range(1000)})
    assert len(digest_function(many).values) == MAX_VALUES + 1
    assert digest_function(many) != digest_function(other)
    long = {f"{n}{'x' * 100}": "y" * 60 for n in range(8)}
    for hooks in (1, 200, 20_000):
        differing = [{**long, "value": str(n)} for n in range(hooks)]
        text = agreement.pack_texts(differing)
        assert len(text) <= agreement.MAX_SENT
        again = agreement.pack_texts([*differing[:-1], {**long, "value": "other"}])
        assert list(agreement.find_mismatches({0: text, 1: again}))
        assert not list(agreement.find_mismatches({0: text, 1: text}))
        assert json.loads(text)["hooks"]


def test_a_function_of_many_hooks_is_told_once() -> None:
    one, two = ([{"constants": d}] * 500 for d in "ab")
    text = agreement.pack_texts(one)
    assert len(json.loads(text)["functions"]) == 1
    (found,) = agreement.find_mismatches({0: text, 1: agreement.pack_texts(two)})
    assert found.hook == 0
    assert found.ranks == {"a": [0], "b": [1]}


def test_the_page_runs() -> None:
    scope: dict[str, Any] = {}
    (block,) = mine(ROOT / "docs/debugging.md")
    exec(block, scope)
    one, two = (scope["logging_from"](rank) for rank in (0, 1))
    assert digest_function(one) == digest_function(two)
    assert digest_function(one).code
