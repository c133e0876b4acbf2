"""Parameters in dumps, and their gradients once they are reduced: what one process has, written once."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import Cell, judge, relative
from tests.support import gpt, ranks, truths, wrapped
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
SP_DP = Case("tp2 sp dp2", tp=2, sp=True, dp=2, layers=2)
EXPERTS = Case("experts tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, shared_experts=True, layers=2)
SPLIT_EXPERTS = Case("experts tp2 dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, experts=4, layers=2)
CASES = [
    pytest.param(SP_DP, {}, id="DDP"),
    pytest.param(SP_DP, DISTRIBUTED, id="distributed optimizer"),
    pytest.param(SP_DP, OVERLAPPED, id="distributed optimizer, overlapped"),
    pytest.param(Case("pp2 dp2 tied", pp=2, dp=2, layers=2, tied=True), {}, id="tied"),
    pytest.param(Case("pp2 dp2 tied", pp=2, dp=2, layers=2, tied=True), DISTRIBUTED, id="tied, distributed"),
    pytest.param(EXPERTS, {}, id="experts"),
    pytest.param(SPLIT_EXPERTS, DISTRIBUTED, id="split experts, distributed"),
    pytest.param(Case("tp2 sp cp2", tp=2, sp=True, cp=2, layers=2), {}, id="context parallel"),
    pytest.param(Case("tp2 pp2 vpp2", tp=2, pp=2, vpp=2), None, id="no wrapper"),
]


def single(case: Case) -> dict[str, Any]:
    """Weights and gradients of one process."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    gpt.step(case, chunks, 0)
    return {"state": state, "gradients": {n: p.grad.clone() for n, p in gpt.global_names(chunks[0])}}


def sharded(case: Case, state: dict[str, Tensor], path: str, settings: dict[str, Any] | None) -> int:
    """Dump all parameters and their gradients in a step; returns how many bytes of tensors it has written."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    if settings is not None:
        chunks = wrapped.ddp(chunks, True, **settings)
    dump = mf.Dump(path, parameters="**", gradients=True, replicas=True, order="blocks")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mf.FlexWarning)
        with mf.attach(chunks, dumps=dump):
            gpt.step(case, chunks, ranks.mine(chunks))
    return 0


@pytest.mark.parametrize(("case", "settings"), CASES)
def test_parameters_and_their_gradients(
    case: Case, settings: dict[str, Any] | None, cells: list[Any], tmp_path: Path
) -> None:
    import megatron_flex as mf

    truth = truths.once(single, case.single())
    run(case.world, sharded, case, truth["state"], str(tmp_path / "d"), settings, timeout=300)
    found = []
    with mf.open_dump(tmp_path / "d") as dump:
        assert set(dump.parameters) == truth["state"].keys()
        for name, value in truth["state"].items():
            got = dump.parameter(name).torch()
            assert got.shape[0] == 1
            assert torch.equal(got[0], value), name
            gradient = dump.parameter(name, gradient=True).torch()[0]
            error = relative(gradient, truth["gradients"][name])
            found.append(Cell(case.name, name, "dump of parameter gradients", error, model=case.model))
    judge(found, cells)
    once(tmp_path / "d")


def once(path: Path) -> None:
    """No bytes of a parameter or its gradient are written twice, and every copy is checked."""
    import megatron_flex as mf
    from megatron_flex.dump.part_format import read_part

    parts = [read_part(p).index for p in sorted(path.rglob("*.safetensors"))]
    with mf.open_dump(path) as dump:
        axes = {**dump.manifest.sizes}
    seen: Counter[Any] = Counter()
    for part in parts:
        for entry in part.entries:
            if entry.kind == "replica":
                continue
            layout = part.layouts[entry.layout]
            named = [c["axis"] for d in layout["dims"] for c in d.get("cuts", ())] + layout.get("partial", [])
            at = tuple((a, part.coords[a]) for a in named if axes.get(a, 1) > 1)
            seen[entry.site, entry.kind, at, entry.span] += 1
    assert seen
    assert set(seen.values()) == {1}
