"""Selections of experts' rows: they go home to their tokens first, and are then what one process selects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.wishes import Wish, wished

pytest.importorskip("megatron.core")

EXPERTS = "decoder.layers.1.mlp.experts"
ALL, WEIGHTS, ONE = (
    f"{EXPERTS}:dispatched",
    f"{EXPERTS}:weights",
    f"{EXPERTS}.local_experts.1.linear_fc1:output",
)
PROBE = torch.cos(torch.arange(gpt.HIDDEN, dtype=torch.float32))
# By name: the site; what is selected; what is made of it; the same in plain code.
WISHES: dict[str, Wish] = {
    "last": (ALL, {"positions": -1}, lambda r: None, lambda t: t[-1:]),
    "few": (ALL, {"positions": [3, 0], "samples": 1}, lambda r: None, lambda t: t[[3, 0]][:, 1:]),
    "slot": (ALL, {"dims": {"k": 0}, "neurons": slice(0, 5)}, lambda r: None, lambda t: t[:, :, :1, :5]),
    "mean": (ALL, {}, lambda r: r.mean("s"), lambda t: t.mean(0)),
    "norm": (ALL, {}, lambda r: r.norm("h"), lambda t: t.norm(dim=-1)),
    "dot": (ALL, {"positions": slice(0, 4)}, lambda r: r.dot(PROBE), lambda t: t[:4] @ PROBE),
    "weight": (WEIGHTS, {"positions": -1}, lambda r: None, lambda t: t[-1:]),
    "neurons": (ONE, {"neurons": slice(3, 60)}, lambda r: None, lambda t: t[:, 3:60]),
    "row": (ONE, {"dims": {"t": -1}}, lambda r: None, lambda t: t[-1:]),
    "rows": (ONE, {}, lambda r: r.sum("t"), lambda t: t.sum(0)),
}
CASES = [
    Case("moe tp2 sp ep2", tp=2, sp=True, ep=2, layers=2, experts=4),
    Case("moe cp2 ep2", cp=2, ep=2, layers=2, experts=4),
    Case("moe tp2 sp etp2", tp=2, sp=True, etp=2, layers=2, experts=4),
]


def spread(case: Case, state: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    out: dict[str, list[Tensor]] = {}
    for kind in ("forward", "tensor"):
        with mf.attach(chunks, wished(WISHES, kind)) as flex:
            gpt.step(case, chunks, ranks.mine(chunks))
            out |= {n: list(r) for n, r in flex.output_dict.items()}
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_are_selected_as_on_one_process(case: Case) -> None:
    sites = sorted({w[0] for w in WISHES.values()})
    truth = truths.of(case.single(), sites, [])
    found, *others = run(case.world, spread, case, truth["state"])
    assert others == [{}] * (case.world - 1)
    assert set(found) == {f"{w[0]}{end}.{name}" for name, w in WISHES.items() for end in ("", ".grad")}
    for name, (site, _, _, plainly) in WISHES.items():
        for kind, ending in (("values", ""), ("gradients", ".grad")):
            wholes = [t * case.cp if ending else t for t in truth[kind][site]]
            got = found[f"{site}{ending}.{name}"]
            assert len(got) == len(wholes) == case.microbatches
            for one, whole in zip(got, wholes, strict=True):
                assert relative(one, plainly(whole)) <= BOUND, (name, ending)
