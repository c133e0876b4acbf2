"""Dumps of a module of no framework, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import megatron_flex as mf
from tests.support.messages import warns


def test_its_first_dim_are_samples(tmp_path: Path) -> None:
    module, inputs = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 5, 4)
    with mf.attach(module, dumps=mf.Dump(tmp_path / "d", ["0", "1"], gradients=True)):
        first = module(inputs)
        first.square().sum().backward()
        second = module(2 * inputs)
        second.sum().backward()
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [0, 1]
        assert dump["1"].shape == (2, 2, 5, 3)
        assert torch.equal(dump["1"].torch(), torch.stack([first, second]).detach())
        assert torch.equal(dump["1:output.grad"][0].torch(), 2 * first.detach())
        assert dump["0"].dims[:2] == ("iteration", "sample")


def test_which_are_its_tokens_is_not_known(tmp_path: Path) -> None:
    module, inputs = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 5, 4)
    dump = mf.Dump(tmp_path / "d", ["0"], tokens=[0])
    with mf.attach(module, dumps=dump), torch.no_grad(), warns(mf.FlexWarning, "0:output"):
        output = module(inputs)
    with mf.open_dump(tmp_path / "d") as dump:
        assert torch.equal(dump["0"][0].torch(), output)
