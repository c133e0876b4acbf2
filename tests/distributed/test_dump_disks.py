"""Disks that are full, slow or not there, on one rank of several: training goes on as the settings say."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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


def read_beside_a_slow_rank(path: str, ending: str, on_error: Literal["warn", "raise"]) -> float:
    """The greatest difference between what is dumped and what ran, read by rank 0 when rank 1 writes late."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(nn.Sequential(nn.Linear(8, 16)), mesh, {"0": ColwiseParallel()})
    values = torch.arange(16.0).reshape(2, 8)
    dump = mf.Dump(path, ["0"], on_error=on_error)
    flex = mf.attach(net, dumps=dump)
    rename = os.rename

    def rename_late(*names: str) -> None:
        time.sleep(0.5)
        rename(*names)

    if dist.get_rank() == 1:
        os.rename = rename_late  # type: ignore[assignment]  # the name that a finished file is given last
    try:
        shard = net(values).detach()
        if ending == "remove":
            flex.remove_dump(dump)
        else:
            flex.restore()
        if dist.get_rank() == 1:
            return 0.0
        with mf.open_dump(path) as reader:
            return float((reader["0"].torch()[0][..., :8] - shard).abs().max())
    finally:
        os.rename = rename
        flex.restore()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("ending", ["remove", "restore"])
def test_a_dump_can_be_read_when_one_rank_returns(tmp_path: Path, ending: str, on_error: str) -> None:
    assert run(2, read_beside_a_slow_rank, str(tmp_path / "dump"), ending, on_error)[0] == 0
