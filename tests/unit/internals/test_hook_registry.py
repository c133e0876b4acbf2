"""What the registry does when hooks are added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron_flex as mf
from megatron_flex import HookFunction
from megatron_flex.runtime.hook_registry import HookRegistry


def test_attaching_a_hook_leaves_those_that_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many hooks is placed once, however many are attached behind it."""
    placed: list[HookFunction] = []
    put = HookRegistry._put
    monkeypatch.setattr(
        HookRegistry, "_put", lambda self, entry: (placed.append(entry.hook), put(self, entry))
    )
    hooks = [HookFunction(str(n), hook_type=kind) for n in range(20) for kind in ("forward", "tensor")]
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    with mf.attach(model, hooks) as flex:
        assert placed == hooks
        model(torch.ones(1, 2)).sum().backward()
        assert len(flex.output_dict) == 40
