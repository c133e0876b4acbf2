"""Rows of tokens for training: each once, at random, aligned over sites, within bounded memory."""

from __future__ import annotations

import json
import pickle
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import megatron_flex as mf
from megatron_flex.errors import DumpError
from tests.support import dumps
from tests.support.dumps import COLUMN, SEQUENCE, Given
from tests.support.messages import raises

ROWS = 3 * 8 * 16  # iterations, samples, tokens


@pytest.fixture
def dump(tmp_path: Path) -> mf.OpenDump:
    """Two sites whose rows have their number in all of 4, or 6, features."""
    numbers = torch.arange(ROWS, dtype=torch.float32).reshape(3, 8, 16, 1)
    given = {
        "a": Given(numbers.expand(-1, -1, -1, 4).clone(), SEQUENCE),
        "b": Given(-numbers.expand(-1, -1, -1, 6).clone(), COLUMN),
    }
    dumps.write(tmp_path / "d", given, mesh={"dp": 2, "tp": 2}, microbatches=2)
    return mf.open_dump(tmp_path / "d")


def numbers(batches: list[Tensor]) -> list[int]:
    return [int(n) for batch in batches for n in batch[:, 0].tolist()]


def test_the_dataset_has_all_rows_by_number(dump: mf.OpenDump) -> None:
    data = dump.dataset("a")
    assert len(data) == ROWS
    assert data[37].tolist() == [37] * 4
    assert data[-1].tolist() == [ROWS - 1] * 4
    assert [int(r[0]) for r in data.__getitems__([5, 200, 4, 5])] == [5, 200, 4, 5]
    with raises(IndexError, f"{ROWS} of {ROWS}"):
        data[ROWS]


def test_datasets_of_several_sites_are_aligned(dump: mf.OpenDump) -> None:
    a, b = dump.dataset(["a", "b"], dtype=torch.bfloat16)[7]
    assert (a.tolist(), b.tolist()) == ([7] * 4, [-7] * 6)
    assert a.dtype == torch.bfloat16


def test_datasets_of_some_iterations_and_tokens(dump: mf.OpenDump) -> None:
    data = dump.dataset("a", iterations=[2, 0], tokens=slice(4, None, 4))
    assert len(data) == 2 * 8 * 3
    assert int(data[0][0]) == 2 * 128 + 4
    assert int(data[24][0]) == 4
    sliced = dump.dataset(dump["a"].at(2, 0)[:, :, 4::4])
    assert [int(r[0]) for r in sliced] == [int(r[0]) for r in data]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_the_dataset(dump: mf.OpenDump, workers: int) -> None:
    mixing = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(
        dump.dataset("a"),
        32,
        shuffle=True,
        num_workers=workers,
        generator=mixing,
        timeout=60 * bool(workers),
    )
    assert sorted(numbers(list(loader))) == list(range(ROWS))


@pytest.mark.parametrize(("buffer", "block", "batch"), [(1, 1, 1), (64, 8, 10), (99, 500, 7), (10**6, 5, 64)])
def test_each_row_comes_once(dump: mf.OpenDump, buffer: int, block: int, batch: int) -> None:
    rows = dump.rows("a", batch, buffer=buffer, block=block)
    batches = list(rows)
    assert {len(b) for b in batches[:-1]} == {batch}
    found = numbers(batches)
    assert sorted(found) == list(range(ROWS))
    assert found != list(range(ROWS))
    assert all((b == b[:, :1]).all() for b in batches)


def test_without_shuffling_rows_are_in_order(dump: mf.OpenDump) -> None:
    for block in (5, 16, 33):
        assert numbers(list(dump.rows("a", 10, shuffle=False, buffer=40, block=block))) == list(range(ROWS))


def test_the_order_is_that_of_seed_and_epoch(dump: mf.OpenDump) -> None:
    rows = dump.rows("a", 16, seed=3, buffer=64, block=8)
    first = numbers(list(rows))
    assert numbers(list(rows)) == first
    assert numbers(list(dump.rows("a", 16, seed=3, buffer=64, block=8))) == first
    assert numbers(list(dump.rows("a", 16, seed=4, buffer=64, block=8))) != first
    rows.epoch = 1
    assert numbers(list(rows)) != first


def test_rows_are_mixed_over_the_whole_dump(dump: mf.OpenDump) -> None:
    """Batches of a buffer of 128 rows, blocks of 4: each is made of about 32 places or more."""
    batches = list(dump.rows("a", 32, buffer=128, block=4, seed=1))
    for batch in batches[:-1]:
        found = numbers([batch])
        assert len({n // 128 for n in found}) == 3  # of all iterations
        assert len({n // 4 for n in found}) > 16
        rises = sum(a + 1 == b for a, b in pairwise(found))
        assert rises < 6
    where = torch.tensor(numbers(batches)).argsort().float()
    corner = torch.corrcoef(torch.stack([where, torch.arange(ROWS).float()]))[0, 1]
    assert abs(float(corner)) < 0.2


def test_rows_of_several_sites_are_aligned(dump: mf.OpenDump) -> None:
    for a, b in dump.rows(("a", "b"), 16, buffer=64, block=8, dtype=torch.float16):
        assert a.dtype == b.dtype == torch.float16
        assert torch.equal(a[:, 0], -b[:, 0])


def test_the_buffer_bounds_what_is_held(dump: mf.OpenDump) -> None:
    rows = dump.rows("a", 8, buffer=32, block=16)
    seen = 0
    for batch in rows:
        seen += len(batch)
        read = dump.files.bytes_read // 16  # a row has 16 bytes
        assert read - seen <= 32 + 16


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_share_the_rows(dump: mf.OpenDump, context: str) -> None:
    dump["a"][0, 0].torch()  # files are open while the workers begin
    rows = dump.rows("a", 16, buffer=64, block=8)
    loader: Any = DataLoader(
        rows, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=120
    )
    found = numbers(list(loader))
    assert sorted(found) == list(range(ROWS))


def test_parts_for_several_processes(dump: mf.OpenDump) -> None:
    found = [numbers(list(dump.rows("a", 16, buffer=64, block=8, part=(r, 3)))) for r in range(3)]
    assert sorted(n for part in found for n in part) == list(range(ROWS))
    assert all(len(part) == ROWS // 3 for part in found)


MASK = (torch.arange(ROWS) % 3 > 0).view(3, -1, 16)


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 11, 23])
@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": False}, {"part": (1, 2)}, {"tokens": MASK, "places": True}],
    ids=["all", "in order", "a part", "a mask, with places"],
)
def test_an_epoch_goes_on_after_its_last_batch(dump: mf.OpenDump, settings: Any, taken: int) -> None:
    def make() -> Any:
        return dump.rows(["a", "b"], 8, buffer=48, block=8, seed=2, **settings)

    rows = make()
    rows.epoch = 1
    whole = list(rows)
    batches = list(islice(rows, taken))
    state = json.loads(json.dumps(rows.state_dict()))
    assert state["batches"] == taken
    later = make()
    later.load_state_dict(state)
    assert later.state_dict() == state, "before the first batch"
    batches += list(later)
    assert len(batches) == len(whole)
    assert all(
        torch.equal(x, y) for b, w in zip(batches, whole, strict=True) for x, y in zip(b, w, strict=True)
    )
    again = list(later)  # the next iteration begins at the beginning
    assert torch.equal(again[0][0], whole[0][0])


def test_batches_that_have_left_are_not_read_again(dump: mf.OpenDump) -> None:
    rows = dump.rows("a", 8, buffer=48, block=8)
    whole = list(rows)
    before = dump.files.bytes_read
    rows.load_state_dict(rows.state_dict() | {"batches": len(whole) - 2})
    assert len(list(rows)) == 2
    assert dump.files.bytes_read - before <= (48 + 16) * 16  # a row has 16 bytes


def test_a_state_of_other_rows_is_refused(dump: mf.OpenDump) -> None:
    state = dump.rows("a", 8, tokens=MASK).state_dict()
    others = {
        "sites": dump.rows("b", 8, tokens=MASK),
        "batch_size": dump.rows("a", 9, tokens=MASK),
        "mask": dump.rows("a", 8, tokens=MASK.flip(2)),
        "share": dump.rows("a", 8, tokens=MASK, part=(1, 2)),
    }
    for name, other in others.items():
        with raises(DumpError, name):
            other.load_state_dict(state)


def test_rows_pickle(dump: mf.OpenDump) -> None:
    rows = dump.rows("a", 16, buffer=64, block=8)
    assert numbers(list(pickle.loads(pickle.dumps(rows)))) == numbers(list(rows))


MASKS = {
    "iteration": lambda mask: mask,
    "all iterations": lambda mask: mask[0],
    "numpy": lambda mask: mask.numpy(),
    "lists": lambda mask: mask[1].tolist(),
}


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("kind", MASKS)
def test_rows_of_a_mask_over_samples_and_tokens(dump: mf.OpenDump, kind: str, block: int) -> None:
    """Rows that the mask leaves out come neither by number nor in a batch."""
    mask = torch.rand(3, 8, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[1, 2:6] = False
    given = MASKS[kind](mask)
    chosen = torch.as_tensor(given).expand(3, 8, 16).flatten().nonzero().flatten().tolist()
    rows = dump.rows("a", 10, tokens=given, shuffle=False, block=block)
    assert rows.rows == len(chosen)
    assert numbers(list(rows)) == chosen
    mixed = list(dump.rows(["a", "b"], 10, tokens=given, buffer=40, block=block))
    assert sorted(numbers([a for a, _ in mixed])) == chosen
    assert all(torch.equal(a[:, 0], -b[:, 0]) for a, b in mixed)
    parts = [list(dump.rows("a", 10, tokens=given, part=(n, 2), block=block)) for n in (0, 1)]
    assert sorted(numbers(parts[0]) + numbers(parts[1])) == chosen
    data = dump.dataset("a", tokens=given)
    assert [int(data[n][0]) for n in range(len(data))] == chosen
    assert int(data[-1][0]) == chosen[-1]
    with pytest.raises(IndexError):
        data[len(chosen)]


def test_blocks_that_a_mask_leaves_out_are_not_read(dump: mf.OpenDump) -> None:
    mask = torch.zeros(8, 16, dtype=torch.bool)
    mask[5, 3] = True
    before = dump.files.bytes_read
    assert numbers(list(dump.rows("a", 4, tokens=mask, iterations=[1], block=16))) == [128 + 5 * 16 + 3]
    assert dump.files.bytes_read - before == 16 * 4 * 4  # a sample of 16 tokens of 4 features in fp32


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(8, 15, dtype=torch.bool),
        torch.ones(2, 8, 16, dtype=torch.bool),
        torch.ones(8, 16),
        [[1], [1, 2]],
    ],
)
def test_a_mask_that_does_not_fit_is_one_short_error(dump: mf.OpenDump, mask: Any) -> None:
    for make in (lambda: dump.rows("a", 4, tokens=mask), lambda: dump.dataset("a", tokens=mask)):
        with raises(DumpError, "tokens"):
            make()
    with raises(DumpError, "sample", "tokens=MASK"):
        dump["a"][0][torch.ones(8, 16, dtype=torch.bool)]


def test_means_have_one_row_for_a_sample(tmp_path: Path) -> None:
    value = dumps.random(2, 8, 16, 4)
    dumps.write(tmp_path / "d", {"a": Given(value, SEQUENCE)}, mesh={"tp": 2}, reduce="mean")
    dump = mf.open_dump(tmp_path / "d")
    assert len(dump.dataset("a")) == 16
    torch.testing.assert_close(dump.dataset("a")[9], value[1, 1].mean(0))
    found = torch.cat(list(dump.rows("a", 5, shuffle=False)))
    torch.testing.assert_close(found, value.mean(2).reshape(16, 4))


def test_what_has_no_rows(dump: mf.OpenDump) -> None:
    with raises(DumpError, "batch_size=0", 1, path=str(dump.path)):
        dump.rows("a", 0)
    with raises(DumpError, "part=(2, 2)", "(r, n)", "n - 1"):
        dump.rows("a", 1, part=(2, 2))
    with raises(DumpError, path=str(dump.path)):
        dump.dataset([])
    with raises(DumpError, "a [3, 8, 16]", "b [3, 8, 15]"):
        dump.rows([dump["a"], dump["b"][:, :, 1:]], 4)
    with raises(DumpError, "a", "sample, token, h"):
        dump.rows(dump["a"][0], 4)


@pytest.mark.parametrize("tokens", [None, slice(1, None, 3), mf.sampled(3, seed=2)], ids=repr)
def test_places_say_which_row_it_is(tmp_path: Path, tokens: Any) -> None:
    """Iteration, sample and position lead back to the values of each row, shuffled or by number."""
    whole = dumps.random(2, 4, 8, 4)
    dumps.write(
        tmp_path / "d",
        {"a": Given(whole)},
        mesh={"dp": 2},
        iterations=[5, 9],
        tokens=tokens,
        samples=[1, 2, 3],
    )
    with mf.open_dump(tmp_path / "d") as dump:
        count = 2 * 3 * len(range(8) if tokens is None else [1, 4, 7])
        found = []
        for rows, places in dump.rows("a", 5, buffer=8, block=4, places=True):
            found += zip(rows, places.tolist(), strict=True)
        data = dump.dataset("a", places=True)
        found += [(row, place.tolist()) for row, place in (data[n] for n in range(len(data)))]
        assert len(found) == 2 * count
        for row, (iteration, sample, position) in found:
            assert torch.equal(row, whole[[5, 9].index(iteration), sample, position])
        assert len({tuple(place) for _, place in found}) == count


def test_places_of_means_and_of_several_sites(tmp_path: Path) -> None:
    sites = {"a": Given(dumps.random(1, 4, 8, 4)), "b": Given(dumps.random(1, 4, 8, 4, seed=1))}
    dumps.write(tmp_path / "d", sites, reduce="mean")
    with mf.open_dump(tmp_path / "d") as dump:
        ((a, b, places),) = dump.rows(["a", "b"], 8, shuffle=False, places=True)
        assert places.tolist() == [[0, n] for n in range(4)]
        assert torch.equal(a, dump["a"][0].torch())
        assert torch.equal(b, dump["b"][0].torch())
        assert [place.tolist() for _, place in (dump.dataset("a", places=True)[n] for n in (3, 0))] == [
            [0, 3],
            [0, 0],
        ]
