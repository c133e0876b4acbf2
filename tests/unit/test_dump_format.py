"""docs/dump-format.md is enough to read a dump: a reader made from it alone reads what the package reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

import numpy as np

import megatron_flex as mf
from tests.support import dump_roads, dumps, plain_reader
from tests.support.dumps import COLUMN, GATED, SEQUENCE, SUMMED, WEIGHT, Given, random

MESH = {"dp": 2, "cp": 2, "tp": 2}


def several(path: Path, **settings: Any) -> None:
    """Microbatches of replicas, with zigzag context parallelism, gradients and partial sums."""
    sites = {
        "a": Given(random(2, 8, 16, 4), SEQUENCE, random(2, 8, 16, 4, seed=1)),
        "b": Given(random(2, 8, 16, 8, seed=2), GATED),
        "c": Given(random(2, 8, 16, 4, seed=3), SUMMED),
        "d": Given(random(2, 8, 16, 4, seed=5), COLUMN),
    }
    weights = {"w": Given(random(2, 8, 4, seed=4), WEIGHT, random(2, 8, 4, seed=6))}
    dumps.write(path, sites, mesh=MESH, parameters=weights, microbatches=2, **settings)


def ragged(path: Path) -> None:
    """Sequences of another length in each microbatch."""
    given = {"a": Given(random(1, 8, 16, 4), SEQUENCE)}
    dumps.write(path, given, mesh={"dp": 2, "tp": 2}, microbatches=2, lengths=(8, 16, 12, 16), order="blocks")


KINDS: dict[str, Callable[[Path], None]] = {
    **dump_roads.KINDS,
    "interleaved": several,
    "blocks": lambda path: several(path, order="blocks"),
    "slice": lambda path: several(path, tokens=slice(1, None, 3)),
    "positions": lambda path: several(path, tokens=[-1, 0, 5], samples=slice(1, 8, 3)),
    "sampled": lambda path: several(path, tokens=mf.sampled(5, seed=3), order="blocks"),
    "means": lambda path: several(path, reduce="mean", tokens=slice(0, 12)),
    "ragged": ragged,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_made_from_the_page_has_the_same_values(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    KINDS[kind](path)
    found = plain_reader.read(path / "run-0000")
    with mf.open_dump(path) as dump:
        names = dump.order
        wanted = {(n, "value") for n in names if not n.endswith(".grad")}
        wanted |= {(n.removesuffix(".grad"), "gradient") for n in names if n.endswith(".grad")}
        assert {key for key in found if not key[1].startswith("parameter")} == wanted
        assert {site for site, what in found if what.startswith("parameter")} == set(dump.parameters)
        for (site, what), iterations in found.items():
            if what.startswith("parameter"):
                array = dump.parameter(site, gradient=what == "parameter_gradient")
                for at, number in enumerate(array.iterations):
                    close(iterations[number], array[at])
                continue
            array = dump[site + ".grad" if what == "gradient" else site]
            assert array.samples is not None
            samples = array.samples.tolist()
            for at, number in enumerate(array.iterations):
                assert sorted(iterations[number]) == samples
                for row, sample in enumerate(samples):
                    value = iterations[number][sample]
                    close(value, array[at, row, : len(value)] if kind == "ragged" else array[at, row])


def close(value: Any, array: Any) -> None:
    np.testing.assert_allclose(value, array.torch().float().numpy(), rtol=1e-6, atol=1e-6)
    assert np.abs(value).max() > 0


def test_the_reader_notices_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous parts in place of zigzag give other values."""
    several(tmp_path / "d")
    right = plain_reader.read(tmp_path / "d" / "run-0000")["a", "value"][0][0]
    divide = plain_reader.divide
    monkeypatch.setattr(
        plain_reader, "divide", lambda e, cut, *rest: divide(e, {**cut, "order": "contiguous"}, *rest)
    )
    assert not np.array_equal(plain_reader.read(tmp_path / "d" / "run-0000")["a", "value"][0][0], right)
