"""Positions and shuffles are drawn by the hash that the format documents, in every release of torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_flex as mf
from megatron_flex.dump import sampled
from megatron_flex.dump.hashed_order import choose_stream, draw_positions, order_entries
from megatron_flex.errors import DumpError
from megatron_flex.ranges import MAX_NUMBER
from tests.support.dumps import Given, random, sealed_again, write
from tests.support.messages import raises

PAGE = Path(__file__).parents[2] / "docs" / "dump-format.md"
SITE = "decoder.layers.0:output"
SEEDS = st.integers(-MAX_NUMBER, MAX_NUMBER)


def documented() -> dict[str, Any]:
    """The functions of the page's block."""
    text = PAGE.read_text()
    block = re.search(r"```python\n(WORD, INCREMENT.*?)```", text, re.S)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 60), SEEDS, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_the_page_has_the_algorithm(count: int, length: int, seed: int, iteration: int, sample: int) -> None:
    want = documented()["kept_positions"](count, seed, length, iteration, sample)
    assert sampled(count, seed).positions(length, iteration, sample) == want
    both = draw_positions(count, length, seed, iteration, [7, sample])
    assert both[1].tolist() == want, "several samples at once"


def test_fixed_vectors() -> None:
    assert documented()["mix"](0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "SplitMix64 from 0"
    assert choose_stream(0, 0, 0) == 0x238275BC38FCBE91
    assert draw_positions(4, 16, 0, 0, [0, 1]).tolist() == [[0, 1, 8, 9], [1, 5, 9, 10]]
    assert sampled(5, seed=3).positions(length=4096, iteration=7, sample=511) == [856, 2123, 2711, 3027, 4008]
    assert order_entries(12, 5, 0).tolist() == [9, 11, 7, 2, 4, 5, 0, 10, 6, 1, 8, 3]


def test_each_position_is_as_likely() -> None:
    drawn = draw_positions(64, 1024, 1, 2, range(512))
    assert drawn.shape == (512, 64)
    assert bool((drawn.diff(dim=1) > 0).all())
    often = torch.bincount(drawn.flatten(), minlength=1024).double()
    assert 0.8 < often.var() / (32 * (1 - 64 / 1024)) < 1.2, "the variance of a binomial distribution"


@pytest.mark.parametrize("method", [None, "another"])
def test_positions_of_another_method_are_refused(tmp_path: Path, method: str | None) -> None:
    write(tmp_path, {SITE: Given(random(1, 4, 16, 3))}, tokens=sampled(3), gradients=False)
    with mf.open_dump(tmp_path) as dump:
        want = [sampled(3).positions(16, 0, sample) for sample in range(4)]
        assert dump[SITE].tokens.reshape(4, 3).tolist() == want
    (manifest,) = tmp_path.rglob("manifest.json")
    record = json.loads(manifest.read_bytes())["settings"]["tokens"]
    assert record == {"sampled": 3, "seed": 0, "method": "splitmix64"}
    other = b"" if method is None else b', "method": "another"'
    text = re.sub(rb',\s*"method": "splitmix64"', other, manifest.read_bytes())
    assert text != manifest.read_bytes()
    manifest.write_bytes(sealed_again(text))
    with raises(DumpError, repr(method or ""), "splitmix64"), mf.open_dump(tmp_path) as dump:
        _ = dump[SITE].tokens


def test_rows_are_shuffled_alike_by_every_release(tmp_path: Path) -> None:
    write(tmp_path, {SITE: Given(random(1, 2, 4, 1))}, gradients=False)
    with mf.open_dump(tmp_path) as dump:
        whole = dump[SITE].torch().reshape(-1)
        torch.manual_seed(1)
        (rows,) = dump.rows(SITE, batch_size=8, seed=2)
    order = order_entries(8, 2, 0, 0, 0).tolist()
    assert torch.equal(rows.reshape(-1), whole[order])
