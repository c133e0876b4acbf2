"""Axes of a run from torch's DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_flex.adapters.mesh_axes import axes_of_device_mesh, mesh_of_device_meshes
from megatron_flex.errors import FlexError
from tests.support.messages import assert_names
from tests.support.pool import run


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except FlexError as error:
        return str(error)
    return "no error"


def _meshes() -> dict[str, Any]:
    out: dict[str, Any] = {}
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    mesh = mesh_of_device_meshes([(three["tp"], "tp")], {})
    out["three"] = mesh.describe(), dict(mesh.coords), mesh["dp"].ranks, mesh["tp"].ranks
    out["dims"] = axes_of_device_mesh(three, mesh), axes_of_device_mesh(three["tp"], mesh)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = mesh_of_device_meshes([(both, "dp")], {})
    out["flat"] = mesh.describe(), mesh["dp"].ranks, axes_of_device_mesh(both, mesh)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, dist.get_rank(), group=mesh["dp"].group)
    out["flat group"] = gathered
    nameless = init_device_mesh("cpu", (4,))
    out["nameless"] = (
        mesh_of_device_meshes([(nameless, "tp")], {}).describe(),
        mesh_of_device_meshes([(nameless, "dp")], {}).describe(),
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = DeviceMesh.from_group(groups[dist.get_rank() // 2], "cpu")
    out["replicas"] = mesh_of_device_meshes([(half, "tp")], {"dp": 2}).describe()
    stages = mesh_of_device_meshes([(half, "tp")], {"pp": 2})
    out["stages"] = stages.describe(), stages["pp"].ranks
    out["unsaid"] = _said(lambda: mesh_of_device_meshes([(half, "tp")], {}))
    letters = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    out["letters"] = _said(lambda: mesh_of_device_meshes([(letters["a"], "tp")], {}))
    out["wrong size"] = _said(lambda: mesh_of_device_meshes([(three, "tp")], {"tp": 4}))
    out["disagree"] = _said(lambda: mesh_of_device_meshes([(three["tp"], "tp"), (nameless, "tp")], {}))
    return out


def test_axes_are_those_of_the_device_mesh() -> None:
    found = run(4, _meshes)[3]
    assert found["three"] == ("dp=2 x tp=2", {"dp": 1, "pp": 0, "tp": 1}, (1, 3), (2, 3))
    assert found["dims"] == (["dp", "", "tp"], ["tp"])
    assert found["flat"] == ("dp=4", (0, 1, 2, 3), ["dp", "dp"])
    assert found["flat group"] == [0, 1, 2, 3]
    assert found["nameless"] == ("tp=4", "dp=4")
    assert found["replicas"] == "dp=2 x tp=2"
    assert found["stages"] == ("pp=2 x tp=2", (1, 3))
    assert_names(found["unsaid"], "data_parallel_size", "pipeline_parallel_size")
    assert_names(found["letters"], 1, "b")
    assert_names(found["wrong size"], 2)
    assert found["disagree"]
