"""Reading dumps: whatever the mesh was, the same array; nothing but what is asked for is read."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_flex as mf
from megatron_flex.dump.token_selection import RandomTokens
from megatron_flex.errors import DumpError
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import dumps
from tests.support.dumps import COLUMN, GATED, NORM, REPLICATED, SEQUENCE, SUMMED, WEIGHT, Given, random
from tests.support.messages import raises

BLOCKED = ("megatron", "numpy", "safetensors", "fairscale", "apex", "deepspeed", "transformers", "accelerate")
MESHES: list[dict[str, int]] = [
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
    return {n: replace(g, stage=0) for n, g in given.items()}


def small(path: Path, value: Tensor | None = None, layout: Layout = SEQUENCE, **kwargs: Any) -> mf.OpenDump:
    """A dump of one site, opened."""
    kwargs = {"mesh": {"dp": 2, "tp": 2}, "microbatches": 2, **kwargs}
    value = random(2, 8, 16, 8) if value is None else value
    dumps.write(path, {"a": Given(value, layout)}, **kwargs)
    return mf.open_dump(path)


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


KEY = st.one_of(
    st.integers(-20, 20),
    st.slices(16),
    st.lists(st.integers(-20, 20), max_size=5),
    st.just(Ellipsis),
    st.lists(st.booleans(), min_size=8, max_size=8),
)


def outer(value: Tensor, key: tuple[Any, ...]) -> Tensor:
    """What numpy has there, if each list chooses along its own axis."""
    array = value.numpy()
    whole = [k for k in key if k is not Ellipsis]
    at = key.index(Ellipsis) if Ellipsis in key else len(key)
    full = [*key[:at], *[slice(None)] * (array.ndim - len(whole)), *key[at + 1 :]]
    drop = 0
    for axis, one in enumerate(full):
        if isinstance(one, list) and one and isinstance(one[0], bool):
            one = np.array(one)
        if isinstance(one, list):
            one = np.array(one, dtype=np.int64)
        array = array[(slice(None),) * (axis - drop) + (one,)]
        drop += isinstance(one, int)
    return torch.from_numpy(np.array(array))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.lists(st.lists(KEY, max_size=4).map(tuple), min_size=1, max_size=2))
def test_slices_are_those_of_numpy(sliced: tuple[mf.OpenDump, Tensor], keys: list[tuple[Any, ...]]) -> None:
    dump, expected = sliced
    array = dump["a"]
    for key in keys:
        if sum(k is Ellipsis for k in key) > 1 or len(key) - (Ellipsis in key) > expected.ndim:
            with raises(DumpError, site="a", path=str(dump.path)):
                array[key]
            return
        try:
            expected = outer(expected, key)
        except IndexError:
            with pytest.raises(IndexError):
                array[key]
            return
        array = array[key]
    assert array.shape == tuple(expected.shape)
    assert torch.equal(array.torch(), expected)
    mapped = array.mapped()
    assert mapped is None or (mapped.dtype == expected.dtype and torch.equal(mapped, expected))


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[mf.OpenDump, Tensor]:
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    value = random(2, 8, 16, 8)
    return small(tmp_path_factory.mktemp("d") / "d", value, mesh=mesh), value


@pytest.mark.parametrize(
    ("key", "named", "dim"),
    [
        (None, None, "iteration"),
        (1.5, 1.5, "iteration"),
        ("a", "'a'", "iteration"),
        ([0.5], 0.5, "iteration"),
        ((0, None), None, "sample"),
        ([[0], [1]], [0], "iteration"),
        (True, True, "iteration"),
    ],
)
def test_what_is_no_index(tmp_path: Path, key: Any, named: Any, dim: str) -> None:
    array = small(tmp_path / "d")["a"]
    with raises(DumpError, named, f"'{dim}'", site="a"):
        array[key]


def test_an_array_says_what_it_is(tmp_path: Path) -> None:
    array = small(tmp_path / "d", random(2, 8, 16, 8).bfloat16())["a"]
    assert repr(array) == (
        "DumpArray(a: iteration 2, sample 8, token 16, h 8; bfloat16, 4,096 bytes; [s/tp, b, h])"
    )
    assert (array.ndim, array.size, array.nbytes, len(array)) == (4, 2048, 4096, 2)
    assert array[0, 0, 0, 0].shape == ()
    assert isinstance(array[0, 0, 0, 0].item(), float)
    with raises(TypeError, "a"):
        len(array[0, 0, 0, 0])
    assert array.numpy().dtype == np.float32
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert array.torch(torch.float64, "cpu").dtype == torch.float64
    assert [a.shape for a in array] == [(8, 16, 8)] * 2
    with raises(ValueError):
        np.array(array, copy=False)


def test_nothing_but_what_is_asked_for_is_read(tmp_path: Path) -> None:
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    given = {
        "a": Given(random(3, 8, 16, 8), SEQUENCE, stage=0),
        "b": Given(random(3, 8, 16, 8), COLUMN, stage=1),
    }
    dumps.write(tmp_path / "d", given, mesh=mesh, microbatches=2, order="blocks")
    dump = mf.open_dump(tmp_path / "d")
    assert dump.files.opened == 0
    assert dump["a"][1, 0, 3, :5].torch().shape == (5,)
    assert dump.files.bytes_read == 20
    # shape comes from the first iteration; there are two ranks of stage 0 in each replica
    assert dump.files.opened == 4
    assert dump.files.mapped == 1
    dump["a"][1, 7, 3].torch()
    assert dump.files.opened == 6  # sample 7 is on the other replica


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    value = random(6, 8, 16, 8)
    small(tmp_path / "d", value)
    dump = mf.OpenDump(tmp_path / "d", most_open=3)
    assert torch.equal(dump["a"].torch(), value)
    assert dump.files.mapped == 3
    dump.close()
    assert dump.files.mapped == 0
    assert torch.equal(dump["a"][0].torch(), value[0])


@pytest.mark.parametrize(
    "tokens", [slice(None, None, 3), slice(-4, None), [0, 5, -1], RandomTokens(5, seed=1), 2], ids=str
)
@pytest.mark.parametrize("samples", [None, [0, 3, 6], slice(1, None, 2)], ids=str)
@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "cp": 2, "tp": 2}], ids=str)
def test_picked_tokens_and_samples(tmp_path: Path, tokens: Any, samples: Any, mesh: dict[str, int]) -> None:
    value = random(2, 8, 16, 8)
    # of the uneven one everything is written, and the reader picks
    uneven = Layout((Dim("s", (Cut("cp"),), uneven=True), Dim("b"), Dim("h")))
    given = {"a": Given(value, SEQUENCE), "u": Given(value, uneven), "c": Given(value, COLUMN)}
    path = tmp_path / "d"
    dumps.write(path, given, mesh=mesh, microbatches=2, tokens=tokens, samples=samples)
    dump = mf.open_dump(path)
    numbers = torch.arange(8)[slice(None) if samples is None else samples].tolist()
    for name in given:
        array = dump[name]
        assert array.samples is not None
        assert array.tokens is not None
        assert array.samples.tolist() == numbers
        found = array.torch()
        for i in range(2):
            for j, number in enumerate(numbers):
                if isinstance(tokens, RandomTokens):
                    positions = tokens.positions(16, i, number)
                    assert array.tokens[i, j].tolist() == positions
                else:
                    said = (
                        tokens
                        if isinstance(tokens, slice)
                        else [tokens]
                        if isinstance(tokens, int)
                        else tokens
                    )
                    positions = sorted(torch.arange(16)[said].tolist())
                    assert array.tokens.tolist() == positions
                assert torch.equal(found[i, j], value[i, number][positions])
        part = array[1, ::-1, [1, 0] if array.shape[2] > 1 else 0]
        assert torch.equal(part.torch(), found[1].flip(0)[:, [1, 0] if array.shape[2] > 1 else 0])
    assert dump["u"].nbytes == dump["a"].nbytes


def test_means_over_tokens(tmp_path: Path) -> None:
    value = random(2, 8, 16, 8)
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    dumps.write(tmp_path / "d", {"a": Given(value, SEQUENCE)}, mesh=mesh, microbatches=2, reduce="mean")
    array = mf.open_dump(tmp_path / "d")["a"]
    assert array.dims == ("iteration", "sample", "h")
    assert array.tokens is None
    torch.testing.assert_close(array.torch(), value.mean(2))
    assert array[:, ::2].samples is not None
    assert array[:, ::2].samples.tolist() == [0, 2, 4, 6]


def test_several_passes_in_a_microbatch(tmp_path: Path) -> None:
    value = random(2, 8, 16, 8)
    dumps.write(tmp_path / "d", {"a": Given(value, calls=3)}, mesh={"tp": 2})
    dump = mf.open_dump(tmp_path / "d")
    with raises(DumpError, 3, "d['a', 0]", "d['a', 2]", site="a", path=str(tmp_path / "d")):
        dump["a"]
    for call in range(3):
        torch.testing.assert_close(dump["a", call].torch(), value * (call + 1))


def test_names(tmp_path: Path) -> None:
    dumps.write(tmp_path / "d", {"layer.mlp:output": Given(random(1, 2, 4, 2))})
    dump = mf.open_dump(tmp_path / "d")
    assert "layer.mlp" in dump
    assert torch.equal(dump["layer.mlp"].torch(), dump["layer.mlp:output"].torch())
    assert list(dump) == ["layer.mlp:output"]
    assert len(dump) == 1
    assert "layer.mlp.grad" not in dump
    with raises(DumpError, "layer.mlp:output", site="layer.mpl", path=str(tmp_path / "d")):
        dump["layer.mpl"]
    with raises(DumpError, "'w'", site="w", path=str(tmp_path / "d")):
        dump.parameter("w")


def test_tensors_without_samples_or_tokens(tmp_path: Path) -> None:
    rotary = Given(random(2, 4, 16, 8), Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("h"))))
    loss = Given(random(2, 8, seed=1), Layout((Dim("b"),)))
    scale = Given(random(2, 4, seed=2), Layout(()))
    given = {"rotary": rotary, "loss": loss, "scale": scale}
    dumps.write(tmp_path / "d", given, mesh={"dp": 2, "cp": 2}, microbatches=2)
    dump = mf.open_dump(tmp_path / "d")
    assert dump["rotary"].dims == ("iteration", "microbatch", "token", "h")
    assert dump["rotary"].samples is None
    assert dump["loss"].dims == ("iteration", "sample")
    assert dump["scale"].dims == ("iteration", "microbatch")
    for name, one in given.items():
        assert torch.equal(dump[name].torch(), one.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = random(2, 8, 16, 6).mul(3).to(dtype)
    array = small(tmp_path / "d", value)["a"]
    assert array.dtype == dtype
    assert torch.equal(array.torch().view(torch.uint8), value.view(torch.uint8))
    assert array[:, ::2, [3, 1]].torch().dtype == dtype
    assert array.numpy().shape == value.shape


def test_scores_have_tokens_and_keys(tmp_path: Path) -> None:
    layout = Layout((Dim("b"), Dim("n", (Cut("tp"),)), Dim("s", (Cut("cp", "zigzag"),)), Dim("s")))
    value = random(1, 8, 16, 4, 16)  # sample, token, head, key
    array = small(tmp_path / "d", value, layout, mesh={"dp": 2, "cp": 2, "tp": 2})["a"]
    assert array.dims == ("iteration", "sample", "token", "n", "s")
    assert torch.equal(array.torch(), value)


def test_permuted_dims(tmp_path: Path) -> None:
    layout = Layout((Dim("b"), Dim("s", (Cut("tp"),)), Dim("h"), Dim("k")), permute=(1, 0, 3, 2))
    value = random(1, 8, 16, 3, 5)
    array = small(tmp_path / "d", value, layout)["a"]
    assert array.dims == ("iteration", "sample", "token", "k", "h")
    assert torch.equal(array.torch(), value)


def test_microbatches_that_were_left_out(tmp_path: Path) -> None:
    value = random(1, 12, 4, 2)
    array = small(tmp_path / "d", value, microbatches=3, microbatches_kept=[1])["a"]
    assert array.samples is not None
    assert array.samples.tolist() == [4, 5, 6, 7]
    assert torch.equal(array.torch(), value[:, 4:8])


# -- runs and iterations -----------------------------------------------------------------------------


def test_runs_of_other_meshes_are_one_dump(tmp_path: Path) -> None:
    value = random(6, 8, 16, 8)
    path = tmp_path / "d"
    small(path, value[:3], mesh={"tp": 2})
    small(path, value[2:] * 2, mesh={"dp": 2, "cp": 2}, iterations=[2, 3, 4, 5])
    dump = mf.open_dump(path)
    assert len(dump.runs) == 2
    assert [m.run for m in dump.manifests] == [0, 1]
    assert dump.iterations == [0, 1, 2, 3, 4, 5]
    array = dump["a"]
    assert torch.equal(array.torch(), torch.cat([value[:2], value[2:] * 2]))  # the last complete one is read
    assert array.at(4, 0).iterations == [4, 0]
    assert torch.equal(array.at(4, 0)[:, 1].torch(), torch.stack([value[4, 1] * 2, value[0, 1]]))
    assert torch.equal(array[1:][0].at(3)[0].torch(), value[3] * 2)
    with raises(DumpError, "(9, 0)", 0, 5, site="a"):
        array.at(9)


def test_further_passes_of_an_iteration(tmp_path: Path) -> None:
    value = random(2, 8, 4, 2)
    dump = small(tmp_path / "d", value, passes=2, runs="all")
    assert dump.iterations == [0, 1]
    assert dump.iteration_keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert torch.equal(dump["a"].torch(), value)
    assert torch.equal(dump["a"].at((1, 1), 0).torch(), torch.stack([value[1] * 2, value[0]]))
    assert dump["a"].at((1, 1)).iteration_keys == [(1, 1)]


def test_iterations_that_are_not_whole_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "d"
    value = random(2, 8, 16, 8)
    small(path, value, absent=[3])
    dump = mf.open_dump(path)
    assert dump.iterations == []
    assert dump.sites == ["a"]
    assert dump.order == []
    with raises(DumpError, "a", path, path=str(path)):
        dump["a"].torch()
    assert small(path, value).iterations == [0, 1]
    next(path.glob("run-0001/0000000001/00002-*")).unlink()
    assert mf.open_dump(path).iterations == [0]


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_an_iteration_without_one_of_its_parts_is_not_there(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "d"
    assert small(path, microbatches=4, part_bytes=100).iterations == [0, 1]
    parts = sorted(path.glob("run-0000/0000000001/00002-*"))
    assert len(parts) > 2
    parts[lost].unlink()
    assert mf.open_dump(path).iterations == [0]


def test_copies_are_read_from_the_rank_that_wrote_them(tmp_path: Path) -> None:
    layout = Layout((Dim("s"), Dim("b"), Dim("g", (Cut("tp", copies=2),))))
    value = random(2, 8, 16, 8)
    sites = {name: Given(value + n, layout) for n, name in enumerate(("a", "b"))}
    dumps.write(tmp_path / "d", sites, mesh={"tp": 4})
    dump = mf.open_dump(tmp_path / "d")
    for n, name in enumerate(("a", "b")):
        assert torch.equal(dump[name].torch(), value + n)
    owners = [len(list((tmp_path / "d").rglob(f"0000{rank}-*"))) for rank in range(4)]
    assert min(owners) > 0, "some rank wrote nothing, so that no copy but the first was read"


def test_gradients_are_of_the_iterations_that_made_some(tmp_path: Path) -> None:
    value = random(3, 8, 4, 2)
    given = {"a": Given(value, gradient=value * 2)}
    dumps.write(tmp_path / "d", given, iterations=[0, 1, 2], training=False)
    dumps.write(tmp_path / "d", given, iterations=[5, 6, 7])
    dump = mf.open_dump(tmp_path / "d")
    assert dump.sites == ["a", "a.grad"]
    assert dump["a"].iterations == [0, 1, 2, 5, 6, 7]
    assert dump["a.grad"].iterations == [5, 6, 7]
    assert torch.equal(dump["a.grad"].torch(), value * 2)


# -- what does not fit together ----------------------------------------------------------------------


def test_iterations_of_other_lengths_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "d"
    first, second = random(1, 8, 16, 8), random(1, 8, 24, 8)
    small(path, first)
    small(path, second, iterations=[1])
    array = mf.open_dump(path)["a"]
    assert torch.equal(array[0].torch(), first[0])
    shapes = "[8, 24, 8]", "[8, 16, 8]"
    with raises(DumpError, *shapes, 1, 0, ".at(number)", ".microbatch_arrays()", site="a"):
        array.torch()
    assert torch.equal(array.at(1).torch(), second)
    pieces = list(array.microbatch_arrays())
    assert [(p.iteration, p.microbatch, p.replica) for p in pieces] == [
        (i, m, d) for i in (0, 1) for d in (0, 1) for m in (0, 1)
    ]
    for piece in pieces:
        assert piece.array.samples is not None
        whole = (first, second)[piece.iteration][0]
        assert torch.equal(piece.array.torch(), whole[piece.array.samples])


def test_pieces_of_one_microbatch(tmp_path: Path) -> None:
    array = small(tmp_path / "d")["a"]
    assert len(list(array[1:].microbatch_arrays())) == 4
    with raises(DumpError, "a", site="a", path=str(tmp_path / "d")):
        list(array[:, 1:].microbatch_arrays())


# -- damage ------------------------------------------------------------------------------------------


def damage(path: Path) -> Path:
    """Change a byte of the last tensor of a part."""
    found = sorted(path.rglob("*.safetensors"))[0]
    body = bytearray(found.read_bytes())
    body[-3] ^= 4
    found.write_bytes(bytes(body))
    return found


@pytest.mark.parametrize("check", ["first", "blocks", "never"])
def test_checksums_of_what_is_read(tmp_path: Path, check: Any) -> None:
    small(tmp_path / "d")
    damaged = damage(tmp_path / "d")
    array = mf.open_dump(tmp_path / "d", check=check)["a"]
    if check == "never":
        array.torch()
    else:
        with raises(DumpError, damaged, "a", 1, "0 of 1", site="a", path=str(damaged)):
            array.torch()
        with raises(DumpError, "0 of 1", path=str(damaged)):
            array[0, :, 0].torch()


def test_those_blocks_are_compared_that_are_read(tmp_path: Path) -> None:
    """Of a shard of 8 tokens, each of which is a block, those of the tokens that are read, each once."""
    dumps.write(tmp_path / "d", {"a": Given(random(1, 2, 8, 16384))})
    damage(tmp_path / "d")
    with mf.open_dump(tmp_path / "d") as dump:
        for tokens, blocks in (([0, 5], 2), ([5, 1], 3), (slice(0, 6, 2), 5)):
            dump["a"][0, :, tokens, 7:-1].torch()
            assert dump.files.integrity.bytes_checked == blocks * 131072
        dump["a"][0, :, 2:5].torch()  # one run of bytes over three blocks
        assert dump.files.integrity.bytes_checked == 6 * 131072
        with raises(DumpError, "7 of 8", site="a"):
            dump["a"][0, 0, 7, :1].torch()
        assert dump["a"][0, :, 6].torch().shape == (2, 16384)


def test_a_checksum_is_compared_once(tmp_path: Path) -> None:
    small(tmp_path / "d")
    dump = mf.open_dump(tmp_path / "d", check="first")
    dump["a"].torch()
    damage(tmp_path / "d")
    dump["a"].torch()
    with raises(DumpError, "check='sometimes'", "blocks", "first", "never"):
        mf.open_dump(tmp_path / "d", check="sometimes")  # type: ignore[arg-type]


def test_reading_many_small_shards_takes_few_calls(tmp_path: Path) -> None:
    """Of 64 shards, of 8 microbatches on 2 replicas: what they have in common is worked out once."""
    package = str(Path(mf.__file__).parent)
    layouts = {f"x{n}": Given(random(1, 16, 16, 8, seed=n), SEQUENCE) for n in range(2)}
    dumps.write(tmp_path, layouts, mesh={"dp": 2, "tp": 4}, microbatches=8)
    with mf.open_dump(tmp_path) as dump:
        dump["x0"].torch()  # reads the headers
        calls, before = 0, sys.getprofile()

        def note(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            code = frame.f_code
            inlined = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>")  # since Python 3.12
            calls += event == "call" and not inlined and code.co_filename.startswith(package)

        sys.setprofile(note)
        try:
            found = dump["x1"].torch()
        finally:
            sys.setprofile(before)
    assert torch.equal(found, layouts["x1"].value)
    assert calls <= 3800


def test_files_are_asked_once_for_the_shards_of_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each of two replicas, for all of eight microbatches; and once for the calls of the hook point."""
    asked: list[int] = []
    entries = mf.OpenDump.entries

    def noted(dump: mf.OpenDump, *args: Any) -> Any:
        asked.append(args[-1])
        return entries(dump, *args)

    monkeypatch.setattr(mf.OpenDump, "entries", noted)
    with small(tmp_path, microbatches=8, value=random(1, 16, 16, 8)) as dump:
        array = dump["a"]
        array.torch()
        assert sorted(asked) == [0, 0, 1]
        pieces = list(array.microbatch_arrays())
        assert [piece.array.samples.tolist() for piece in pieces] == [
            [2 * m + r] for r in range(2) for m in range(8)
        ]
        assert sorted(asked) == [0, 0, 1]


def test_a_file_that_shrank_or_is_gone(tmp_path: Path) -> None:
    small(tmp_path / "d")
    dump = mf.open_dump(tmp_path / "d")
    dump["a"].torch()
    path = sorted((tmp_path / "d").rglob("*.safetensors"))[0]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 8)
    with raises(DumpError, path, size - 8, size, path=str(path)):
        dump["a"].torch()
    path.unlink()
    dump.close()
    with raises(DumpError, path, os.strerror(errno.ENOENT), path=str(path)):
        dump["a"].torch()


def test_a_file_under_the_name_of_another_rank(tmp_path: Path) -> None:
    dump = small(tmp_path / "d")
    path, other = sorted((tmp_path / "d").rglob("*.safetensors"))[:2]
    contents = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(contents)
    with raises(DumpError, path, "rank 0", "rank 1", path=str(path)):
        dump["a"].torch()


def test_folders_that_are_no_dump(tmp_path: Path) -> None:
    with raises(DumpError, os.strerror(errno.ENOENT), path=str(tmp_path / "no")):
        mf.open_dump(tmp_path / "no")
    with raises(DumpError, tmp_path, "mf.Dump", path=str(tmp_path)):
        mf.open_dump(tmp_path)


def test_shards_that_ranks_did_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flex.dump import Ownership

    monkeypatch.setattr(Ownership, "mine", lambda self, *_: self.mesh["tp"].coord == 0)
    array = small(tmp_path / "d")["a"]
    with raises(DumpError, "a", "tp=1", site="a"):
        array.torch()
    assert array[0, 0, :8].torch().shape == (8, 8)


def test_flat_parts_of_gradients(tmp_path: Path) -> None:
    from megatron_flex.dump import (
        Dump,
        DumpWriter,
        Manifest,
        ShardEntry,
        SiteRecord,
        create_run,
        layout_to_json,
    )
    from megatron_flex.layout import extract

    whole, path = random(8, 6), tmp_path / "d"
    sizes = {"dp": 3, "tp": 2}
    places = [{"dp": d, "tp": t} for d in range(3) for t in range(2)]
    dump = Dump(path, parameters=["w"], gradients=True)
    place = SiteRecord("w", layout_to_json(WEIGHT), (8, 6))
    manifest = Manifest(
        0, "", {}, "x", sizes, {}, tuple(enumerate(places)), {}, "", (), (place,), dump.to_json()
    )
    create_run(path, manifest)
    for rank, coords in enumerate(places):
        writer = DumpWriter(path / "run-0000", rank, coords, dump)
        writer.begin(0, 0, True, 1)
        local = extract(WEIGHT, whole, coords, sizes)
        span = (coords["dp"] * 7, min(coords["dp"] * 7 + 7, 24)) if coords["dp"] < 2 else (14, 24)
        entry = ShardEntry("w", "parameter_gradient", 0, 0, 0, (4, 6), "", span=span)
        writer.put(entry, WEIGHT, local.flatten()[slice(*span)])
        writer.finish()
        writer.close()
    array = mf.open_dump(path).parameter("w", gradient=True)
    assert array.shape == (1, 8, 6)
    assert torch.equal(array.torch()[0], whole)
    assert torch.equal(array[0, ::3, [5, 1]].torch(), whole[::3][:, [5, 1]])


def test_arrays_and_dumps_pickle(tmp_path: Path) -> None:
    value = random(2, 8, 16, 8)
    dump = small(tmp_path / "d", value)
    array = dump["a"][:, 1:3]
    array.torch()
    other = pickle.loads(pickle.dumps([array, dump["a"], dump]))
    assert torch.equal(other[0].torch(), value[:, 1:3])
    assert other[2].iterations == [0, 1]


def test_reading_needs_torch_alone(tmp_path: Path) -> None:
    """In a process that has no other packages, and that leaves process groups and GPUs alone."""
    value = random(2, 8, 16, 8)
    small(tmp_path / "d", value)
    torch.save(value, tmp_path / "value.pt")
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
import torch
import megatron_flex as mf
assert not any(m.startswith("megatron_flex.dump.reader") for m in sys.modules)
from megatron_flex.dump.reader import open_dump
assert mf.open_dump is open_dump
dump = mf.open_dump({str(tmp_path / "d")!r}, check="first")
value = torch.load({str(tmp_path / "value.pt")!r})
assert torch.equal(dump["a"].torch(), value)
assert torch.equal(dump["a"][:, [1, 0], ::-1].torch(), value[:, [1, 0]].flip(2))
assert len(list(dump.rows("a", 16))) == 16
assert len(dump.dataset("a")) == 256
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
try:
    dump["a"].numpy()
except mf.DumpError as error:
    assert ".torch()" in str(error) and error.site == "a"
else:
    raise AssertionError("numpy without numpy")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(mf.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:megatron_flex", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


LOCAL = Layout((Dim("s"), Dim("b"), Dim("h")))
NO_SAMPLES = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("h")))
SWAPPED = Layout((Dim("b"), Dim("s", (Cut("tp"),)), Dim("h")), permute=(1, 0, 2))
COUNTED = Layout((Dim("s"), Dim("h")))


@pytest.mark.parametrize(
    ("layout", "key", "has_one_shard"),
    [
        (LOCAL, (0,), False),  # of two microbatches
        (LOCAL, (0, slice(0, 4)), True),
        (LOCAL, (slice(1, 2), slice(5, 8), slice(None, None, 3), 2), True),
        (LOCAL, (1, 4, -1), True),
        (LOCAL, (0, [3, 1]), True),  # in another order
        (LOCAL, (0, [3, 4]), False),
        (LOCAL, (0, 2, [3, 1, 2]), True),
        (LOCAL, (slice(None), 2), False),  # of two iterations
        (LOCAL, (0, slice(0, 0)), False),
        (SEQUENCE, (0, 2), False),
        (SEQUENCE, (0, 2, slice(0, 8)), True),
        (SEQUENCE, (0, 2, slice(7, 9)), False),
        (SWAPPED, (0, slice(1, 3), 9), True),
        (COLUMN, (0, 2), False),
        (COLUMN, (0, 2, slice(None), slice(4, 8)), True),
        (SUMMED, (0, 2, 1), False),
        (COUNTED, (0, 1), True),
        (COUNTED, (0,), False),
        (NO_SAMPLES, (1, slice(0, 1), slice(12, 16)), True),
        (NO_SAMPLES, (1, 0, slice(3, 5)), False),
    ],
)
def test_entries_of_one_shard_are_views_of_its_file(
    tmp_path: Path, layout: Layout, key: Any, has_one_shard: bool
) -> None:
    mesh = {"tp": 2, "cp": 2} if layout is NO_SAMPLES else {"tp": 2}
    shape = (2, 2, 16, 8) if layout in (COUNTED, NO_SAMPLES) else (2, 8, 16, 8)
    array = small(tmp_path / "d", random(*shape), layout, mesh=mesh)["a"][key]
    found = array.mapped()
    assert (found is not None) == has_one_shard
    if found is not None:
        assert torch.equal(found, array.torch())
        again = array.mapped()
        assert again is not None
        assert (again.data_ptr() == found.data_ptr()) != isinstance(key[-1], list), "lists are copied"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float16])
def test_a_view_of_a_file_has_the_dtype_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    array = small(tmp_path / "d", random(2, 8, 16, 8).mul(3).to(dtype), LOCAL, mesh={})["a"][0, :2]
    found = array.mapped()
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found.contiguous().view(torch.uint8), array.torch().view(torch.uint8))


def test_a_view_of_a_parameter(tmp_path: Path) -> None:
    parameters = {"w": Given(random(2, 8, 4, seed=90), WEIGHT), "n": Given(random(2, 8, seed=92), NORM)}
    given = {"a": Given(random(2, 8, 16, 8), LOCAL)}
    dumps.write(tmp_path / "d", given, mesh={"tp": 2}, parameters=parameters, microbatches=2)
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.parameter("w")[0].mapped() is None
        assert dump.parameter("n").mapped() is None
        found = dump.parameter("n")[1].mapped()
        assert found is not None
        assert torch.equal(found, parameters["n"].value[1])


def test_a_view_survives_the_dump_and_its_checksum_is_compared(tmp_path: Path) -> None:
    value = random(2, 8, 16, 8)
    with small(tmp_path / "d", value, LOCAL, mesh={}) as dump:
        found = dump["a"][0, :4].mapped()
    assert found is not None
    assert torch.equal(found, value[0, :4]), "the file stays mapped"
    damage(tmp_path / "d")
    with mf.open_dump(tmp_path / "d") as dump, raises(DumpError, "0 of 1", site="a"):
        dump["a"][0, 4:].mapped()


def test_entries_are_read_into_a_given_tensor(tmp_path: Path) -> None:
    given = random(2, 3, 8, 16)
    dumps.write(tmp_path / "d", {"a": Given(given, dumps.COLUMN)}, mesh={"tp": 2})
    with mf.open_dump(tmp_path / "d") as dump:
        wanted = dump["a"][1, :, 2:5]
        out = torch.full(wanted.shape, torch.nan)
        assert wanted.torch(out=out) is out
        assert torch.equal(out, wanted.torch())
        half = torch.empty(wanted.shape, dtype=torch.bfloat16)
        assert torch.equal(wanted.torch(out=half), wanted.torch(torch.bfloat16))
        with raises(DumpError, "a", "[3, 48]", "[3, 3, 16]", site="a"):
            wanted.torch(out=torch.empty(3, 48))
        with raises(DumpError, "a", "[3, 3, 16]", "cpu", site="a"):
            wanted.torch(out=torch.empty(16, 3, 3).permute(2, 1, 0))
        with raises(DumpError, "out=", "dtype=", "device=", site="a"):
            wanted.torch(torch.float32, out=out)
