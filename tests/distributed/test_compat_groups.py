"""Groups of hooks by the compatible calls, on a tensor parallel model that is called by itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import compat, gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
FC1 = [f"decoder.layers.{n}.mlp.linear_fc1" for n in range(2)]
FC2 = [f"decoder.layers.{n}.mlp.linear_fc2" for n in range(2)]


def said(do: Any, *args: Any, **kwargs: Any) -> str:
    """The error of a call."""
    from megatron_flex import FlexError

    try:
        do(*args, **kwargs)
    except FlexError as error:
        return str(error)
    return ""


def grouping(case: Case) -> dict[str, Any]:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    out: dict[str, Any] = {}

    def read(**how: Any) -> list[str]:
        output.clear()
        ranks.call(chunks, model=lambda *a, **k: flex(*a, **k, **how))
        assert all(len(t) == 1 for t in output.values())
        return sorted(output)

    flex.create_hook_group("first", "linear_fc1")
    one, two = HookFunction(FC2[0]), HookFunction(FC2[1])
    flex.register_forward_hook(one)
    flex.register_forward_pre_hook(two)
    out["all"] = read()
    out["group"] = read(groups="first")
    out["complement"] = read(groups="first", complement=True)
    out["none"] = read(groups=[])
    out["of hook"] = flex.get_hook_function_groups(one), flex.get_hook_function_groups(HookFunction("x"))
    out["of group"] = [h.module_name for h in flex.get_group_hook_functions("first")]
    flex.update_hook_groups([one, two], "second")
    flex.update_hook_groups(one, "third")
    flex.update_hook_groups("layers.1", "last")
    out["union"] = read(groups=["second", "first"])
    out["third"] = read(groups="third")
    out["last"] = read(groups="last")
    manager = flex._hook_fn_group_manager
    out["map"] = {h.module_name: groups for h, groups in manager.hook_fn_to_groups_map.items()}
    with flex.hooks("third"):
        out["scope"] = said(read) or read(groups="third")

    flex.remove_hook_groups("linear_fc1", "last")
    out["removed by text"] = read(groups="last")
    flex.remove_hook_groups([two], "last")
    out["vanished"] = "last" not in manager.groups, flex.get_group_hook_functions("last")
    flex.remove_hook_groups(one, "third")
    out["said"] = {
        "unknown group": said(flex, groups="third"),
        "not there": said(flex.remove_hook_groups, [one, two], "third"),
        "all": said(flex.remove_hook_groups, one, "all"),
        "no hook": said(flex.update_hook_groups, "linear_fc9", "new"),
        "no module": said(flex.create_hook_group, "new", "linear_fc9"),
        "kind": said(flex.create_hook_group, "new", "linear_fc1", hook_type="backwards"),
        "twice": said(flex.register_forward_hook, one),
        "no hook function": said(flex.update_hook_groups, [3], "new"),
    }
    waiting = HookFunction("decoder.layers.0")
    flex.update_hook_groups(waiting, "early")
    flex.register_forward_hook(waiting)
    out["early"] = read(groups="early")
    flex.restore()
    return out


@cache
def found() -> dict[str, Any]:
    first, second = run(2, grouping, TP2)
    assert second["map"] == first["map"]
    return first


@pytest.mark.versions
def test_create_hook_group() -> None:
    assert found()["group"] == FC1
    assert found()["of group"] == FC1


def test_groups_all_and_complement_of_a_call() -> None:
    assert found()["all"] == sorted(FC1 + FC2)
    assert found()["complement"] == FC2
    assert found()["none"] == []
    assert found()["union"] == sorted(FC1 + FC2)


def test_update_hook_groups() -> None:
    assert found()["third"] == [FC2[0]]
    assert found()["last"] == [FC1[1], FC2[1]]
    assert found()["scope"] == [FC2[0]]
    assert found()["early"] == ["decoder.layers.0"]


def test_remove_hook_groups() -> None:
    assert found()["removed by text"] == [FC2[1]]


def test_a_group_without_hooks_is_gone() -> None:
    assert found()["vanished"] == (True, [])


def test_get_hook_function_groups() -> None:
    assert found()["of hook"] == ({"all"}, set())


def test_get_group_hook_functions() -> None:
    assert found()["of group"] == FC1


def test_the_map_of_hooks_to_groups() -> None:
    assert found()["map"] == {
        FC1[0]: {"all", "first"},
        FC1[1]: {"all", "first", "last"},
        FC2[0]: {"all", "second", "third"},
        FC2[1]: {"all", "second", "last"},
    }


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown group", ("third",)),
        ("not there", ("third",)),
        ("all", ("all",)),
        ("no hook", ("linear_fc9", "module_name")),
        ("no module", ("linear_fc9",)),
        ("kind", ("hook_type", "backwards")),
        ("twice", (FC2[0],)),
        ("no hook function", ("int",)),
    ],
)
def test_what_is_refused(case: str, words: tuple[str, ...]) -> None:
    assert_names(found()["said"][case], *words)


def every_kind(case: Case) -> dict[str, Any]:
    """create_hook_group with each hook_type, a shape and an editing function."""
    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    out = {}
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"):
        text = "linear_fc2.weight" if kind == "tensor" else "linear_fc2"
        flex.create_hook_group(kind, text, (None,) * (2 if kind == "tensor" else 3), compat.edit, 0, kind)
        output.clear()
        ranks.call(chunks, model=lambda *a, k=kind, **kw: flex(*a, **kw, groups=k)).sum().backward()
        out[kind] = {n: [tuple(t.shape) for t in tensors] for n, tensors in output.items()}
    flex.restore()
    return out


def test_create_hook_group_with_every_hook_type() -> None:
    first, second = run(2, every_kind, TP2)
    stream, wide = (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN), (gpt.SEQUENCE, gpt.BATCH, gpt.FFN)
    assert second == first
    for kind, shape in (
        ("forward", stream),
        ("forward_pre", wide),
        ("full_backward", wide),
        ("full_backward_pre", stream),
    ):
        assert first[kind] == {name: [shape] for name in FC2}
    assert first["tensor"] == {f"{name}.weight": [(gpt.HIDDEN, gpt.FFN)] for name in FC2}


def scheduled(case: Case) -> list[Any]:
    """Groups while Megatron's schedule runs the FlexModel itself: chosen in a scope, too late in a call."""
    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    flex.create_hook_group("first", "linear_fc1")
    flex.create_hook_group("second", "linear_fc2")
    with flex.hooks("second"):
        gpt.step(case, [flex], 0, forward_only=True)
    names = sorted(output)

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = flex

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return flex(*args, **kwargs, groups="first")

    error = said(gpt.step, case, [Late()], 0, forward_only=True)
    flex.restore()
    return [names, error]


def test_groups_in_a_schedule() -> None:
    for names, error in run(2, scheduled, Case("pp2", pp=2, layers=2)):
        assert names == FC2
        assert_names(error, "with model.hooks(...)")


def read_only(case: Case) -> list[Any]:
    """Where a place can be read only, no hook of a group that edits is registered at all."""
    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})
    place = next(s for s in flex._flex.sites("**") if s.read_only_reason and s.point == "output").module
    error = said(flex.create_hook_group, "new", place.rpartition(".")[0], editing_function=compat.edit)
    none = flex.get_group_hook_functions("all")
    flex.create_hook_group("new", place)
    read = [h.module_name for h in flex.get_group_hook_functions("new")]
    flex.restore()
    return [place, error, none, read]


def test_a_group_that_would_edit_what_can_only_be_read() -> None:
    case = Case("mla tp2", tp=2, layers=1, mla="mended", q_rank=8, te=True)
    (place, error, none, read), _ = run(2, read_only, case)
    assert_names(error, f"{place}:output")
    assert none == []
    assert read == [place]
