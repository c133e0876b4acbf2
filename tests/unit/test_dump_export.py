"""Exports: read back by the formats' own packages, and equal to what was dumped, element by element."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_flex.dump import sampled
from megatron_flex.dump.export import ExportColumn, export_arrays
from megatron_flex.dump.reader import open_dump
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import COLUMN, NORM, SEQUENCE, WEIGHT, Given, random
from tests.support.messages import any_names, assert_names

MESH = {"pp": 2, "dp": 2, "tp": 2}
FC1, OUT, LAST = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0", "decoder.layers.1"
WEIGHTS = "decoder.layers.0.mlp.linear_fc1.weight"


def sites(dtype: torch.dtype = torch.float32, tokens: int = 8) -> dict[str, Given]:
    def one(seed: int, *features: int) -> torch.Tensor:
        return random(2, 4, tokens, *features, seed=seed, dtype=dtype)

    return {
        FC1: Given(one(1, 8), COLUMN, one(2, 8)),
        OUT: Given(one(3, 4), SEQUENCE, one(4, 4)),
        LAST: Given(one(5, 4), SEQUENCE, stage=1),
    }


def write(path: Path, given: dict[str, Given] | None = None, **more) -> None:
    settings = {"mesh": MESH, "microbatches": 2, "iterations": [10, 20], **more}
    dumps.write(path, sites() if given is None else given, **settings)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def expected() -> dict[str, torch.Tensor]:
    given = sites()
    values = {name: g.value for name, g in given.items()}
    return values | {f"{n}.grad": g.gradient for n, g in given.items() if g.gradient is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_has_every_tensor_as_it_was(command, tmp_path, dtype):
    from safetensors import safe_open
    from safetensors.torch import load_file

    given, weight = sites(dtype), random(2, 8, 4)
    write(
        tmp_path / "dump",
        given,
        parameters={WEIGHTS: Given(weight, WEIGHT), "norm": Given(weight[:, 0], NORM)},
    )
    done = command("dump", "export", "dump", "out.safetensors")
    assert (done.status, done.err) == (0, "")
    found = load_file("out.safetensors")
    values = {n: g.value for n, g in given.items()} | {WEIGHTS: weight, "norm": weight[:, 0]}
    values |= {f"{n}.grad": g.gradient for n, g in given.items() if g.gradient is not None}
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    with safe_open("out.safetensors", "pt") as file:
        told = json.loads(file.metadata()["arrays"])
    assert told[FC1]["iterations"] == [10, 20]
    assert told[FC1]["dims"] == ["iteration", "sample", "token", "4h"]


def test_sites_and_iterations_are_chosen(command, tmp_path):
    from safetensors.torch import load_file

    write(tmp_path / "dump")
    words = ["dump", "export", "dump", "out.safetensors", "--sites", "*.grad", "-s", LAST, "-i", "20"]
    told = json.loads(command(*words, "--json").out)
    assert told["bytes"] == Path("out.safetensors").stat().st_size
    found = load_file("out.safetensors")
    assert sorted(found) == sorted(told["names"]) == sorted([f"{FC1}.grad", f"{OUT}.grad", LAST])
    assert all(torch.equal(v, expected()[n][1:]) for n, v in found.items())


def test_iterations_of_different_shapes_have_a_tensor_each_if_told(command, tmp_path):
    from safetensors.torch import load_file

    write(tmp_path / "dump", {OUT: Given(sites()[OUT].value[:1], SEQUENCE)}, iterations=[10])
    write(tmp_path / "dump", {OUT: Given(sites(tokens=4)[OUT].value[:1], SEQUENCE)}, iterations=[20])
    done = command("dump", "export", "dump", "out.safetensors")
    assert done.status == 2
    assert_names(done.err, OUT, "[4, 4, 4]", "[4, 8, 4]", "--per-iteration")
    assert not list(tmp_path.glob("*out*"))
    assert command("dump", "export", "dump", "out.safetensors", "--per-iteration").status == 0
    found = load_file("out.safetensors")
    assert {n: list(t.shape) for n, t in found.items()} == {f"{OUT}/10": [4, 8, 4], f"{OUT}/20": [4, 4, 4]}
    assert torch.equal(found[f"{OUT}/10"], sites()[OUT].value[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zarr_has_every_array_with_names_of_dims(command, tmp_path, dtype):
    zarr = pytest.importorskip("zarr")
    given = sites(dtype)
    write(tmp_path / "dump", given)
    done = command("dump", "export", "dump", "out.zarr", "-f", "zarr")
    assert done.status == 0
    assert any_names(done.out.splitlines(), "bfloat16", "float32") is (dtype == torch.bfloat16)
    group = zarr.open_group("out.zarr", mode="r")
    assert len(list(group.array_keys())) == 5
    for name, g in given.items():
        for array, value in ((group[name], g.value), (group.get(f"{name}.grad"), g.gradient)):
            if value is None:
                assert array is None
                continue
            wanted = value.float() if dtype == torch.bfloat16 else value
            assert array.metadata.dimension_names[:3] == ("iteration", "sample", "token")
            assert array.chunks[0] == 1
            assert array.dtype == wanted.numpy().dtype
            assert torch.equal(torch.from_numpy(array[:]), wanted)
            assert array.attrs["iterations"] == [10, 20]
            assert array.attrs["tokens"] == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_datasets_have_a_row_for_each_token(command, tmp_path, dtype):
    datasets = pytest.importorskip("datasets")
    given = sites(dtype)
    write(tmp_path / "dump", given)
    assert command("dump", "export", "dump", "out", "-f", "datasets").status == 0
    found = datasets.load_from_disk("out").with_format("torch")
    assert len(found) == 2 * 4 * 8
    rows = found[:]
    assert rows["iteration"].tolist() == [i for i in (10, 20) for _ in range(32)]
    assert rows["sample"].tolist() == [b for b in range(4) for _ in range(8)] * 2
    assert rows["token"].tolist() == list(range(8)) * 8
    for name, g in given.items():
        assert torch.equal(rows[name], g.value.float().reshape(64, -1))
    assert torch.equal(rows[f"{FC1}.grad"], given[FC1].gradient.float().reshape(64, -1))


def test_datasets_have_a_row_for_each_sample(command, tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "dump")
    done = command("dump", "export", "dump", "out", "-f", "datasets", "--rows", "sample", "-s", OUT)
    assert done.status == 0
    found = datasets.load_from_disk("out").with_format("torch")
    assert found.column_names == ["iteration", "sample", OUT]
    assert torch.equal(found[:][OUT], expected()[OUT].reshape(8, 8, 4))


def test_datasets_have_the_positions_of_sampled_tokens(command, tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "dump", {OUT: sites()[OUT]}, tokens=sampled(3), gradients=False)
    assert command("dump", "export", "dump", "out", "-f", "datasets").status == 0
    found = datasets.load_from_disk("out").with_format("torch")
    assert len(found) == 2 * 4 * 3
    whole = expected()[OUT]
    for row in found:
        at = [10, 20].index(int(row["iteration"])), int(row["sample"]), int(row["token"])
        assert torch.equal(row[OUT], whole[at])
    with open_dump(tmp_path / "dump") as dump:
        assert found["token"][:].tolist() == dump[OUT].tokens.reshape(-1).tolist()


def test_datasets_of_no_tokens_have_no_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "dump", {OUT: sites()[OUT]}, gradients=False)
    with open_dump(tmp_path / "dump") as dump:
        export_arrays([ExportColumn(OUT, dump[OUT][:, :, :0])], tmp_path / "out", "datasets")
    stored = datasets.load_from_disk(str(tmp_path / "out"))
    assert (len(stored), stored.column_names) == (0, ["iteration", "sample", "token", OUT])


def test_what_has_no_tokens_is_refused_for_rows_of_tokens(command, tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "dump", reduce="mean", gradients=False)
    done = command("dump", "export", "dump", "out", "-f", "datasets")
    assert done.status == 2
    assert "--rows sample" in done.err
    assert command("dump", "export", "dump", "out", "-f", "datasets", "--rows", "sample").status == 0


FORMATS = ["safetensors", "zarr", "datasets"]


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_replaces_an_earlier_one_if_told(command, tmp_path, to):
    pytest.importorskip(to)
    write(tmp_path / "dump", {OUT: sites()[OUT]}, gradients=False)
    words = ["dump", "export", "dump", "out", "-f", to]
    assert command(*words, "-i", "10").status == 0

    def digest() -> dict[str, bytes]:
        files = [f for f in [tmp_path / "out", *(tmp_path / "out").rglob("*")] if f.is_file()]
        return {str(f): f.read_bytes() for f in files}

    before = digest()
    done = command(*words)
    assert done.status == 2
    assert_names(done.err, "out", "--force")
    (victim, *_) = (tmp_path / "dump" / "run-0000" / f"{20:010d}").glob("00001-*")
    data = bytearray(victim.read_bytes())
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert command(*words, "--force").status == 2
    assert digest() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "out"]

    victim.write_bytes(data)
    assert command(*words, "--force").status == 0
    assert digest() != before
    for other in FORMATS:  # an export in one format replaces one in another
        pytest.importorskip(other)
        assert command("dump", "export", "dump", "out", "-f", other, "--force").status == 0
        assert (tmp_path / "out").is_file() is (other == "safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "out"]


def _fill(kind: str, out: Path) -> None:
    """Something that is not an export as a whole."""
    (out.parent / "kept").mkdir()
    (out.parent / "kept" / "thesis.txt").write_text("mine")
    if kind == "file":
        out.write_text("mine")
    elif kind == "safetensors":
        from safetensors.torch import save_file

        save_file({"w": torch.ones(2)}, out)
    elif kind == "link":
        out.symlink_to("kept")
    elif kind == "no header":
        out.write_bytes(b"\xff" * 64)
    else:
        out.mkdir()
        name = {"zarr": "zarr.json", "dataset": "dataset_info.json", "folder": "sub/thesis.txt"}[kind]
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text('{"attributes": {"megatron_flex": 1}, "description": "[1]"}')


@pytest.mark.parametrize("kind", ["file", "safetensors", "link", "no header", "zarr", "dataset", "folder"])
def test_force_refuses_what_no_export_wrote_before_anything_is_read(command, tmp_path, kind):
    """The dump does not exist: the target is refused before it is opened."""
    _fill(kind, tmp_path / "out")
    there = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    done = command("dump", "export", "dump", "out", "--force")
    assert done.status == 2
    assert_names(done.err, "out", "--force")
    assert done.err.count("\n") == 1
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == there


@pytest.mark.parametrize("to", FORMATS)
def test_force_refuses_an_export_with_a_file_of_someone_else(command, tmp_path, to):
    pytest.importorskip(to)
    write(tmp_path / "dump", {OUT: sites()[OUT]}, gradients=False)
    words = ["dump", "export", "dump", "out", "-f", to, "--force"]
    (tmp_path / "out").mkdir()  # an empty folder is replaced
    assert command(*words).status == 0
    if to == "safetensors":
        return
    (tmp_path / "out" / OUT).mkdir(exist_ok=True)
    (tmp_path / "out" / OUT / "thesis.txt").write_text("mine")
    done = command(*words)
    assert done.status == 2
    assert_names(done.err, "out", f"{OUT}/thesis.txt", "--force")
    assert (tmp_path / "out" / OUT / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("to", ["zarr", "datasets"])
def test_a_package_that_is_missing_is_named_with_its_extra(command, tmp_path, monkeypatch, to):
    write(tmp_path / "dump", {OUT: sites()[OUT]}, gradients=False)
    monkeypatch.setitem(sys.modules, to, None)  # what `find_spec` has of a package that is not there
    done = command("dump", "export", "dump", "out", "-f", to)
    assert done.err.startswith("megatron-flex: ")
    assert done.err.count("\n") == 1
    assert_names(done.err, to, f"pip install megatron-flex[{to}]")
