"""JSON for people and programs has no token that a strict parser refuses, whatever the values are."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import pytest

from megatron_flex.alignment import Alignment, SiteVerdict
from megatron_flex.compare import Row, Worst
from megatron_flex.dump.json_form import format_json
from tests.support.pages import ROOT

PACKAGE = ROOT / "megatron_flex"
# JSON that stays in the process or in its store, and the header of a part, which has no numbers but integers.
INTERNAL = {
    "adapters/propagation/layout_trace.py",
    "collectives/pipeline_gather.py",
    "collectives/rank_agreement.py",
    "collectives/transport/node_sockets.py",
    "dump/part_format.py",
    "dump/reader/expert_tensors.py",
    "dump/reader/shard_files.py",
    "estimate/dump_estimate.py",
    "estimate/run_estimate.py",
    "runtime/dump_sink.py",
    "runtime/function_agreement.py",
    "statistics/statistics_files.py",
}


def refuse(token: str) -> Any:
    raise ValueError(f"{token} is no JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def test_floats_that_json_lacks_are_strings() -> None:
    content = {"a": [math.inf, (-math.inf, math.nan)], "b": {"c": 1.5, "d": None}, "path": ROOT}
    assert strict(format_json(content)) == {
        "a": ["inf", ["-inf", "nan"]],
        "b": {"c": 1.5, "d": None},
        "path": str(ROOT),
    }


def test_an_alignment_with_a_nan(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from megatron_flex.cli.align_command import print_alignment
    from megatron_flex.cli.json_output import print_json

    site, worst = "decoder.layers.0:output", Worst(0, None, None, (0, 1), math.nan, 1.0)
    bad = Row(site, "value", 0, 8, math.inf, math.nan, math.inf, math.inf, 1e-5, False, worst)
    verdict = SiteVerdict(site, "model.layers.0:output", "0", bad, bad)
    print_json(Alignment("two models", (verdict,)).to_json())
    found = strict(capsys.readouterr().out)
    assert found["sites"][0]["accumulated"]["error"] == "inf"
    assert found["sites"][0]["accumulated"]["worst"]["a"] == "nan"
    assert found["layers"][0]["isolated_error"] == "inf"
    print_alignment(found)
    assert "decoder.layers.0:output" in capsys.readouterr().out


def lenient_calls() -> list[str]:
    """Where the package writes JSON that may have such tokens."""
    out = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            writes = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("dump", "dumps")
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "json"
            )
            if writes and not any(
                k.arg == "allow_nan" and isinstance(k.value, ast.Constant) and k.value.value is False
                for k in node.keywords  # type: ignore[attr-defined]  # of a call
            ):
                out.append(name)
    return out


def test_files_and_output_are_written_strictly() -> None:
    assert set(lenient_calls()) <= INTERNAL
