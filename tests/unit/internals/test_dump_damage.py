"""A damaged byte of any stored tensor is an error on every road on which it is read, and no value changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megatron_flex.checksums import CHECKSUM_BLOCK
from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.errors import DumpError
from tests.support.dump_roads import KINDS, Outcome, Stored, flip, roads, stored
from tests.support.messages import assert_names, missing_values

ALWAYS = ("whole", "first", "slices")  # of the other roads each notices one of the bytes of a tensor


@pytest.mark.parametrize("kind", KINDS)
def test_no_road_gives_a_damaged_value(kind: str, tmp_path: Path) -> None:
    good, path = tmp_path / "good", tmp_path / "damaged"
    KINDS[kind](good)
    shutil.copytree(good, path)
    ways = roads(good, slow=False)
    right = {name: road(good, fresh(tmp_path)) for name, road in ways.items()}
    for name, found in right.items():
        assert not [e for e in found.values() if isinstance(e, DumpError)], name
    for one in stored(path):
        noticed: set[str] = set()
        for nth, at in enumerate(sorted({0, one.size // 2, max(one.size - 1, 0)} if one.size else ())):
            flip(one.file, one.first + at)
            for number, (name, road) in enumerate(ways.items()):
                if name not in ALWAYS and (number + nth) % 3:
                    continue
                noticed |= (
                    {name} if errors(right[name], road(path, fresh(tmp_path)), one, at, name) else set()
                )
            flip(one.file, one.first + at)
        assert one.size == 0 or {"whole", "slices"} <= noticed, (one.tensor, noticed)


@pytest.mark.parametrize("kind", ["spread", "picked", "experts"])
def test_no_export_has_a_damaged_value(kind: str, tmp_path: Path) -> None:
    """Zarr and datasets, which take their time: one byte of each tensor."""
    good, path = tmp_path / "good", tmp_path / "damaged"
    KINDS[kind](good)
    shutil.copytree(good, path)
    ways = {name: road for name, road in roads(good).items() if name in ("zarr", "datasets")}
    right = {name: road(good, fresh(tmp_path)) for name, road in ways.items()}
    noticed = 0
    for number, one in enumerate(stored(path)):
        at = (0, one.size // 2, one.size - 1)[number % 3]
        flip(one.file, one.first + at)
        noticed += sum(
            errors(right[name], road(path, fresh(tmp_path)), one, at, name) for name, road in ways.items()
        )
        flip(one.file, one.first + at)
    assert noticed >= len(stored(path))


def errors(right: Outcome, found: Outcome, one: Stored, at: int, road: str) -> int:
    """How many values of a road were refused; the others are those of the dump that is not damaged."""
    count = 0
    for label, want in right.items():
        value = found.get(label, found.get("compare"))
        assert value is not None, (road, label)
        if isinstance(value, DumpError):
            count += 1
            text, (site, kind, *_) = str(value), one.tensor.split("|")
            block = at // CHECKSUM_BLOCK
            assert missing_values(text, one.file.name, site, kind, block) == [], (road, label, text)
        else:
            assert isinstance(want, torch.Tensor)
            assert torch.equal(value, want), f"{road}: {label} is wrong, and {one.tensor} is damaged at {at}"
    return count


def fresh(tmp_path: Path) -> Path:
    scratch = tmp_path / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return scratch


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_dump_is_found_good(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "d")
    found = verify_dump(tmp_path / "d")
    assert found.findings == []
    assert found.tensors == len(stored(tmp_path / "d"))


def test_verify_names_the_block(tmp_path: Path) -> None:
    KINDS["spread"](tmp_path / "d")
    one = max(stored(tmp_path / "d"), key=lambda s: s.size)
    assert CHECKSUM_BLOCK < one.size <= 2 * CHECKSUM_BLOCK
    for at in (0, one.size - 1):
        flip(one.file, one.first + at)
    (finding,) = verify_dump(tmp_path / "d").findings
    assert finding.kind == "checksum"
    assert_names(finding.text, 0, 2)
