"""Multi-latent attention: every site against one process under a mended upstream; and upstream as it is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import matrix
from tests.distributed.matrix import BOUND, Cell, relative
from tests.distributed.test_matrix import GPT, check
from tests.support import gpt, latent, oracle, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

MENDED = [
    Case("mla tp2", tp=2, mla="mended", layers=2),
    Case("mla tp2, low-rank queries, norms", tp=2, mla="mended", q_rank=8, qk_norm=True, layers=2),
    Case("mla tp2 pp2, low-rank queries", tp=2, pp=2, mla="mended", q_rank=8, layers=2),
    Case(
        "mla tp4 sp, low-rank queries, norms", tp=4, sp=True, mla="mended", q_rank=8, qk_norm=True, layers=2
    ),
    Case("mla tp2, up projections recomputed", tp=2, mla="mended", recompute=("mla_up_proj",), layers=2),
    Case("mla tp2 sp, all recomputed", tp=2, sp=True, mla="mended", recompute=("full",), layers=2),
]
EVERYWHERE = Case(
    "mla tp2 sp, low-rank queries, norms", tp=2, sp=True, mla="mended", q_rank=8, qk_norm=True, layers=2
)
UPSTREAM = [
    Case("mla tp2, upstream", tp=2, mla="upstream", layers=2),
    Case("mla tp2 sp, upstream", tp=2, sp=True, mla="upstream", q_rank=8, layers=2),
]
LOCAL = ("input", "output", "q", "k", "v", "scores", "probs", "mid")  # what a plain hook on a rank can see


@pytest.mark.parametrize("case", MENDED, ids=lambda c: c.name)
def test_latent_attention(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, EVERYWHERE, *MENDED])


@pytest.mark.versions
def test_latent_attention_on_every_version(cells: list[Any]) -> None:
    check(EVERYWHERE, cells, among=[*GPT, EVERYWHERE])


def plainly(case: Case, state: Any, sites: list[str]) -> dict[str, Any]:
    """One rank of upstream's own sharded run: no library, gradients of local tensors by plain hooks."""
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    seen: dict[str, list[Any]] = defaultdict(list)

    def watch(site: str) -> oracle.Visit:
        def visit(tensor: Any) -> Any:
            if tensor.requires_grad:
                tensor = tensor.clone()
                tensor.register_hook(lambda grad: seen[site].append(grad.clone()))
            return tensor

        return visit

    for site in sites:
        oracle.install(chunks[0], site, watch(site))
    losses = gpt.step(case, chunks, 0)
    own = {n: p.grad for n, p in gpt.global_names(chunks[0])}
    return {"losses": losses, "seen": dict(seen), "parameters": own, "layouts": layouts(chunks)}


def layouts(chunks: list[Any]) -> dict[str, Any]:
    """The layouts of gradients at sites, by which the ranks' tensors are put together."""
    from megatron_flex.adapters import detect

    return {s.name: s.layout.gradient() for s in detect(chunks).sites()}


@pytest.mark.parametrize("case", UPSTREAM, ids=lambda c: c.name)
def test_upstream_as_it_is(case: Case, cells: list[Any]) -> None:
    """Values are those of one process. Gradients behind the keys' rotary part are upstream's own."""
    sites = [s for s in oracle.sites_of(case) if s.partition(":")[2] in LOCAL and not s.startswith("loss")]
    truth = truths.of(case.single(), sites, [])
    answers = run(case.world, matrix.sharded, case, truth["state"], sites, [])
    plain = run(case.world, plainly, case, truth["state"], sites)
    values = [c for c in matrix._readings(case, sites, truth, answers) if c.check == "value"]
    found = [replace(c, model=case.model) for c in values]
    found += gradients(case, truth, answers, plain)
    cells += found
    assert [c for c in found if not c.good] == []
    differing = {c.site for c in found if c.upstream}
    first, last = (f"decoder.layers.{n}.self_attention" for n in (0, 1))
    assert f"{last}.linear_kv_down_proj:output" in differing, "upstream is mended: compare strictly now"
    assert f"{first}.linear_proj:output" in differing, "what is behind it in the backward pass differs too"
    assert f"{last}.core_attention:k" not in differing


def gradients(case: Case, truth: Any, answers: list[Any], plain: list[Any]) -> list[Cell]:
    """Upstream's own gradients against one process, and the library's against upstream's own."""
    from megatron_flex.layout import assemble, coordinates

    sizes, read = answers[0]["sizes"], answers[0]["read"]
    out = []
    for site, wanted in truth["gradients"].items():
        layout = plain[0]["layouts"][site]
        ranks = [
            next(i for i, a in enumerate(answers) if all(a["coords"][x] == c for x, c in place.items()))
            for place in coordinates(layout, sizes)
        ]
        theirs = [
            assemble(layout, shards, sizes)
            for shards in zip(*(plain[r]["seen"][site] for r in ranks), strict=True)
        ]
        out.append(_cell(case, site, "gradient", read[f"{site}.grad"], theirs, wanted))
    whole = matrix.whole_gradients(answers, lambda a: a["plain"][1])
    described = [
        {**a, "own": {n: (a["plain"][1][n][0], g) for n, g in p["parameters"].items()}}
        for a, p in zip(answers, plain, strict=True)
    ]
    theirs_whole = matrix.whole_gradients(described, lambda a: a["own"])
    names = list(truth["parameters"])
    pick = [[source[n] for n in names] for source in (whole, theirs_whole, truth["parameters"])]
    return [*out, _cell(case, "(none)", "unedited parameter gradients", *pick)]


def _cell(case: Case, site: str, kind: str, ours: list[Any], theirs: list[Any], wanted: list[Any]) -> Cell:
    error = max(relative(t, w) for t, w in zip(theirs, wanted, strict=True))
    own = max(relative(o, t) for o, t in zip(ours, theirs, strict=True))
    why = latent.UPSTREAM if error > BOUND else ""
    return Cell(
        case.name,
        site,
        kind,
        error if why else max(relative(*p) for p in zip(ours, wanted, strict=True)),
        upstream=why,
        own=own,
        model=case.model,
    )
