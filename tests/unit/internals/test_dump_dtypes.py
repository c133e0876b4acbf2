"""Tensors of every dtype that a dump writes, on every road that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import compare
from megatron_flex.dump.export import ExportColumn, export_arrays
from megatron_flex.dump.part_format import DTYPE_NAMES
from megatron_flex.dump.reader import open_dump
from megatron_flex.errors import DumpError
from megatron_flex.page.data_pane import dump_source
from tests.support import dumps
from tests.support.dumps import COLUMN, Given
from tests.support.messages import assert_names, raises

SITE = "x:output"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def drawn(dtype: torch.dtype) -> Tensor:
    """Random bits of `[iteration, sample, token, feature]`, none of them a NaN."""
    most = 2 if dtype is torch.bool else 120
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, most, (1, 2, 4, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@pytest.fixture
def folders(dtype: torch.dtype, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Dumps of the same tensor from two ranks and from one, and of one with another sample."""
    value = drawn(dtype)
    size = dtype.itemsize
    other = bits(value).unflatten(-1, (8, size)).flip(-2).flatten(-2).view(dtype)  # features in reverse
    for name, tensor, tp in (("two", value, 2), ("one", value, 1), ("other", other, 1)):
        dumps.write(tmp_path / name, {SITE: Given(tensor, COLUMN)}, mesh={"tp": tp})
    return tmp_path / "two", tmp_path / "one", tmp_path / "other"


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_a_dtype_on_every_road(dtype: torch.dtype, folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    value, (two, one, other) = drawn(dtype), folders
    array = open_dump(two)[SITE]
    assert array.dtype is dtype
    assert torch.equal(bits(array.torch()), bits(value))
    assert torch.equal(bits(array[:, :, 1:3].torch()), bits(value[:, :, 1:3]))
    dumps.healthy(two)
    assert compare(two, one).exit_status == 0
    found = compare(two, other)
    assert found.exit_status == 1
    assert found.first is not None
    shown: Any = dump_source(two, [SITE])
    assert "nan" not in json.dumps(shown).lower()
    column = [ExportColumn("x", array)]
    export_arrays(column, tmp_path / "x.safetensors", "safetensors")
    zarr = pytest.importorskip("zarr")
    export_arrays(column, tmp_path / "x.zarr", "zarr")
    stored = torch.as_tensor(zarr.open_group(str(tmp_path / "x.zarr"), mode="r")["x"][:])
    assert torch.equal(stored, value.to(stored.dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_a_dtype_as_a_dataset(dtype: torch.dtype, folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    column = [ExportColumn("x", open_dump(folders[0])[SITE])]
    if dtype.is_complex:
        with raises(DumpError, "x", dtype, "Arrow", "zarr", "safetensors"):
            export_arrays(column, tmp_path / "x", "datasets")
        assert not (tmp_path / "x").exists()
        return
    export_arrays(column, tmp_path / "x", "datasets")
    rows = datasets.load_from_disk(str(tmp_path / "x"))
    got = torch.tensor([row["x"] for row in rows.to_list()], dtype=torch.float64)
    assert torch.equal(got, drawn(dtype).flatten(0, 2).to(torch.float64))


def test_integers_that_fp64_does_not_tell_apart(tmp_path: Path) -> None:
    """Two large identifiers that differ by one are the same number in fp64."""
    value = torch.full((1, 2, 4, 8), 2**60)
    other = value.clone()
    other[0, 1, 2, 3] += 1
    for name, tensor in (("a", value), ("b", other)):
        dumps.write(tmp_path / name, {SITE: Given(tensor, COLUMN)}, mesh={"tp": 2})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_status == 1
    assert found.first is not None
    assert found.first.worst is not None
    assert_names(found, "1 of 64")
