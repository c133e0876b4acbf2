"""What hooks cost in Python: our calls in a forward and a backward pass; and which dispatcher does what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher
from megatron_flex.runtime.hook_dispatcher import HookDispatcher
from megatron_flex.runtime.pass_builder import PassBuilder

OURS = str(Path(mf.__file__).parent)


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


# Calls in a pass of a model of three layers, once plans are found; more than these is a regression.
HELD: dict[str, tuple[dict[str, Any], int]] = {
    "read": ({"module_name": "a:output"}, 28),
    "edit": ({"module_name": "a:output", "editing_function": doubled}, 45),
    "preset edit": ({"module_name": "a:output", "editing_function": mf.edits.scale(2.0)}, 37),
    "gradient": ({"module_name": "b:output", "hook_type": "tensor"}, 62),
    "edit of a gradient": (
        {"module_name": "b:output", "hook_type": "tensor", "editing_function": doubled},
        99,
    ),
    "gradient of a parameter": ({"module_name": "b.weight", "hook_type": "tensor"}, 46),
}


def _count_calls(hook: dict[str, Any]) -> int:
    model = nn.Sequential()
    for name in "abc":
        model.add_module(name, nn.Linear(8, 8))
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

    with mf.FlexModel(model) as flex:
        flex.session.hooks.add(mf.HookFunction(**hook))
        for _ in range(3):
            calls, before = 0, sys.getprofile()
            with flex.step():
                sys.setprofile(note)
                try:
                    model(torch.ones(2, 8)).sum().backward()
                finally:
                    sys.setprofile(before)
    return calls


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """The calls of each hook, in a fresh process: frameworks that other tests imported are asked, too."""
    command = [sys.executable, __file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(OURS).parent), *sys.path])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, int] = json.loads(ran.stdout)
    return found


@pytest.mark.skipif(sys.version_info < (3, 12), reason="comprehensions are calls before Python 3.12")
@pytest.mark.parametrize("name", HELD)
def test_calls_of_a_pass(name: str, counted: dict[str, int]) -> None:
    assert 0 < counted[name] <= HELD[name][1]


def test_each_dispatcher_has_one_responsibility() -> None:
    kinds = (CaptureDispatcher, PassBuilder, GradientDispatcher, HookDispatcher)
    assert [kind.__bases__ for kind in kinds] == [(object,)] * 4
    with mf.FlexModel(nn.Linear(2, 2)) as flex:
        dispatcher = flex.session.dispatcher
        parts = dispatcher.captures, dispatcher.passes, dispatcher.gradients
        assert [type(p) for p in parts] == [CaptureDispatcher, PassBuilder, GradientDispatcher]
        assert dispatcher.gradients.captures is dispatcher.passes.captures is dispatcher.captures
        assert dispatcher.gradients.passes is dispatcher.passes


if __name__ == "__main__":
    print(json.dumps({name: _count_calls(hook) for name, (hook, _) in HELD.items()}))
