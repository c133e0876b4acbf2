"""An estimate says what is there: names, layouts, shapes and bytes, against every rank of real runs."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import estimated, ssm
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = pytest.mark.skipif(
    VERSION < (0, 19), reason="megatron.training with its arguments came with 0.19"
)

DENSE = [
    Case("one rank"),
    Case("tp2", tp=2),
    Case("tp4, two groups", tp=4, layers=2),
    Case("tp2 sp, gelu, bias", tp=2, sp=True, gated=False, rms=False, rope=False, bias=True, layers=2),
    Case("cp2", cp=2, layers=2),
    Case("pp2 dp2, tied", pp=2, dp=2, tied=True),
    Case("pp2 vpp2", pp=2, vpp=2, microbatches=4),
    Case("pp2, one layer last", pp=2, layers=3, split={"num_layers_in_last_pipeline_stage": 1}),
    Case("pp2, layout", pp=2, layers=3, split={"pipeline_model_parallel_layout": "Et|t*2,L"}),
    Case("cp2 tp2 sp, q/k norm", cp=2, tp=2, sp=True, qk_norm=True, layers=2),
    Case("mtp pp2", pp=2, layers=2, extra={"mtp_num_layers": 1}),
    Case("tp2 sp pp2 dp2", tp=2, sp=True, pp=2, dp=2),
]
HYBRID = [
    Case("hybrid tp2 pp2", tp=2, pp=2, hybrid=True),
    Case("M*|-M tp2 pp2", tp=2, pp=2, pattern="M*|-M", extra=ssm.MAMBA),
    Case("G- tp2 sp", tp=2, sp=True, pattern="G-", extra=ssm.DELTA),
    Case("*E dp2 ep2", dp=2, ep=2, pattern="*E", experts=4),
]
TRANSFORMER_ENGINE = [
    Case("TE, tp2 pp2", tp=2, pp=2, te=True, layers=2),
    Case("TE, tp2 sp, q/k norm", tp=2, sp=True, te=True, qk_norm=True, layers=2),
]
EXPERTS = [
    Case("ep2 dp2", ep=2, dp=2, experts=4, layers=2),
    Case("tp2 sp ep2 etp1, shared", tp=2, sp=True, ep=2, experts=4, shared_experts=True, layers=2),
    Case("tp2 sp etp2 ep1", tp=2, sp=True, etp=2, experts=4, layers=2),
]


def check(case: Case) -> None:
    from megatron_flex.estimate import estimate_dump

    answers = run(case.world, estimated.present, case, timeout=300)
    estimate = estimate_dump(estimated.told(case), "**:*", parameters="**")
    assert estimate.mesh == answers[0]["sizes"]
    real = {n: s for a in answers for n, s in a["sites"].items()}
    assert set(estimate.hidden) == {n for n, s in real.items() if s[3]}
    sites = {s.name: s for s in estimate.sites if s.kind == "value"}
    assert sites.keys() == {n for n, s in real.items() if not s[3]}
    for name, site in sites.items():
        layout, stage, chunk, _ = real[name]
        assert (site.stage, site.chunk) == (stage, chunk), name
        assert site.layout == layout.describe(estimate.mesh), name
        if not site.expected:
            assert site.bytes == estimated.written(answers, name, layout), name
        passed = [p for a in answers for p in a["seen"].get(name, [])]
        assert passed, f"nothing passed at {name}"
        if not site.expected:
            assert {shape for shape, _ in passed} == {site.local}, name
            assert {estimated._bytes(*p) for p in passed} == {site.rank_bytes}, name
    check_rows([s for s in sites.values() if s.expected], real, answers)
    check_parameters(estimate, answers)


def check_rows(sites: list[Any], real: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """However experts are chosen: over all of them a token has as many rows as the router gives it."""
    wanted: dict[str, int] = {}
    there: dict[str, int] = {}
    for site in sites:
        name = re.sub(r"local_experts\.\d+", "local_experts.*", site.name)
        wanted[name] = wanted.get(name, 0) + site.bytes
        there[name] = there.get(name, 0) + estimated.written(answers, site.name, real[site.name][0])
    assert wanted == there


def check_parameters(estimate: Any, answers: list[dict[str, Any]]) -> None:
    """Each different shard of a parameter is written once."""
    found = {s.name: s for s in estimate.sites if s.kind == "parameter"}
    shards: dict[str, dict[Any, int]] = {}
    for a in answers:
        for name, (layout, stage, chunk, copy, shape, size) in a["parameters"].items():
            if size is None or copy:
                continue
            copies = {c.axis: c.copies for d in layout.dims for c in d.cuts}
            place = tuple(a["coords"][x] // copies.get(x, 1) for x in layout.axes)
            shards.setdefault(name, {})[stage, place] = size
            if (found[name].stage, found[name].chunk) == (stage, chunk):
                assert found[name].shape == tuple(shape), name
    assert found.keys() == shards.keys()
    for name, sizes in shards.items():
        assert sum(s.bytes for s in estimate.sites if s.name == name and s.kind == "parameter") == sum(
            sizes.values()
        ), name


@pytest.mark.parametrize("case", DENSE, ids=lambda c: c.name)
def test_estimate_of_gpt(case: Case) -> None:
    check(case)


DUMPED = ["decoder.layers.*", "**.mlp.linear_fc1:*", "**.self_attention:k", "embedding.**:*", "output_layer"]


def dumped(case: Case, folder: str) -> int:
    """The bytes of tensors that this rank wrote of one iteration."""
    import megatron_flex as mf
    from megatron_flex.dump.part_format import read_part
    from tests.support import gpt, ranks

    chunks = ranks.start(case)
    flex = mf.FlexModel(chunks)
    flex.register_dump(mf.Dump(folder, DUMPED, tokens=slice(0, None, 2), dtype="bf16"))
    gpt.step(case, chunks, flex.session.mesh["dp"].coord)
    flex.session.close()
    rank = torch.distributed.get_rank()
    parts = [read_part(path) for path in Path(folder).glob(f"run-*/*/{rank:05d}-*.safetensors")]
    assert parts
    return sum(size for part in parts for _, _, _, size in part.where.values())


@pytest.mark.parametrize("case", [DENSE[2], DENSE[9], DENSE[11]], ids=lambda c: c.name)
def test_estimate_is_what_a_dump_writes(case: Case, tmp_path: Path) -> None:
    from megatron_flex.estimate import estimate_dump

    written = run(case.world, dumped, case, str(tmp_path), timeout=300)
    estimate = estimate_dump(estimated.told(case), DUMPED, tokens=slice(0, None, 2), dtype="bf16")
    assert estimate.bytes == sum(written)
    assert (estimate.least.bytes, estimate.most.bytes) == (min(written), max(written))


@pytest.mark.parametrize("case", HYBRID, ids=lambda c: c.name)
def test_estimate_of_hybrid(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", EXPERTS, ids=lambda c: c.name)
def test_estimate_of_experts(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", TRANSFORMER_ENGINE, ids=lambda c: c.name)
def test_estimate_of_transformer_engines_layers(case: Case) -> None:
    """Megatron's wrappers, in the run on Transformer Engine's Python, in the estimate without it."""
    check(case)
