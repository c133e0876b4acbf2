"""An edit fails on one rank of a model that is frozen in part: all ranks raise, and the next step is good.

Whether a result needs a gradient decides which collectives a backward pass has, those of the model included:
each table pairs an edited tensor and a result that need one, or do not, with kinds of edits, ranks and steps.
In step 0 an edit runs for the first time, in step 1 by its plan.
"""

from __future__ import annotations

import pytest

from tests.support import failing
from tests.support.failing import Row
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

INPUT, HIDDEN = (
    "decoder.layers.0:input",
    "decoder.layers.0.mlp.linear_fc2:input",
)  # replicated, sharded over tp
LATER = "decoder.layers.1:input"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1:output"
TENSOR = [
    Row("gathered", INPUT, "model", True, 0, 0),
    Row("gathered", HIDDEN, "embedding", True, 1, 0),
    Row("gathered", HIDDEN, "model", True, 1, 1),
    Row("gathered", HIDDEN, "model", False, 1, 0),
    Row("gathered", HIDDEN, "", True, 0, 1, True),
    Row("gathered", HIDDEN, "model", True, 1, 1, mode="forward"),
    Row("gathered", HIDDEN, "model", True, 1, 0, mode="call"),
    Row("local", INPUT, "model", True, 1, 0),
    Row("local", INPUT, "model", True, 0, 1, True),
    Row("local", HIDDEN, "model", False, 1, 0),
    Row("sum", HIDDEN, "embedding", False, 1, 0),
    Row("sum", HIDDEN, "", False, 1, 1),
    Row("sum", HIDDEN, "model", False, 0, 1, True),
    Row("chain", HIDDEN, "embedding", False, 1, 0),
    Row("chain", HIDDEN, "", False, 1, 1),
    Row("two", HIDDEN, "model", True, 1, 0),
    Row("once", INPUT, "model", True, 0, 0),
    Row("skip", HIDDEN, "model", True, 1, 0),
    Row("skip", HIDDEN, "embedding", True, 0, 1, True),
    Row("skip sum", HIDDEN, "model", False, 1, 0),
    Row("skip sum", HIDDEN, "", False, 1, 1, True),
    Row("module", LATER, "model", True, 1, 0),
    Row("module", LATER, "model", True, 1, 1),
    Row("context", INPUT, "embedding", True, 1, 1),
    Row("context once", INPUT, "model", True, 1, 0),
    Row("then gradient", INPUT, "model", True, 1, 0),
    Row("then gradient", INPUT, "embedding", True, 1, 1),
    Row("gradient", HIDDEN, "embedding", False, 1, 1),
    Row("gradient sum", HIDDEN, "embedding", False, 1, 0),
    Row("gradient sum", HIDDEN, "", False, 1, 1),
]
SEQUENCE = [
    Row("gathered", INPUT, "embedding", True, 1, 0),
    Row("gathered", INPUT, "model", True, 0, 1),
    Row("local", INPUT, "model", False, 1, 1),
    Row("module", INPUT, "model", True, 1, 1),
]
PIPELINE = [  # rank 1 has the second layer, whose input needs a gradient in any case
    Row("gathered", INPUT, "embedding", True, 0, 0),
    Row("gathered", INPUT, "model", True, 0, 1),
    Row("gathered", LATER, "model", False, 1, 1),
    Row("module", INPUT, "model", True, 0, 1),
    Row("context", INPUT, "embedding", True, 0, 0),
]
CONTEXT = [Row("gathered", INPUT, "model", True, 1, 0), Row("gathered", LATER, "embedding", True, 0, 1)]
DATA = [
    Row("gathered", INPUT, "model", True, 1, 0),
    Row("local", INPUT, "model", True, 0, 1),
    Row("module", INPUT, "model", True, 1, 0),
]
EXPERTS = [
    Row("gathered", EXPERT, "model", True, 1, 0),
    Row("gathered", EXPERT, "model", True, 0, 1),
    Row("gathered", EXPERT, "embedding", True, 1, 1),
    Row("gathered", EXPERT, "model", False, 0, 0),
    Row("skip", EXPERT, "model", True, 1, 1),
    Row("gathered", INPUT, "model", True, 1, 1),
]
PACKED = [Row("gathered", HIDDEN, "model", True, 1, 0), Row("gathered", INPUT, "embedding", True, 0, 1)]
RECOMPUTED = [Row("gathered", LATER, "", True, 1, 0), Row("module", INPUT, "embedding", True, 1, 1)]

TABLE = [
    (Case("tp2", tp=2, layers=2), TENSOR),
    (Case("tp2 sp", tp=2, sp=True, layers=2), SEQUENCE),
    (Case("pp2", pp=2, layers=2), PIPELINE),
    (Case("cp2", cp=2, layers=2), CONTEXT),
    (Case("dp2", dp=2, layers=2), DATA),
    (Case("ep2", dp=2, ep=2, experts=4, layers=2), EXPERTS),
    (Case("tp2 packed", tp=2, packed="flat", layers=2), PACKED),
    (Case("tp2 recomputed", tp=2, recompute=("full",), layers=2), RECOMPUTED),
]


@pytest.mark.parametrize(("case", "rows"), TABLE, ids=[case.name for case, _ in TABLE])
def test_one_rank_fails(case: Case, rows: list[Row]) -> None:
    truth = failing.one_process(case, rows)
    answers = run(case.world, failing.run_rows, case, truth["state"], rows, True, timeout=60 + 2 * len(rows))
    wrong = {row: failing.problems(row, truth["rows"][n], answers, n) for n, row in enumerate(rows)}
    assert not any(wrong.values()), "\n".join(f"{row}: {text}" for row, text in wrong.items() if text)
