"""Packed sequences (`qkv_format="thd"`) without context parallelism: every site against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.distributed.test_matrix import GPT, check
from tests.support import gpt, measuring, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

PACKED = [
    Case("packed tp2 sp pp2", tp=2, sp=True, pp=2, packed="flat"),
    Case("packed tp2", tp=2, packed="flat", rope=False, bias=True),
    Case("packed tp4, copies of heads", tp=4, packed="flat", layers=2),
    Case("packed pp2 vpp2", pp=2, vpp=2, packed="kept"),
    Case("packed tp2 sp, all recomputed", tp=2, sp=True, packed="heads", recompute=("full",), layers=2),
    Case("packed tp2, attention recomputed", tp=2, packed="flat", recompute=("core_attn",), layers=2),
    Case("packed mla tp2", tp=2, packed="flat", mla="mended", layers=2),
    Case(
        "packed mla tp2 sp pp2, low-rank queries, norms",
        tp=2,
        sp=True,
        pp=2,
        packed="heads",
        mla="mended",
        q_rank=8,
        qk_norm=True,
        layers=2,
    ),
]
CORE = "decoder.layers.1.self_attention.core_attention"
SITES = [f"{CORE}:q", f"{CORE}:k", f"{CORE}:output", "decoder.layers.1:output"]
MEASURED = [SITES[0], *SITES[2:]]  # of copies of heads, each rank's gradient is a part of a sum
USED = [
    Case("packed tp2 sp pp2", tp=2, sp=True, pp=2, packed="flat", layers=2),
    Case("packed tp4, copies of heads", tp=4, packed="heads", layers=2),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda c: c.name)
def test_packed_sequences(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *PACKED])


# -- selections, presets, dumps, statistics ------------------------------------------------------------


def presets() -> dict[str, Any]:
    """Presets by the site where each is, with the same written out for one process."""
    import megatron_flex as mf

    edits = mf.edits
    return {
        f"{CORE}:q": (edits.ablate_heads([1]), lambda t: heads(t, [1])),
        f"{CORE}:k": (edits.scale(2.0, positions=[3, -1]), lambda t: at(t, [3, -1], 2.0)),
        f"{CORE}:output": (edits.scale(0.5, heads=[0, 3]), lambda t: flat(t, [0, 3], 0.5)),
        "decoder.layers.1:output": (edits.zero(positions=[7]), lambda t: at(t, [7], 0.0)),
    }


def at(tensor: Tensor, positions: list[int], factor: float) -> Tensor:
    out = torch.ones(len(tensor), *([1] * (tensor.dim() - 1)))
    out[positions] = factor
    return tensor * out


def heads(tensor: Tensor, which: list[int], factor: float = 0.0) -> Tensor:
    out = torch.ones(tensor.shape[1], 1)
    out[which] = factor
    return tensor * out


def flat(tensor: Tensor, which: list[int], factor: float) -> Tensor:
    return heads(tensor.unflatten(-1, (gpt.HEADS, -1)), which, factor).flatten(1)


def plainly(case: Case, sites: list[str]) -> dict[str, list[float]]:
    """The losses of one process with each preset written out."""
    gpt.runtime(case)
    gpt.initialize(case)
    out = {}
    for site in sites:
        chunks = gpt.build(case)
        gpt.randomize(chunks[0])
        oracle.install(chunks[0], site, presets()[site][1])
        out[site] = gpt.step(case, chunks, 0)
    return out


def used(case: Case, state: dict[str, Tensor], path: str) -> dict[str, Any]:
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    kept, out = measuring.Kept(), {}
    hooks = [
        mf.HookFunction(SITES[0], select=mf.Select(positions=[-1, 3], heads=[1, 2])),
        mf.HookFunction(SITES[2], select=mf.Select(heads=[2])),
        mf.HookFunction(SITES[3], select=mf.Select(samples=0, positions=slice(0, 32, 9))),
        mf.HookFunction(SITES[1], expected_shape=(32, gpt.GROUPS, 8)),
    ]
    dumps = [mf.Dump(f"{path}/whole", SITES, gradients=True), mf.Dump(f"{path}/some", SITES, tokens=[5, -1])]
    with mf.attach(chunks, hooks, dumps=dumps) as flex:
        flex.register_statistics(Statistics("nowhere", MEASURED, gradients=True), kept)
        gpt.step(case, chunks, 0)
        gpt.step(case, chunks, 0)  # delivers the statistics of the first
        out["read"] = {n: list(r)[: case.microbatches] for n, r in flex.output_dict.items()}
    out["rows"] = kept.rows.get(0, [])
    with mf.FlexModel(chunks) as flex:
        flex.verify(1)
        gpt.step(case, chunks, 0)
    out["edited"] = {}
    for site, (edit, _) in presets().items():
        with mf.attach(chunks, [mf.HookFunction(site, editing_function=edit, save=False)]):
            out["edited"][site] = gpt.step(case, chunks, 0)
    with mf.attach(chunks) as flex:
        flex.register_forward_hook(mf.HookFunction(SITES[0], select=mf.Select(samples=0)))
        out["samples"] = ranks.step_says(case, chunks, flex)
    return out


@pytest.mark.parametrize("case", USED, ids=lambda c: c.name)
def test_selections_presets_dumps_and_statistics(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf

    truth = truths.of(case.single(), SITES, [])
    plain = truths.once(plainly, case.single(), SITES)
    answers = run(case.world, used, case, truth["state"], str(tmp_path), timeout=100)
    values, read = truth["values"], answers[0]["read"]
    want = {
        SITES[0]: [t[[-1, 3]][:, [1, 2]] for t in values[SITES[0]]],
        SITES[1]: values[SITES[1]],
        SITES[2]: [t.unflatten(-1, (-1, 8))[:, 2] for t in values[SITES[2]]],
        SITES[3]: [t[0:32:9] for t in values[SITES[3]]],
    }
    wrong = [(s, m) for s in want for m, t in enumerate(want[s]) if relative(read[s][m], t) > BOUND]
    assert not wrong
    assert set(read) == set(want)
    scaled = {s: [g * case.microbatches for g in truth["gradients"][s]] for s in SITES}
    for folder, tokens in (("whole", list(range(32))), ("some", [5, 31])):
        with mf.open_dump(tmp_path / folder) as dump:
            for site in SITES:
                kept = torch.stack([t.squeeze(1)[tokens] for t in values[site]])
                assert relative(dump[site].torch()[0], kept) < BOUND, (folder, site)
                if folder == "whole":
                    back = torch.stack([g.squeeze(1) for g in scaled[site]])
                    assert relative(dump[f"{site}.grad"].torch()[0], back) < BOUND, site
    rows = {r.site: r for r in answers[0]["rows"]}
    for site in MEASURED:
        for name, tensors in ((site, values[site]), (f"{site}.grad", scaled[site])):
            whole = torch.cat([t.flatten() for t in tensors]).double()
            assert rows[name].count == whole.numel(), name
            assert rows[name].norm == pytest.approx(float(whole.norm()), rel=1e-5), name
    last = [a["edited"] for a in answers if a["edited"][SITES[0]]]
    assert last
    assert all(a[s] == pytest.approx(plain[s], rel=1e-5) for a in last for s in SITES)
    assert len({str(a["samples"]) for a in answers}) == 1
    assert "no 'b'" in answers[0]["samples"]
    assert SITES[0] in answers[0]["samples"]


# -- what stays refused --------------------------------------------------------------------------------


def refused(case: Case, site: str, joined: bool) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction(site)], gather_data_parallel=joined)
    return ranks.step_says(case, chunks, flex)


@pytest.mark.parametrize("site", [SITES[0], SITES[3]])
def test_data_parallel_ranks_together(site: str) -> None:
    case = Case("packed dp2 pp2", dp=2, pp=2, packed="flat", layers=2, microbatches=1)
    assert all("attach without it" in s for s in run(4, refused, case, site, True))
    assert run(4, refused, case, site, False) == [""] * 4
