"""Disks that are full, slow or not there, on one rank of several: training goes on as the settings say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_flex as mf
from tests.support.messages import assert_names
from tests.support.pool import run

STEPS = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def trained(net: nn.Module, number: int) -> None:
    given = torch.full((2, 3, 8), float(number)) + dist.get_rank()
    net(given).square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            parameter.grad = None


def without_a_folder(path: str, kind: str) -> str:
    if kind == "unshared":  # what a rank sees whose disk is another one
        os.makedirs(f"{path}/{dist.get_rank()}")
        os.chdir(f"{path}/{dist.get_rank()}")
        path = "dump"
    try:
        mf.attach(model(), dumps=mf.Dump(path, ["0"]))
    except mf.DumpError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["file", "full", "unshared"])
def test_a_folder_that_will_not_do_is_an_error_on_all_ranks(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "at").write_text("")
    elif kind == "full":
        (tmp_path / "at").mkdir()
        (tmp_path / "at" / "other").write_text("")
    told = run(3, without_a_folder, str(tmp_path / "at"), kind)
    assert len(set(told)) == 1
    values = {"file": (tmp_path / "at", "File exists"), "full": (tmp_path / "at",), "unshared": (0, "1, 2")}
    assert_names(told[0], *values[kind])
