"""Law 1: every site, in every composition, has the single-process tensor, gradient and edit."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from tests.distributed.matrix import compare
from tests.support import oracle
from tests.support.gpt import Case

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])

PLAIN = [
    Case("tp1"),
    Case("tp2", tp=2),
    Case("tp2 dp2", tp=2, dp=2),
    Case("tp4", tp=4),
    Case("tp4 sp", tp=4, sp=True),
    Case("pp2", pp=2, microbatches=3),
    Case("pp2 vpp2", pp=2, vpp=2, microbatches=4),
    Case("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, microbatches=2),
    Case("tp2 sp, all recomputed", tp=2, sp=True, recompute=("full",)),
    Case("tp2 pp2, attention and mlp recomputed", tp=2, pp=2, recompute=("core_attn", "mlp")),
    Case("tp2 sp, norms recomputed", tp=2, sp=True, recompute=("layernorm",)),
    Case(
        "tp2 sp, gelu, bias, layernorm, learned positions",
        tp=2,
        sp=True,
        gated=False,
        rms=False,
        rope=False,
        bias=True,
    ),
    Case("tp4 sp, q/k norm, as many groups as ranks", tp=4, sp=True, qk_norm=True, groups=4),
    Case("tp2, tied embeddings", tp=2, tied=True),
]
CONTEXT = [
    Case("cp2", cp=2, layers=2),
    Case("cp2 pp2", cp=2, pp=2, layers=2),
    Case("cp2 dp2", cp=2, dp=2, layers=2),
    Case("cp4, learned positions", cp=4, layers=2, rope=False),
    Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=2, recompute=("full",)),
]
EVERYWHERE = [
    Case("tp2 sp", tp=2, sp=True),
    Case("tp2 sp pp2", tp=2, sp=True, pp=2),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
]
HYBRID = [
    Case("hybrid tp2 sp", tp=2, sp=True, hybrid=True),
    Case("hybrid tp2 pp2", tp=2, pp=2, hybrid=True),
]
EIGHT = [Case("tp2 sp pp2 dp2", tp=2, sp=True, pp=2, dp=2)]


def check(
    case: Case, cells: list[Any], sites: list[str] | None = None, edits: list[str] | None = None
) -> None:
    found = compare(case, sites, edits)
    cells += found
    bad = [c for c in found if not c.good]
    told = "\n".join(f"{c.site} {c.check}: {c.error:.2e}" for c in bad[:20])
    assert not bad, f"{len(bad)} of {len(found)} cells differ from one process:\n{told}"


@pytest.mark.versions
@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda c: c.name)
def test_gpt_on_every_version(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_gpt(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.parametrize("case", CONTEXT, ids=lambda c: c.name)
def test_context_parallel(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
@pytest.mark.parametrize("case", HYBRID, ids=lambda c: c.name)
def test_hybrid(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.parametrize("case", EIGHT, ids=lambda c: c.name)
def test_eight_ranks(case: Case, cells: list[Any]) -> None:
    """On two cores eight ranks are slow: all values and gradients, and a few edits on the last stage."""
    edits = ["decoder.layers.3.mlp.linear_fc1:output", "decoder.layers.3:mid", "output_layer:output"]
    check(case, cells, oracle.sites_of(case), edits)
