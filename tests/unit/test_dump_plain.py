"""Dumps of a module of no framework, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import megatron_flex as mf
from megatron_flex.compare import compare
from tests.support.messages import any_names, warns


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


def test_parameters_that_are_left_out_are_in_the_verdict(tmp_path: Path) -> None:
    """A parameter without a shape has no layout when the dump is registered."""
    for name in ("a", "b"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
        dump = mf.Dump(tmp_path / name, ["0"], parameters=["**"])
        with warns(mf.FlexWarning, "1.weight"), mf.attach(module, dumps=dump), torch.no_grad():
            module(torch.ones(2, 4))
    with mf.open_dump(tmp_path / "a") as written:
        assert set(written.manifest.left_out) == {"1.weight", "1.bias"}
        assert list(written.parameters) == ["0.weight", "0.bias"]
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert comparison.verdict == "equal"
    for label in ("A", "B"):
        assert any_names(comparison.summary(), label, "1.weight", 1)
