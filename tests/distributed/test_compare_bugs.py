"""Comparing dumps finds real distributed bugs, and right runs raise no alarm.

The magnitudes are those of docs/contributing/comparison.md, which `scripts/bench --detection` measured.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from tests.support.bugs import BUGS, BY_NAME, Bug
from tests.support.bugs.bug import CORE
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pages import ROOT
from tests.support.planted import Bench, Pair, judge

pytest.importorskip("megatron.core")

MARGIN = 4  # over the least magnitude that was detected: other machines sum in another order
KEPT: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "detection.json").read_text(encoding="utf-8"))[
    "results"
]
IN_BF16 = [  # what a bound for each element misses in bf16
    "all gradients off by a factor",
    "one rank's loss weighs more",
    "stale copy of one rank's fc1 in the product",
    "softmax scale",
    "output of a linear off by a factor",
    "two heads swapped on one rank",
    "scatter in place of a reduce-scatter",
    "epsilon of a norm",
    "one rank's product in a narrower dtype",
]
CASES = {b.case.name: b.case for b in BUGS}
RIGHT = [
    *CASES.values(),
    Case("tp4 sp, q/k norm", tp=4, sp=True, qk_norm=True, groups=4, layers=2),
    Case("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
    Case("experts tp2 sp ep2", tp=2, sp=True, ep=2, experts=4, layers=2),
]
LARGE = Case("tp2 sp, large scores", tp=2, sp=True, groups=4)
IN_HALF = [
    Pair(CASES["tp2"], "bf16"),
    Pair(Case("tp4 sp, eight layers", tp=4, sp=True, groups=4, layers=8), "bf16", inside=7),
    Pair(CASES["cp2"], "bf16"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("dumps")
    yield Bench(folder)
    shutil.rmtree(folder, ignore_errors=True)


def published(bug: Bug, precision: str) -> float:
    """The magnitude at which the documents say that a bug is detected at its own site, with a margin."""
    probes = KEPT.get(f"bug/{precision}/{bug.name}", {}).get("probes", [])
    return min([bug.magnitude, *(MARGIN * p[0] for p in probes if p[1] and p[2])])


def around(bug: Bug) -> int | None:
    """The layer that is dumped as a whole: the one that a bug stands in; None where whole layers are wrong.

    Other layers are dumped as far as their outputs: right runs show that no alarm comes from inside them.
    """
    begins = (bug.first,) if isinstance(bug.first, str) else bug.first
    layers = {int(found[1]) for b in begins if (found := re.match(r"decoder\.layers\.(\d+)\b", b))}
    moved = bug.kind == "parameter" and begins[0].endswith(".input_layernorm.weight")
    return None if moved or len(layers) > 1 else max(layers, default=1)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_bug_is_found_and_localised(bug: Bug, bench: Bench, findings: list[Any]) -> None:
    pair = Pair(bug.case, steps=bug.steps, inside=around(bug))
    magnitude = published(bug, "fp32")
    result = bench.compared(pair, bug.name, magnitude)
    found = judge(bug, result)
    findings.append(
        {"bug": bug.name, "found": found.found, "localised": found.localised, "first": found.first}
    )
    assert found.found, str(result)
    assert found.localised, f"{found.first}: {result}"
    replicas = {o.name for o in result.replicas}
    assert all(o.dump == "B" for o in result.replicas), "one process has no replicas"
    assert not bug.replica or bug.replica in replicas, str(result)
    if result.first is not None:
        assert result.first.worst is not None
        assert result.first.worst.ranks_b, "the ranks that held it are known"
    kept = KEPT.get(f"bug/fp32/{bug.name}", {}).get("probes")
    if magnitude == bug.magnitude and kept and kept[0][3]:
        assert found.hinted, f"{found.hints}: {result}"


@pytest.mark.parametrize("name", IN_BF16)
def test_bug_is_found_in_bf16(name: str, bench: Bench) -> None:
    bug = BY_NAME[name]
    result = bench.compared(Pair(bug.case, "bf16", inside=around(bug)), name, published(bug, "bf16"))
    found = judge(bug, result)
    assert found.found, str(result)
    assert found.localised, f"{found.first}: {result}"


@pytest.mark.parametrize(
    "pair",
    [*map(Pair, RIGHT), *IN_HALF],
    ids=lambda pair: pair.case.name if pair.precision == "fp32" else f"{pair.precision} {pair.case.name}",
)
def test_right_run_raises_no_alarm(pair: Pair, bench: Bench, findings: list[Any]) -> None:
    result = bench.compared(pair)
    alarm = result.exit_status != 0
    findings.append({"case": pair.name, "alarm": alarm, "tensors": len(result.rows)})
    assert not alarm, str(result)
    kinds = {r.kind for r in result.rows}
    assert kinds == {"parameter", "value", "gradient", "parameter_gradient"}
    assert not [n for n in result.notes if "only in" in n], "both dumps have every place"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_adam_raise_no_alarm(precision: str, bench: Bench) -> None:
    """Parameters drift apart by round-off from step to step."""
    case = replace(CASES["tp2 dp2"], name="tp2 sp dp2", sp=True, microbatches=1)
    result = bench.compared(Pair(case, precision, steps=8, few=True))
    assert result.verdict == INDISTINGUISHABLE, str(result)
    assert {r.iteration for r in result.rows} == set(range(8))
    moved = [r for r in result.rows if r.kind == "parameter"]
    assert all(r.equal for r in moved if r.iteration == 0)
    assert any(not r.equal for r in moved if r.iteration == 1)


def with_large_scores(bench: Bench, pair: Pair) -> None:
    """Weights of queries and keys in which attention scores are near 100, for both runs of the pair."""
    folder, weights = bench.alone(pair)
    state = torch.load(weights)
    torch.save({n: t * 32**0.5 if "linear_qkv.weight" in n else t for n, t in state.items()}, weights)
    shutil.rmtree(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_large_attention_scores_raise_no_alarm(precision: str, tmp_path: Path) -> None:
    """The round-off of scores is relative to them; that of their softmax and its gradient is not."""
    bench, pair = Bench(tmp_path), Pair(LARGE, precision)
    with_large_scores(bench, pair)
    scores = mf.open_dump(bench.alone(pair)[0])[f"{CORE}:scores"].at(0)[0].torch()
    assert 90 < float(scores[scores > -5000].abs().max()) < 200, "the rest is masked"
    result = bench.compared(pair)
    assert result.verdict == INDISTINGUISHABLE, str(result)
    assert len([n for n in result.notes if "core_attention:" in n]) == 1, "that its scores are large"


def test_bugs_are_found_beside_large_attention_scores(tmp_path: Path) -> None:
    bench, pair = Bench(tmp_path), Pair(LARGE, inside=1)
    with_large_scores(bench, pair)
    for name, magnitude in (
        ("softmax scale", 0.01),
        ("attention mask shifted", 1.0),
        ("output of a linear off by a factor", 0.01),
    ):
        bug = BY_NAME[name]
        found = judge(bug, bench.compared(pair, name, magnitude))
        assert found.found, name
        assert found.localised, f"{name}: {found.first}"


def test_scores_that_were_not_dumped_are_suggested(tmp_path: Path) -> None:
    bench, pair = Bench(tmp_path), Pair(LARGE, "bf16", few=True)
    with_large_scores(bench, pair)
    result = bench.compared(pair)
    assert result.verdict == "diverges"
    (hint,) = (h for h in result.hints if "core_attention:scores" in h)
    assert_names(hint, "**.core_attention:scores", "probs")


def test_tolerance_from_a_run_that_is_disturbed(bench: Bench) -> None:
    """One process with weights off by a digit gives the noise; a right run is within it, a bug is not."""
    bug = BY_NAME["all-reduce missing after a row-parallel linear"]
    pair = Pair(bug.case)
    alone, weights = bench.alone(pair)
    generator = torch.Generator().manual_seed(5)
    state = torch.load(weights)
    disturbed = {n: t * (1 + 1e-7 * torch.randn(t.shape, generator=generator)) for n, t in state.items()}
    torch.save(disturbed, bench.folder / "disturbed weights")
    third = bench.made(pair, pair.run.single(), "disturbed", bench.folder / "disturbed weights")
    right = bench.compared(pair, tolerance_from=third)
    assert right.verdict == INDISTINGUISHABLE, str(right)
    wrong = compare(alone, bench.spread(pair, bug.name, 1.0), tolerance_from=third)
    assert wrong.first is not None
    assert wrong.first.name == bug.first
    assert {r.tolerance for r in right.rows} != {r.tolerance for r in bench.compared(pair).rows}


def test_the_bench_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "measure"))
    detection = importlib.import_module("bench_detection")
    kept, page = tmp_path / "kept.json", tmp_path / "page.md"
    shown = ROOT / "docs" / "contributing" / "comparison.md"
    page.write_text(shown.read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--json", str(kept), "--only", "bug", "--bugs", "output of a linear off", "--precisions", "fp32"]
    detection.main([*words, "--write", str(page)])
    (found,) = json.loads(kept.read_text())["results"].values()
    assert found["alarm"] == 0
    magnitudes = [p[0] for p in found["probes"]]
    seen = {p[0] for p in found["probes"] if p[1]}
    missed = set(magnitudes) - seen
    assert magnitudes[0] == 0.1
    assert max(missed) < min(seen) <= 4 * max(missed), "the least that is seen, to within a factor of four"
    assert f"| relative | {min(seen):.1e} |" in page.read_text()
    capsys.readouterr()
    detection.main(words)
    assert "bug/" not in capsys.readouterr().out, "nothing is measured twice"
