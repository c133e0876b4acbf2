"""A hook that is reached while a CUDA graph is captured is an error at once, on a simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.support.accelerator import CUDA, move, simulated
from tests.support.messages import assert_names

KINDS = {
    "read": mf.HookFunction("0"),
    "edit": mf.HookFunction("0", editing_function=lambda module, x, context, modules: x * 2),
    "local edit": mf.HookFunction("0", editing_function=mf.edits.scale(0.5)),
    "gradient": mf.HookFunction("0", hook_type="full_backward_pre"),
    "parameter": mf.HookFunction("0.weight", hook_type="tensor"),
    "statistics": None,
}
BACKWARD = ("gradient", "parameter")


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with simulated():
        yield move(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def forward(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4, device=CUDA)).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_in_a_captured_graph_is_an_error_at_once(
    kind: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hook = KINDS[kind]
    with mf.attach(model) as flex:
        if hook is None:
            flex.register_statistics(mf.Statistics(tmp_path, "0"))
        else:
            flex.register_hook(hook)
        forward(model).backward()  # a graph is captured after such passes
        loss = forward(model) if kind in BACKWARD else None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(mf.HookError) as caught:
            loss.backward() if loss is not None else forward(model)
        assert_names(caught.value, "CUDA graph", caught.value.site)
        assert str(caught.value.site).startswith("0")
        monkeypatch.undo()
        forward(model).backward()
