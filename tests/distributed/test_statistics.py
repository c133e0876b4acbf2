"""Statistics while training: those of the whole tensors that one process has, from any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import oracle
from tests.support import statistics as measured
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASES = [
    Case("tp4 sp, fewer groups than ranks", tp=4, sp=True, layers=1),
    Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=1, recompute=("full",)),
    Case("tp2 pp2 vpp2", tp=2, pp=2, vpp=2, microbatches=2),
    Case("tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, shared_experts=True, layers=1),
]


def check(case: Case, **settings: Any):
    """All sites of a case and their gradients, against one process."""
    sites = oracle.sites_of(case)
    (truth,) = run(1, oracle.run, case.single(), sites, [])
    answers = run(
        case.world, measured.measuring, case, truth["state"], "**:*", {"gradients": True}, timeout=300
    )
    return truth, answers


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_statistics_are_those_of_one_process(case: Case) -> None:
    import torch

    truth, answers = check(case)
    total = case.single().microbatches
    for a in answers:
        print(a["order"], a["closed"], a["same"], a["more"], a["said"])
    rows = {r.site: r for r in answers[0]["rows"][0]}
    bad = []
    missing = []
    for name, values in truth["values"].items():
        for n, v, f in ((name, values, 1), (name + ".grad", truth["gradients"].get(name), total)):
            if v is None:
                continue
            if n not in rows:
                missing.append(n)
                continue
            bad += measured.differences(
                rows[n], measured.numbers(torch.cat([x.reshape(-1) for x in v]) * f), total
            )
    print(len(rows), "MISSING", missing)
    print("\n".join(bad))
    assert 0
