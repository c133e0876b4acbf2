"""docs/troubleshooting.md: the package has each message, and mistakes raise the messages of their rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_flex as mf
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GENERATED = ("matches no site; nearest:", "matches no site; of")  # put together from parts


class Model(nn.Module):
    """Two layers, so that names can be misspelled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def rows() -> list[list[str]]:
    """The parts of the message of each row."""
    text = PAGE.read_text(encoding="utf-8")
    firsts = re.findall(r"^\| (`.*?) \|", text[text.index("## Messages") :], re.MULTILINE)
    return [re.findall(r"`([^`]+)`", first) for first in firsts]


@cache
def texts() -> str:
    """Every text in the source of the package; `{}` is in the place of a value."""
    found = []
    for path in sorted((ROOT / "megatron_flex").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_package_has_the_message(row: list[str]) -> None:
    assert [part for part in row if part not in (*GENERATED, "there are") and part not in texts()] == []


def edit(current_module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs[:1]


def step(*hooks: mf.HookFunction, **options: Any) -> mf.FlexModel:
    """Attach to the model, call it, and restore it."""
    model = Model()
    with mf.attach(model, list(hooks), **options) as flex:
        model(torch.ones(2, 4))
    return flex


def register_twice() -> None:
    hook = mf.HookFunction("layers.0")
    mf.attach(Model(), [hook]).register_forward_hook(hook)


def read_another_capture() -> None:
    model = Model()
    with mf.attach(model, [mf.HookFunction("layers.0")]) as flex:
        model(torch.ones(2, 4))
        flex.output_dict["layers.1"]


MISTAKES: dict[str, Callable[[], Any]] = {
    "matches no site; nearest:": lambda: step(mf.HookFunction("layer.0")),
    "matches no site; of": lambda: step(mf.HookFunction("layers.7")),
    "which names do not contain": lambda: step(mf.HookFunction("layers.0, layers.1")),
    "unpack_idx=": lambda: step(mf.HookFunction("layers.0", unpack_idx=3)),
    "cannot be called with the four arguments": lambda: step(mf.HookFunction("layers.0", lambda x: x)),
    "takes a HookFunction": lambda: mf.attach(Model(), ["layers.0"]),  # type: ignore[list-item]
    "give attach(model, [hook])": lambda: mf.attach(Model(), mf.HookFunction("layers.0")),  # type: ignore[arg-type]
    "is registered already": register_twice,
    "neither saves nor edits": lambda: mf.HookFunction("layers.0", save=False),
    "entries under one name": lambda: step(
        mf.HookFunction("layers.0"), mf.HookFunction("layers.0", select=mf.Select(dims={0: 0}))
    ),
    "pass the names of all dims": lambda: step(mf.HookFunction("layers.0", select=mf.Select(samples=0))),
    "never fired on any rank": lambda: step(mf.HookFunction("layers.0", hook_type="full_backward")),
    "the editing function returned": lambda: step(mf.HookFunction("layers.0", edit)),
    "not the expected": lambda: step(mf.HookFunction("layers.0", expected_shape=(None, 5))),
    "nothing was captured at": read_another_capture,
    "this FlexModel is closed": lambda: step().register_forward_hook(mf.HookFunction("layers.0")),
    "has no run of a dump in it": lambda: mf.open_dump(Path(__file__).parent),
}


@pytest.mark.parametrize("first", MISTAKES)
def test_a_mistake_raises_the_message_of_its_row(first: str) -> None:
    (row,) = [row for row in rows() if row[0] == first]
    with pytest.raises((mf.FlexError, KeyError)) as raised:
        MISTAKES[first]()
    assert [part for part in row if part not in str(raised.value)] == []
