"""Opening a dump costs no more than its files are long, whatever is claimed in them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.compare import compare
from megatron_flex.dump.part_format import read_part
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.errors import DumpError
from tests.support import dump_roads, dumps
from tests.support.dumps import SEQUENCE, Given, random
from tests.support.messages import raises
from tests.unit.internals.test_dump_forms import little_memory, rewrite, seal

Index, Header = dict[str, Any], dict[str, Any]
PER_BYTE, AT_LEAST = 12, 400_000  # steps of Python code
BYTES = 400_000  # about as large as a header is made
SECONDS = 20  # of the processor, for what no step of Python counts


@contextmanager
def counted(steps: list[int]) -> Iterator[None]:
    """Count the calls and the jumps of loops."""
    tool, events = 4, sys.monitoring.events
    found = [0]

    def step(*_: Any) -> None:
        found[0] += 1

    sys.monitoring.use_tool_id(tool, "steps")
    for event in (events.PY_START, events.JUMP, events.CALL):
        sys.monitoring.register_callback(tool, event, step)
    sys.monitoring.set_events(tool, events.PY_START | events.JUMP | events.CALL)
    try:
        yield
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)
        steps.append(found[0])


def entry(index: Index) -> dict[str, Any]:
    found: dict[str, Any] = index["entries"][0]
    return found


def many_dims(index: Index, told: Header) -> None:
    count = BYTES // 12
    entry(index)["shape"] = [1] * count + entry(index)["shape"]
    told[next(iter(told))]["shape"] = entry(index)["shape"]
    index["layouts"][0]["dims"] = [{"name": ""}] * count + index["layouts"][0]["dims"]


def huge_dims(index: Index, told: Header) -> None:
    entry(index)["shape"] = [1 << 62] * (BYTES // 22)


def many_segments(index: Index, told: Header) -> None:
    for dim in index["layouts"][0]["dims"]:
        dim["segments"] = [1] * (BYTES // 6)


def deep(index: Index, told: Header) -> None:
    index["layouts"] = json.loads("[" * 900 + "]" * 900)


def rows_claimed(index: Index, told: Header) -> None:
    """Of each tensor tokens or samples were picked, out of more than anybody has."""
    for one in index["entries"]:
        one["picked"] = True
        one["shape"] = [1 << 13, 1 << 12, 4]


def empty_rows(index: Index, told: Header) -> None:
    one = entry(index)
    extra = [{**one, "microbatch": n + 1, "shape": [1, 1 << 22, 0], "blocks": ""} for n in range(40)]
    index["entries"] += extra
    for n in range(40):
        told[f"a|value|{n + 1}|0"] = {"dtype": "F32", "shape": [1, 1 << 22, 0], "data_offsets": [0, 0]}
    front = {k: v for k, v in told.items() if v["data_offsets"] == [0, 0]}
    rest = {k: v for k, v in told.items() if k not in front}
    told.clear()
    told.update({**front, **rest})


def aliased(index: Index, told: Header) -> None:
    first = next(iter(told))
    one = told[first]
    for n in range(BYTES // 250):
        told[f"a|value|{n + 1}|0"] = dict(one)
        index["entries"].append({**entry(index), "microbatch": n + 1})


PARTS: dict[str, Callable[[Index, Header], None]] = {
    f.__name__: f for f in (many_dims, huge_dims, many_segments, deep, rows_claimed, empty_rows, aliased)
}
SETTINGS: dict[str, dict[str, Any]] = {
    "samples to 10^12": {"samples": {"slice": [0, 10**12, 1]}},
    "tokens to 10^12": {"tokens": {"slice": [0, 10**12, 1]}},
    "strided tokens": {"tokens": {"slice": [-(10**12), 10**12, 7]}},
    "drawn": {"tokens": {"sampled": 10**12, "seed": 0}},
    "many samples": {"samples": list(range(0, BYTES // 7))},
    "iterations": {"iterations": {"slice": [0, 10**12, 1]}},
}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "d"
    dumps.write(
        path, {"a": Given(random(1, 2, 8, 4), SEQUENCE), "b": Given(random(1, 2, 8, 4))}, mesh={"tp": 2}
    )
    return path


def commands(path: Path, scratch: Path) -> dict[str, Callable[[], Any]]:
    ways = dump_roads.roads(path, slow=False)
    out: dict[str, Callable[[], Any]] = {
        "ls": lambda: list_dump_contents(path),
        "verify": lambda: verify_dump(path),
    }
    out["compare"] = lambda: compare(path, path)
    for name in ("whole", "page", "safetensors", "statistics"):
        out[name] = lambda road=ways[name]: road(path, scratch)
    return out


def cheap(path: Path, tmp_path: Path) -> None:
    """Every command that opens the dump ends soon, with whatever it says, and in bounded memory."""
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    (tmp_path / "out").mkdir()
    for name, command in commands(path, tmp_path / "out").items():
        steps: list[int] = []
        before = time.process_time()
        with counted(steps), little_memory(1024), suppress(DumpError):
            command()
        assert steps[0] < AT_LEAST + PER_BYTE * size, f"{name}: {steps[0]:,} steps for {size:,} bytes"
        assert time.process_time() - before < SECONDS, name


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 counts steps")
@pytest.mark.parametrize("bomb", PARTS)
def test_headers_that_claim_much(dump: Path, tmp_path: Path, bomb: str) -> None:
    rewrite(sorted(dump.rglob("*.safetensors"))[0], PARTS[bomb])
    cheap(dump, tmp_path)


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 counts steps")
@pytest.mark.parametrize("bomb", SETTINGS)
def test_settings_that_claim_much(dump: Path, tmp_path: Path, bomb: str) -> None:
    path = dump / "run-0000" / "manifest.json"
    told = json.loads(path.read_text())
    told["settings"] |= SETTINGS[bomb]
    seal(path, told)
    for file in dump.rglob("*.safetensors"):
        rewrite(file, rows_claimed)
    cheap(dump, tmp_path)
    told["settings"]["reduce"] = "mean"
    seal(path, told)
    (tmp_path / "out").rename(tmp_path / "before")
    cheap(dump, tmp_path)


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 counts steps")
def test_a_manifest_of_much(dump: Path, tmp_path: Path) -> None:
    """Layouts with many segments, many sites, many dims."""
    path = dump / "run-0000" / "manifest.json"
    told = json.loads(path.read_text())
    site = told["sites"][0]
    many = {"dims": [{"name": "", "segments": [1] * (BYTES // 6)}] * 2}
    wide = {"dims": [{"name": ""}] * (BYTES // 12)}
    told["sites"] += [{**site, "name": "c", "layout": many}, {**site, "name": "d", "layout": wide}]
    told["sites"] += [{**site, "name": f"x{n}"} for n in range(BYTES // 1000)]
    seal(path, told)
    cheap(dump, tmp_path)


def test_rows_of_nothing_are_counted_together(dump: Path) -> None:
    """Each of them alone is no more than somebody may have."""
    path = sorted(dump.rglob("*.safetensors"))[0]
    rewrite(path, empty_rows)
    with raises(DumpError, path, 167772160):
        read_part(path)
