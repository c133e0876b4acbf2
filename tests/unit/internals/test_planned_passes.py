"""A later pass of a site executes what the first one has planned."""

from __future__ import annotations

import pytest
import torch

import megatron_flex as mf
from tests.unit.test_site_plan import PASSES, edited, model, tripled


def test_a_later_pass_executes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    net, general = model(), []
    with mf.FlexModel(net) as flex:
        flex.session.add(*edited(tripled))
        dispatcher = flex.session.dispatcher
        dispatch = dispatcher._dispatch
        monkeypatch.setattr(
            dispatcher, "_dispatch", lambda *args, **more: general.append(1) or dispatch(*args, **more)
        )
        for _ in range(PASSES):
            with flex.step():
                net(torch.ones(2, 4))
    assert len(general) == 1
