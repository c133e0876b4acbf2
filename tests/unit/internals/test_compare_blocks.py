"""Tensors are compared in blocks, which are read ahead, and sums of blocks are those of the tensor."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.compare import compare, error_patterns, tensor_pairs
from megatron_flex.compare.block_sums import split_into_blocks
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.tensor_pairs import DifferenceSums, TensorPair, align_arrays, sum_in_order
from megatron_flex.compare.torch_threads import one_torch_thread
from megatron_flex.dump import VALUE
from megatron_flex.errors import DumpError
from tests.support import dumps
from tests.support.messages import raises
from tests.unit.test_compare import FIRST, SAMPLES, SECOND, TOKENS, WIDTH, both, given, of_one, tensor


def test_blocks_cover_everything_once() -> None:
    for shape in ((), (1,), (5, 3, 7), (2, 100)):
        seen = torch.zeros(shape)
        for block in split_into_blocks(shape, 8 * 6):
            assert seen[block].numel() <= 6
            seen[block] += 1
        assert (seen == 1).all()
    assert list(split_into_blocks((3, 0, 2))) == []


def test_small_blocks_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, other = tensor(), tensor()
    other[0, 4, 9, 3] -= 2
    other[0, 4, 2] += 0.1
    paths = both(tmp_path, {FIRST: given(value)}, {FIRST: given(other)})
    whole = compare(*paths)
    read: list[int] = []
    from megatron_flex.dump.reader import DumpArray

    real = DumpArray.torch
    monkeypatch.setattr(DumpArray, "torch", lambda self, **k: (read.append(self.size), real(self, **k))[1])
    small = compare(*paths, block_bytes=8 * 20)
    assert max(read) <= 20
    assert small.first is not None
    assert whole.first is not None
    assert small.first.worst == whole.first.worst
    assert small.first.relative == pytest.approx(whole.first.relative)


@pytest.mark.parametrize("cores", [2, 3])
def test_blocks_are_read_ahead_within_and_across_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """Each core reads and sums one block ahead."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(tensor_pairs, "MIN_READ_AHEAD", 1)
    value = {FIRST: tensor(), SECOND: tensor(seed=1)}
    other = {site: one + 0.01 * tensor(seed=2) for site, one in value.items()}
    paths = both(tmp_path, {s: given(t) for s, t in value.items()}, {s: given(t) for s, t in other.items()})
    begun: list[str] = []
    real = tensor_pairs.TensorPair.read

    def read(pair: TensorPair, *args: Any) -> Any:
        begun.append(pair.item.site)
        return real(pair, *args)

    monkeypatch.setattr(tensor_pairs.TensorPair, "read", read)
    with mf.open_dump(paths[0]) as a, mf.open_dump(paths[1]) as b:
        tensors = []
        for site in value:
            pairs = align_arrays(ComparedTensor(site, VALUE), 0, a[site], b[site])
            assert not isinstance(pairs, str)
            tensors.append(pairs)
        blocks = len(list(split_into_blocks(tensors[0][0].shape, 8 * 20)))
        for number, (pairs, found) in enumerate(sum_in_order(iter(tensors), 8 * 20)):
            assert pairs is tensors[number]
            site = pairs[0].item.site
            one, two = value[site].double(), other[site].double()
            assert found.sums.relative == pytest.approx(
                float((two - one).norm() / max(one.norm(), two.norm()))
            )
            assert found.sums.count == value[site].numel()
            due = min((number + 1) * blocks + cores, 2 * blocks)
            for _ in range(3000):  # another thread reads
                if len(begun) == due:
                    break
                time.sleep(0.01)
            assert len(begun) == due, "the next tensor's first blocks, and no more"
    assert sorted(begun) == sorted([FIRST] * blocks + [SECOND] * blocks)


def test_shards_are_copied_into_memory_and_what_one_shard_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, ...]] = []
    real = tensor_pairs.ReusedMemory.take

    def take(memory: Any, shape: Any, dtype: torch.dtype) -> Tensor:
        taken.append(tuple(shape))
        return real(memory, shape, dtype)

    monkeypatch.setattr(tensor_pairs.ReusedMemory, "take", take)
    result = of_one(tmp_path, tensor(), tensor())
    assert result.verdict == "equal"
    assert taken == [(SAMPLES, TOKENS, WIDTH)], "B is in shards"
    taken.clear()
    assert compare(tmp_path / "a", tmp_path / "a").verdict == "equal"
    assert not taken


def test_torch_has_one_thread_while_two_dumps_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = both(tmp_path, {FIRST: given(tensor())}, {FIRST: given(tensor())})
    seen: set[int] = set()
    real = tensor_pairs.sum_real_block

    def watch(a: Tensor, b: Tensor) -> Any:
        seen.add(torch.get_num_threads())
        return real(a, b)

    monkeypatch.setattr(tensor_pairs, "sum_real_block", watch)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert compare(*paths).verdict == "equal"
        assert (seen, torch.get_num_threads()) == ({1}, 3)
        with raises(DumpError, tmp_path / "none"):
            compare(paths[0], tmp_path / "none")
        assert torch.get_num_threads() == 3, "after an error too"
    finally:
        torch.set_num_threads(before)


def test_torch_gets_its_threads_back_after_the_last_of_two_comparisons() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        first, second = one_torch_thread(), one_torch_thread()
        seen = []
        for step in (first.__enter__, second.__enter__):
            step()
            seen.append(torch.get_num_threads())
        for one in (first, second):
            one.__exit__(None, None, None)
            seen.append(torch.get_num_threads())
        assert seen == [1, 1, 1, 3]
    finally:
        torch.set_num_threads(before)


def test_statistics_of_blocks_are_those_of_the_whole() -> None:
    a, b = dumps.random(6, 5), dumps.random(6, 5, seed=1)
    whole, parts = DifferenceSums(), DifferenceSums()
    whole.add(a, b, (0, 0))
    for block in split_into_blocks(a.shape, 8 * 7):
        parts.add(a[block], b[block], tuple(s.start for s in block))
    assert parts.worst == whole.worst
    assert parts.relative == pytest.approx(float((a - b).norm() / max(a.norm(), b.norm())))
    assert parts.cosine == pytest.approx(float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)))
    assert parts.greatest == pytest.approx(float((a - b).abs().max()))


def test_noise_has_no_pattern(tmp_path: Path) -> None:
    value = tensor()
    result = of_one(tmp_path, value, value + 0.1 * tensor(9))
    assert result.verdict == "diverges"
    assert result.causes == []
    assert all("decoder.layers.0**" in hint for hint in result.hints), "what to dump, and no pattern"
    assert error_patterns.find_constant_factor(float("nan"), 0.0, {}) == ""
