"""Exports are written in blocks, and under a name that is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.dump import export as walking
from megatron_flex.dump.export import split_into_slabs
from tests.support.commands import Command
from tests.unit.test_dump_export import FORMATS, OUT, sites, write


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_what_gets_the_name_during_the_export_is_not_replaced(command, tmp_path, monkeypatch):
    write(tmp_path / "dump", {OUT: sites()[OUT]}, gradients=False)
    writing = walking.write_safetensors

    def meanwhile(*args) -> None:
        writing(*args)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("mine")

    monkeypatch.setattr(walking, "write_safetensors", meanwhile)
    done = command("dump", "export", "dump", "out", "--force")
    assert done.status == 2
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "out"]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 7, 1, 3), (2, 0, 3)])
@pytest.mark.parametrize("most", [1, 8, 20, 100, 1000])
def test_slabs_are_in_row_major_order_and_bounded(shape, most):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = [whole[where] for where in split_into_slabs(shape, 4, most)]
    assert torch.equal(torch.cat([f.reshape(-1) for f in found] or [whole.reshape(-1)]), whole.reshape(-1))
    assert all(f.numel() * 4 <= max(most, 4) for f in found)


@pytest.mark.parametrize("to", FORMATS)
def test_many_blocks_write_what_one_does(command, tmp_path, monkeypatch, to):
    pytest.importorskip(to)
    write(tmp_path / "dump")
    assert command("dump", "export", "dump", "one", "-f", to).status == 0
    monkeypatch.setattr(walking, "EXPORT_BLOCK", 200)  # bytes
    monkeypatch.setattr(walking, "ZARR_CHUNK", 150)
    monkeypatch.setattr(walking, "ARROW_FILE_BYTES", 4000)
    monkeypatch.setattr(walking.split_into_slabs, "__defaults__", (64,))
    monkeypatch.setattr(walking.read_blocks, "__defaults__", (64,))
    assert command("dump", "export", "dump", "many", "-f", to).status == 0
    assert _read(to, "one") == _read(to, "many")
    if to == "datasets":
        assert len(list(Path("many").glob("*.arrow"))) > len(list(Path("one").glob("*.arrow")))


def _read(to: str, path: str) -> dict[str, Any]:
    if to == "safetensors":
        from safetensors.torch import load_file

        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if to == "zarr":
        import zarr

        return {name: array[:].tolist() for name, array in zarr.open_group(path, mode="r").arrays()}
    import datasets

    return datasets.load_from_disk(path).to_dict()
