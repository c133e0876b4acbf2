"""Dumps of experts: by token as one process has them, wherever the experts were when they were written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import megatron_flex as mf
from megatron_flex.dump import ROUTING, ShardEntry
from megatron_flex.dump.reader import open_damaged_dump
from megatron_flex.dump.reader.shard_files import PartFiles
from tests.distributed.matrix import BOUND, judge, relative
from tests.distributed.test_matrix import VERSION
from tests.distributed.test_moe import GROUPED, of
from tests.support import design, gpt, oracle, ranks
from tests.support.dump_cells import compare
from tests.support.dumps import healthy
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}

CASES = [
    of("moe tp1, experts without tokens", experts=16),
    of("moe dp2 ep2, experts across data parallel ranks", dp=2, ep=2),
    of("moe tp2 sp etp2, shared experts", tp=2, sp=True, etp=2, shared_experts=True),
    of("moe tp2 sp ep2, allgather", tp=2, sp=True, ep=2, dispatcher="allgather"),
    of("moe tp2 sp ep2, all recomputed", tp=2, sp=True, ep=2, recompute=("full",)),
    of("moe cp2 ep2", cp=2, ep=2),
    of("moe pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=2),
    of("moe pp2 dp2 ep2", pp=2, dp=2, ep=2, microbatches=2),
    of("moe dp2 ep2, tokens dropped", dp=2, ep=2, extra={"moe_expert_capacity_factor": 0.75}),
    of("moe dp2 ep2, auxiliary loss", dp=2, ep=2, extra=AUXILIARY),
]
FOUR = [
    of("moe tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2),
    of("moe tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, shared_experts=True),
    of("moe tp2 sp dp2 ep2 etp2, allgather", tp=2, sp=True, dp=2, ep=2, etp=2, dispatcher="allgather"),
    of("moe tp2 sp cp2 ep4", tp=2, sp=True, cp=2, ep=4, experts=8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    judge(compare(case, design.sites(case, CASES)), cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="a spec puts TEGroupedMLP together in another way before")
@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.name)
def test_grouped_experts(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.name)
def test_experts_on_four_ranks(case: Case, cells: list[Any]) -> None:
    """What concerns experts, in one of the layers."""
    judge(compare(case, [s for s in oracle.sites_of(case) if "layers.1.mlp" in s]), cells)


# -- some of it ------------------------------------------------------------------------------------------

SOME = of("moe tp2 sp etp2, some of it", tp=2, sp=True, etp=2, microbatches=2)
ACROSS = of("moe dp2 ep2, some of it", dp=2, ep=2, microbatches=2)
TOKENS, SAMPLES = [0, 3, 15], [1, 4, 6]
LAYER = "decoder.layers.1.mlp"
FEW = (
    f"{LAYER}.experts:dispatched",
    f"{LAYER}.experts:output",
    f"{LAYER}.experts:weights",
    f"{LAYER}.experts.local_experts.1.linear_fc1:gate",
    f"{LAYER}.experts.local_experts.2:output",
)


def dumped(case: Case, state: dict[str, torch.Tensor], path: str, settings: dict[str, Any]) -> None:
    """A step of a model for each way of dumping it."""
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    for way, kept in settings.items():
        dump = mf.Dump(f"{path}/{way}", FEW, gradients=True, order="blocks", **kept)
        with mf.attach(chunks, dumps=dump):
            gpt.step(case, chunks, ranks.mine(chunks))


def weights(case: Case) -> dict[str, torch.Tensor]:
    return gpt.randomize(ranks.start(case)[0])


WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"tokens": TOKENS, "samples": SAMPLES[:1]},
    "drawn": {"tokens": mf.sampled(4, seed=3)},
    "mean": {"reduce": "mean"},
    "mean of some": {"reduce": "mean", "tokens": TOKENS},
    "half": {"dtype": "bf16", "replicas": True},
}


@pytest.mark.parametrize("case", [SOME, ACROSS], ids=lambda c: c.name)
def test_what_is_kept_of_experts(case: Case, tmp_path: Path) -> None:
    """Ranks write their rows whole, and the reader picks: as from tensors that were dumped whole."""
    (state,) = run(1, weights, case.single())
    run(case.world, dumped, case, state, str(tmp_path), WAYS)
    for way in WAYS:
        healthy(tmp_path / way)
    with ExitStack() as stack:
        ways = {way: stack.enter_context(mf.open_dump(tmp_path / way)) for way in WAYS}
        for name in [*FEW, *(f"{site}.grad" for site in FEW)]:
            whole = ways["all"][name].torch()
            assert whole.shape[:3] == (1, case.microbatches * case.dp * gpt.BATCH, gpt.SEQUENCE)
            assert whole.any()  # not of zeros
            some = ways["some"][name]
            assert some.samples is not None
            assert some.samples.tolist() == SAMPLES[:1]
            assert torch.equal(some.torch(), whole[:, SAMPLES[:1]][:, :, TOKENS])
            drawn = ways["drawn"][name]
            at = drawn.tokens[0][(..., *[None] * (whole.ndim - 3))].expand(-1, -1, *whole.shape[3:])
            assert torch.equal(drawn.torch()[0], whole[0].gather(1, at))
            assert relative(ways["mean"][name].torch(), whole.mean(2)) < BOUND
            assert relative(ways["mean of some"][name].torch(), whole[:, :, TOKENS].mean(2)) < BOUND
            half = ways["half"][name].torch()
            assert half.dtype == torch.bfloat16
            assert relative(half.float(), whole) < 2**-7
            part = ways["all"][name][0, 1:3, [5, 2, 9]]
            assert torch.equal(part.torch(), whole[0, 1:3, [5, 2, 9]])
            assert torch.equal(ways["all"][name][..., -1].torch(), whole[..., -1])


def test_a_rank_whose_rows_are_gone(tmp_path: Path) -> None:
    """A reader that finds decisions, and no rows for them, says whose are missing."""
    (state,) = run(1, weights, ACROSS.single())
    run(2, dumped, ACROSS, state, str(tmp_path), {"all": {}})
    kept = PartFiles.read

    def nothing(self: PartFiles, part: Any, entry: ShardEntry, where: Any) -> torch.Tensor:
        found = kept(self, part, entry, where)
        return torch.zeros_like(found) if entry.kind == ROUTING else found

    damaged = raises(mf.DumpError, 0)
    with mf.open_dump(tmp_path / "all") as dump, patch.object(PartFiles, "read", nothing), damaged:
        dump[FEW[0]].torch()
    with mf.open_dump(tmp_path / "all") as dump:
        opened = [dump.files.open(p) for p in dump.stored_iteration((0, 0)).paths(1)]
        assert not any((FEW[3], "value") in one.entries_by_site for one in opened), "expert 1 is on rank 0"
        for one in opened:
            one.entries_by_site.pop((FEW[0], "value"), None)
        with raises(mf.DumpError, "edp=0", "ep=1"):
            dump[FEW[0]].torch()
    with mf.open_dump(tmp_path / "all") as dump:
        for path in dump.stored_iteration((0, 0)).paths(1):
            dump.files.open(path).entries_by_site.pop((LAYER, ROUTING), None)
        with raises(mf.DumpError, (0, 1, 0)):
            dump[FEW[1]].torch()


def test_experts_of_a_dump_that_lost_a_rank(tmp_path: Path) -> None:
    """Their rows would read as zeros where they are lost: they are refused."""
    (state,) = run(1, weights, ACROSS.single())
    run(2, dumped, ACROSS, state, str(tmp_path), {"all": {}})
    with mf.open_dump(tmp_path / "all") as dump, open_damaged_dump(tmp_path / "all") as rest:
        lost = list(dump.stored_iteration((0, 0)).paths(1))
        assert torch.equal(rest[FEW[0]].torch(), dump[FEW[0]].torch())
    for path in lost:
        path.unlink()
    with open_damaged_dump(tmp_path / "all") as rest:
        for site in FEW:  # expert 2 was on the lost rank
            with raises(mf.DumpError, site):
                rest[site].torch()
