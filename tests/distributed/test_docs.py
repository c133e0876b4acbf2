"""The examples in the documents run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import gpt, moe, ranks
from tests.support.gpt import Case
from tests.support.pool import run

ROOT = Path(__file__).parents[2]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


CASE = Case("tp2 sp pp2", tp=2, sp=True, pp=2)
EXPERTS = Case("tp2 sp pp2 ep2", tp=2, sp=True, pp=2, ep=2, experts=4, layers=2)


def execute(code: str, case: Case = CASE) -> list[str]:
    chunks = ranks.start(case)
    printed: list[str] = []

    def collect(*words: Any) -> None:
        printed.append(" ".join(str(w) for w in words))

    names = {"chunks": chunks, "print": collect, "train_step": lambda c: gpt.step(case, c, 0)}
    exec(code, names)
    return printed


def test_the_readme_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "README.md")
    answers = run(4, execute, code)
    wide = f"({gpt.SEQUENCE}, {gpt.BATCH}, {2 * gpt.FFN})"
    stream = f"({gpt.SEQUENCE}, {gpt.BATCH}, {gpt.HIDDEN})"
    wanted = [f"decoder.layers.{n}.mlp.linear_fc1:output {wide}" for n in range(4)]
    assert sorted(answers[0]) == sorted([*wanted, f"decoder.layers.2:output {stream}"])
    assert answers[1:] == [[], [], []]


def test_the_page_on_parameters_runs() -> None:
    pytest.importorskip("megatron.core")
    whole, check = blocks(ROOT / "docs" / "parameters.md")
    answers = run(4, execute, whole)
    weight = f"({2 * gpt.FFN}, {gpt.HIDDEN})"
    assert answers[0][0] == weight
    assert f"decoder.layers.3.mlp.linear_fc1.weight {weight}" in answers[0]
    assert f"output_layer.weight ({gpt.VOCABULARY}, {gpt.HIDDEN})" in answers[0]
    assert answers[1:] == [[], [], []]
    assert run(4, execute, check) == [[], [], [], []]


def test_the_page_on_sites_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "sites.md")
    (dispatched, expert), *others = run(4, execute, code, EXPERTS)
    shape, rows = f"({gpt.SEQUENCE}, {gpt.BATCH}, {moe.TOPK}", int(dispatched.rpartition(" ")[2])
    assert dispatched == f"{shape}, {gpt.HIDDEN}) {shape}) {rows}"
    assert rows > 0
    assert expert == f"({rows}, {2 * moe.WIDTH})", (
        "an expert's own rows are those of the slots with its number"
    )
    assert others == [[], [], []]


def test_the_page_on_cpus_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "cpu.md")
    run(1, _run_plainly, code)


def test_the_page_on_gradients_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "gradients.md")
    first, *others = run(4, execute, code)
    shape = f"({gpt.SEQUENCE}, {gpt.BATCH}, {gpt.HIDDEN})"
    assert first == [f"decoder.layers.3:output.grad {shape}"]
    assert others == [[], [], []]


def _run_plainly(code: str) -> None:
    exec(code, {})
