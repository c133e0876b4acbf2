"""Reading dumps: whatever the mesh was, the same array; nothing but what is asked for is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from tests.support import dumps
from tests.support.dumps import COLUMN, GATED, NORM, REPLICATED, SEQUENCE, SUMMED, WEIGHT, Given, random

MESHES = [
    {},
    {"tp": 2},
    {"dp": 2, "tp": 4},
    {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
]


def sites() -> dict[str, Given]:
    """Tensors of every kind of layout, of 2 iterations, 8 samples, 16 tokens."""
    out = {}
    for seed, (name, layout, stage, width) in enumerate(
        [
            ("a", REPLICATED, 0, 8),
            ("b", SEQUENCE, 0, 8),
            ("c", COLUMN, 0, 16),
            ("d", GATED, 1, 16),
            ("e", SUMMED, 1, 8),
        ]
    ):
        value = random(2, 8, 16, width, seed=seed)
        out[name] = Given(value, layout, random(2, 8, 16, width, seed=seed + 50), stage)
    return out


def staged(given: dict[str, Given], mesh: dict[str, int]) -> dict[str, Given]:
    """All on stage 0 where there is one stage."""
    if mesh.get("pp", 1) > 1:
        return given
    return {n: Given(g.value, g.layout, g.gradient, 0, g.calls) for n, g in given.items()}


@pytest.mark.parametrize("order", ["interleaved", "blocks"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_dump_of_any_mesh_reads_as_the_whole(tmp_path: Path, mesh: dict[str, int], order: str) -> None:
    given = staged(sites(), mesh)
    parameters = {
        "w": Given(random(2, 8, 4, seed=90), WEIGHT, random(2, 8, 4, seed=91)),
        "n": Given(random(2, 8, seed=92), NORM),
    }
    dumps.write(tmp_path / "d", given, mesh=mesh, parameters=parameters, microbatches=2, order=order)
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [0, 1]
        assert dump.sites == [n + e for n in given for e in ("", ".grad")]
        assert dump.order == [*given, *(n + ".grad" for n in reversed(given))]
        for name, one in given.items():
            array = dump[name]
            assert array.dims[:3] == ("iteration", "sample", "token")
            assert array.shape == tuple(one.value.shape)
            assert torch.equal(array.torch(), one.value)
            assert one.gradient is not None
            assert torch.equal(dump[name + ".grad"].torch(), one.gradient)
        assert dump.parameters == ["w", "n"]
        assert torch.equal(dump.parameter("w").torch(), parameters["w"].value)
        assert parameters["w"].gradient is not None
        assert torch.equal(dump.parameter("w", gradient=True).torch(), parameters["w"].gradient)
        assert torch.equal(dump.parameter("n").torch(), parameters["n"].value)
