"""Dumps of dynamic batches: microbatches of one step whose sequences have different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.dump.export import ExportColumn, export_arrays
from megatron_flex.errors import DumpError
from megatron_flex.figures import heat, norms
from tests.support import dumps
from tests.support.dumps import SEQUENCE, Given, random
from tests.support.messages import raises

LENGTHS = (8, 16, 12, 16)  # of two microbatches of two replicas, of 2 samples each


def ragged(path: Path, value: Tensor, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> mf.OpenDump:
    """A dump of one site and its gradient, of one iteration."""
    mesh = {"dp": len(lengths) // 2, "tp": 2}
    given = {"a": Given(value, SEQUENCE, value * 2)}
    dumps.write(path, given, mesh=mesh, microbatches=2, lengths=lengths, order="blocks", **more)
    return mf.open_dump(path)


@pytest.fixture
def value() -> Tensor:
    return random(1, 8, 16, 4)


def expected(value: Tensor) -> list[Tensor]:
    """The tokens of each sample."""
    counts = [n for n in LENGTHS for _ in range(2)]
    return [sample[:n] for sample, n in zip(value[0], counts, strict=True)]


def test_what_exists_is_read_and_nothing_else(tmp_path: Path, value: Tensor) -> None:
    array = ragged(tmp_path / "d", value)["a"]
    assert array.ragged
    assert array.shape == (1, 8, 16, 4), "the tokens of the longest"
    assert torch.equal(array[0, :, :8].torch(), value[0, :, :8])
    assert torch.equal(array[0, 2:4].torch(), value[0, 2:4])
    with raises(DumpError, 0, 8, 16, ".sequence_arrays()", ".microbatch_arrays()", site="a"):
        array.torch()
    existing = array.existing()
    assert existing is not None
    assert existing[0].sum(1).tolist() == [8, 8, 16, 16, 12, 12, 16, 16]
    assert array[0, 4, 10:].existing() is not None
    assert array[0, 4, 2:12].existing() is None
    for region in array[0, :, 4::3].regions():
        assert torch.equal(array[0, :, 4::3][region].torch(), value[0, :, 4::3][region[0]][:, region[1]])
    sequences = [s.array[0].torch() for s in array.sequence_arrays()]
    assert all(torch.equal(a, b) for a, b in zip(sequences, expected(value), strict=True))
    parts = [p.shape for p in array.regular_parts()]
    assert parts == [(2, n, 4) for n in LENGTHS]


def test_one_length_for_each_replica(tmp_path: Path, value: Tensor) -> None:
    """The first replica alone does not show that lengths differ."""
    array = ragged(tmp_path / "d", value, (8, 8, 16, 16))["a"]
    assert array.ragged
    assert array.shape[2] == 16
    assert torch.equal(array[0, 4:].torch(), value[0, 4:])


def test_rows(tmp_path: Path, value: Tensor) -> None:
    dump = ragged(tmp_path / "d", value)
    rows = torch.cat(expected(value))
    numbered = dump.dataset("a")
    assert torch.equal(torch.stack([numbered[i] for i in range(len(numbered))]), rows)
    for block in (3, 16, 64):
        assert torch.equal(torch.cat(list(dump.rows("a", 10, shuffle=False, block=block))), rows)
    mask = torch.zeros(8, 16, dtype=torch.bool)
    mask[:, 7:9] = True
    assert torch.equal(torch.cat(list(dump.rows("a", 10, shuffle=False, tokens=mask))), torch.cat(
        [sample[7:9] for sample in expected(value)]
    ))  # fmt: skip
    dumps.write(tmp_path / "other", {"a": Given(value, SEQUENCE)}, microbatches=4)
    with raises(DumpError, "a"):
        dump.rows([dump["a"], mf.open_dump(tmp_path / "other")["a"]], 10)


def test_exports(tmp_path: Path, value: Tensor) -> None:
    from safetensors.torch import load_file

    column = ExportColumn("a", ragged(tmp_path / "d", value)["a"])
    with raises(DumpError, "a", "--per-iteration", "--rows token"):
        export_arrays([column], tmp_path / "e.safetensors", "safetensors")
    export_arrays([column], tmp_path / "f.safetensors", "safetensors", per_iteration=True)
    found = load_file(tmp_path / "f.safetensors")
    assert {n: list(t.shape) for n, t in found.items()} == {
        f"a/0/{m}.{r}": [2, LENGTHS[2 * r + m], 4] for r in (0, 1) for m in (0, 1)
    }
    assert torch.equal(found["a/0/1.0"], value[0, 2:4])
    datasets = pytest.importorskip("datasets")
    with raises(DumpError, "a", "--rows token"):
        export_arrays([column], tmp_path / "g", "datasets", rows="sample")
    export_arrays([column], tmp_path / "h", "datasets")
    table = datasets.load_from_disk(str(tmp_path / "h")).with_format("torch")
    assert torch.equal(torch.stack(list(table["a"])), torch.cat(expected(value)))
    assert [int(t) for t in table["token"]] == [t for s in expected(value) for t in range(len(s))]


def test_figures_and_verification(tmp_path: Path, value: Tensor) -> None:
    path = tmp_path / "d"
    ragged(path, value)
    dumps.healthy(path)
    assert heat(str(path), "a", sample=4).values.shape == (12, 4)
    exact = torch.cat(expected(value)).double().square().sum().sqrt()
    assert norms(str(path), "a").values.flatten()[0] == pytest.approx(float(exact), rel=1e-5)


def test_compare(tmp_path: Path, value: Tensor) -> None:
    a = ragged(tmp_path / "a", value)
    assert compare(a, ragged(tmp_path / "b", value)).verdict == "equal"
    changed = value.clone()
    changed[0, 5, 11] += 1.0  # the last token that a sample of the third microbatch has
    found = compare(a, ragged(tmp_path / "c", changed))
    assert found.verdict == "diverges"
    changed = value.clone()
    changed[0, 5, 12] += 1.0  # a token that does not exist
    assert compare(a, ragged(tmp_path / "d", changed)).verdict == "equal"
