"""The plans of gathers, against what an edit of the real model sends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_debugging import PLACES, TP2, half
from tests.distributed.test_verify import FEW_GROUPS
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")


def planned(
    case: Case, run_on: str, kind: str
) -> dict[str, tuple[list[Any], list[Any], list[Any], list[Any]]]:
    """Of each site what was planned and what was sent, there and back."""
    import megatron_flex as mf
    from megatron_flex.collectives import plan_full_gather, plan_result_broadcast

    chunks = ranks.start(case)
    known = {"s": gpt.SEQUENCE, "b": gpt.BATCH}
    out = {}
    for place in PLACES:
        hook = mf.HookFunction(place, editing_function=half, run=run_on, hook_type=kind, save=False)
        with mf.attach(chunks, [hook]) as flex:
            flex.debug()
            flex.session.tracer.write = lambda line: None
            gpt.step(case, chunks, 0)
            (site,) = flex.sites(place)
            mesh, backward = flex.session.mesh, kind == "tensor"
            seen = flex.session.tracer.last[place + (".grad" if backward else "")]
            layout = site.layout.gradient() if backward else site.layout
            lead = plan_result_broadcast(layout, site.shape, 4, mesh) if run_on == "once" else []
            there = [*plan_full_gather(layout, site.shape, 4, mesh), *lead]
            back = [] if backward else [*plan_full_gather(layout.gradient(), site.shape, 4, mesh), *lead]
            told = flex.explain(hook)
            assert f"measured: {seen.describe()}" in told
            assert all(p.describe() in told for p in [*there, *back])
        wanted = [[(p.op, p.axis, int(p.nbytes(known))) for p in plan] for plan in (there, back)]
        sent = [[(m.op, m.axis, m.nbytes) for m in moves] for moves in (seen.moves, seen.back)]
        out[place] = (*wanted, *sent)
    return out


@pytest.mark.parametrize(
    ("case", "run_on", "kind"),
    [
        (TP2, "replicated", "forward"),
        pytest.param(TP2, "once", "forward", marks=pytest.mark.versions),
        (TP2, "replicated", "tensor"),
        (Case("tp2 sp cp2", tp=2, sp=True, cp=2, layers=2), "once", "forward"),
        pytest.param(
            Case("tp4 of 2 groups", tp=4, groups=2, layers=2), "replicated", "forward", marks=FEW_GROUPS
        ),
        (Case("one", layers=2), "once", "forward"),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_what_is_sent_is_what_was_planned(case: Case, run_on: str, kind: str) -> None:
    sent = 0
    for answer in run(case.world, planned, case, run_on, kind):
        for place, (there, back, there_sent, back_sent) in answer.items():
            assert there_sent == there, place
            assert back_sent == back, place
            sent += len(there) + len(back)
    assert sent > 0 or case.world == 1
