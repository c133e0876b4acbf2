"""bf16 in Megatron's Float16Module: as near to one process as the roundings allow that differ."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import relative
from tests.support import gpt, moe, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
CASES = [
    Case("bf16 pp2", pp=2, layers=2, extra=HALF),
    Case("bf16 tp2 sp", tp=2, sp=True, layers=2, extra=HALF),
    Case("bf16 tp2 pp2", tp=2, pp=2, layers=2, extra=HALF),
    Case("bf16 cp2", cp=2, layers=2, extra=HALF),
]
EPS = 2.0**-8  # of bf16: a rounding errs by half of it


def bound(case: Case) -> float:
    """How far entries may be off, in parts of the greatest one, by the roundings that a spread run has more.

    Each of the two reductions of a layer rounds `tp` summands and their sum, and so does each of the two in
    its backward pass; context parallel ranks round the summands of keys' and values' gradients. A reading may
    lie behind all of them, and each errs by half an eps. Where nothing is summed nothing may differ at all.
    """
    summands = case.tp if case.tp > 1 else case.cp
    return 0.0 if summands == 1 else case.layers * (2 + 2) * (summands + 1) * EPS / 2


def wrapped(chunks: list[Any]) -> list[Any]:
    from megatron.core.transformer.module import Float16Module

    return [Float16Module(c.config, c) for c in chunks]


def alone(case: Case, sites: list[str]) -> dict[str, Any]:
    """One process, plain PyTorch hooks."""
    chunks = ranks.start(case)
    models = wrapped(chunks)
    out: dict[str, Any] = {"state": gpt.randomize(chunks[0])}
    values, gradients = defaultdict(list), defaultdict(list)

    def watch(site: str) -> oracle.Visit:
        def visit(tensor: Tensor) -> Tensor:
            values[site].append(tensor.detach().clone())
            if tensor.requires_grad:
                tensor = tensor.clone()
                tensor.register_hook(lambda grad: gradients[site].append(grad.clone()))
            return tensor

        return visit

    for site in sites:
        oracle.install(chunks[0], site, watch(site))
    out["losses"] = gpt.step(case, models, 0)
    return {**out, "values": dict(values), "gradients": dict(gradients)}


def spread(case: Case, sites: list[str], state: dict[str, Tensor]) -> dict[str, Any]:
    """This rank of many, hooks of ours."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    models = wrapped(chunks)
    gpt.load(chunks, state)
    read: dict[str, list[Tensor]] = {}
    for kind in ("forward", "tensor"):
        hooks = [
            mf.HookFunction(s, hook_type=kind) for s in sites if kind == "forward" or not moe.read_only(s)
        ]
        with mf.attach(models, hooks) as flex:
            losses = gpt.step(case, models, 0)
            read.update({n: list(r) for n, r in flex.output_dict.items()})
    return {"read": read, "losses": losses}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bf16(case: Case) -> None:
    sites = oracle.sites_of(case)
    truth = truths.once(alone, case.single(), sites)
    answers = run(case.world, spread, case, sites, truth["state"])
    read, far, dtypes = answers[0]["read"], [], set()
    for site in sites:
        for name, wanted, factor in (
            (site, truth["values"][site], 1),
            (f"{site}.grad", truth["gradients"].get(site, []), case.cp),
        ):
            assert len(read.get(name, [])) == len(wanted), name
            for got, want in zip(read.get(name, []), wanted, strict=True):
                assert got.dtype == want.dtype, name
                dtypes.add(got.dtype)
                far.append((relative(got.float(), want.float() * factor), name))
    assert torch.bfloat16 in dtypes
    assert max(far)[0] <= bound(case), max(far)
    losses = next(a["losses"] for a in answers if a["losses"])
    assert losses == pytest.approx(truth["losses"], rel=bound(case))
