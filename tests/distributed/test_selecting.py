"""Selections on real Megatron: what arrives is what one process takes from its tensor, no more is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.wishes import Wish, wished

pytest.importorskip("megatron.core")

LAYER = "decoder.layers.1"
STREAM, MID, FC1, FC2 = (
    f"{LAYER}:output",
    f"{LAYER}:mid",
    f"{LAYER}.mlp.linear_fc1",
    f"{LAYER}.mlp.linear_fc2",
)
CORE = f"{LAYER}.self_attention.core_attention"
LOGITS = "output_layer:output"
WIDTH = gpt.HIDDEN // gpt.HEADS

CASES = [
    Case("tp2", tp=2, layers=2),
    pytest.param(Case("tp2 sp", tp=2, sp=True, layers=2), marks=pytest.mark.versions),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
    Case("pp2 tp2", pp=2, tp=2, layers=2),
    Case("tp4, copied heads, recomputed", tp=4, layers=2, recompute=("full",)),
]


def direction(n: int, rows: int = 0) -> Tensor:
    """Something that tells all places apart."""
    shape = (rows, n) if rows else (n,)
    return torch.cos(torch.arange(max(rows, 1) * n, dtype=torch.float32)).view(shape)


def ranked(tensor: Tensor, k: int, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    found = tensor.sort(dim=dim, descending=largest, stable=True)
    return found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)


# By name: the site; what is selected; what is made of it; the same in plain code.
WISHES: dict[str, Wish] = {
    "last": (STREAM, {"positions": -1}, lambda r: None, lambda t: t[-1:]),
    "few": (STREAM, {"positions": [3, 12, 3], "samples": 1}, lambda r: None, lambda t: t[[3, 12, 3]][:, 1:2]),
    "every": (MID, {"positions": slice(1, None, 4)}, lambda r: None, lambda t: t[1::4]),
    "back": (MID, {"positions": slice(None, None, -3)}, lambda r: None, lambda t: t.flip(0)[::3]),
    "neurons": (f"{FC1}:output", {"neurons": slice(40, 60)}, lambda r: None, lambda t: t[..., 40:60]),
    "head": (f"{CORE}:q", {"heads": [3, 0]}, lambda r: None, lambda t: t[:, :, [3, 0]]),
    "keys": (f"{CORE}:k", {"heads": -1}, lambda r: None, lambda t: t[:, :, -1:]),
    "packed": (f"{CORE}:output", {"heads": 2}, lambda r: None, lambda t: t[..., 2 * WIDTH : 3 * WIDTH]),
    "scores": (f"{CORE}:probs", {"heads": 1, "positions": -1}, lambda r: None, lambda t: t[:, 1:2, -1:]),
    "partial": (f"{FC2}:partial", {"positions": 5}, lambda r: None, lambda t: t[5:6]),
    "mean": (STREAM, {}, lambda r: r.mean("s"), lambda t: t.mean(0)),
    "both": (f"{FC1}:output", {}, lambda r: r.sum("s", "b"), lambda t: t.sum((0, 1))),
    "norm": (f"{FC1}:output", {}, lambda r: r.norm(-1), lambda t: t.norm(dim=-1)),
    "norms": (STREAM, {"positions": slice(4, 12)}, lambda r: r.norm("s"), lambda t: t[4:12].norm(dim=0)),
    "summed": (
        f"{FC2}:partial",
        {"positions": [0, -1]},
        lambda r: r.norm("h"),
        lambda t: t[[0, -1]].norm(dim=-1),
    ),
    "halves": (f"{FC2}:partial", {}, lambda r: r.mean("s"), lambda t: t.mean(0)),
    "top": (LOGITS, {"positions": -1}, lambda r: r.topk(40, -1), lambda t: ranked(t[-1:], 40, 2)),
    "low": (STREAM, {}, lambda r: r.topk(3, "s", largest=False), lambda t: ranked(t, 3, 0, False)),
    "upon": (f"{FC2}:partial", {}, lambda r: r.topk(2, "h"), lambda t: ranked(t, 2, 2)),
    "dot": (
        f"{FC1}:output",
        {},
        lambda r: r.dot(direction(2 * gpt.FFN)),
        lambda t: t @ direction(2 * gpt.FFN),
    ),
    "dots": (
        f"{FC1}:output",
        {"positions": slice(0, 2), "neurons": slice(0, 80)},
        lambda r: r.dot(direction(80, 3)),
        lambda t: t[:2, :, :80] @ direction(80, 3).T,
    ),
    "loss": ("loss:output", {"samples": 1}, lambda r: None, lambda t: t[1:2]),
}
NO_GRADIENT = ("scores",)
SITES = sorted({w[0] for w in WISHES.values()})


def spread(case: Case, state: dict[str, Tensor], gathered: bool = False) -> dict[str, list[Tensor]]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    plain = gpt.step(case, chunks, ranks.mine(chunks))
    out: dict[str, list[Tensor]] = {}
    for kind in ("forward", "tensor"):
        there = {n: w for n, w in WISHES.items() if kind == "forward" or n not in NO_GRADIENT}
        hooks = wished(there, kind)
        with mf.attach(chunks, hooks, gather_data_parallel=gathered) as flex:
            assert gpt.step(case, chunks, ranks.mine(chunks)) == plain
            out |= {n: list(r) for n, r in flex.output_dict.items()}
    return out


def compared(truth: dict[str, Any], found: dict[str, list[Tensor]], factor: float) -> None:
    seen = set()
    for name, (site, _, _, plainly) in WISHES.items():
        for kind, ending in (("values", ""), ("gradients", ".grad")):
            if ending and name in NO_GRADIENT:
                continue
            wholes = [t * factor if ending else t for t in truth[kind][site]]
            for number, whole in enumerate(wholes):
                want = plainly(whole)
                got = [found[f"{site}{ending}.{name}"][number]]
                seen.add(f"{site}{ending}.{name}")
                if isinstance(want, tuple):
                    seen.add(f"{site}{ending}.{name}.indices")
                    indices = found[f"{site}{ending}.{name}.indices"][number]
                    assert indices.dtype == torch.int64
                    dim = {"top": 2, "low": 0, "upon": 2}[name]
                    selected = whole[-1:] if name == "top" else whole
                    assert relative(selected.gather(dim, indices), want[0]) <= BOUND, name
                    want = want[0]
                assert relative(got[0], want) <= BOUND, (name, ending, relative(got[0], want))
    assert seen == set(found), "what arrives is what was wanted, and nothing beside it"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kind_is_what_one_process_has(case: Case) -> None:
    truth = truths.of(case.single(), SITES, [])
    found = run(case.world, spread, case, truth["state"])
    compared(truth, found[0], case.cp)
    assert found[1:] == [{}] * (case.world - 1)


@pytest.mark.versions
def test_samples_of_all_data_parallel_ranks() -> None:
    case = Case("dp2 tp2", dp=2, tp=2, layers=2)
    whole = replace(case.single(), microbatches=case.microbatches, joint=case.dp)
    truth = truths.of(whole, SITES, [])
    found = run(case.world, spread, case, truth["state"], True)
    compared(truth, found[0], case.dp)
    assert found[1:] == [{}] * 3


# -- what else counts --------------------------------------------------------------------------------


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def step_with(case: Case, chunks: list[Any], hooks: list[Any]) -> dict[str, Tensor]:
    """What arrives in a step, of its first microbatch."""
    import megatron_flex as mf

    with mf.attach(chunks, hooks) as flex:
        gpt.step(case, chunks, ranks.mine(chunks))
        return {n: r[0] for n, r in flex.output_dict.items()}


def several(case: Case) -> dict[str, Any]:
    """Beside edits, beside whole reads, and what ranks send."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    site, last = f"{FC1}:output", mf.Select(positions=-1)
    norm = mf.reduce.norm("gate|up")
    edit = mf.HookFunction(site, double, select=last)
    behind = mf.HookFunction(site, double, select=last, reduce=norm, keep_as="norm")
    behind.captures_edited = True
    out = {"whole": step_with(case, chunks, [mf.HookFunction(site)])}
    out["edit"] = step_with(case, chunks, [edit])
    out["behind"] = step_with(case, chunks, [behind])
    # The same by an edit that runs on the shard.
    edit = mf.HookFunction(site, mf.edits.scale(2.0), select=last)
    behind = mf.HookFunction(site, mf.edits.scale(2.0), select=last, reduce=norm, keep_as="norm")
    behind.captures_edited = True
    out["edit on shards"] = step_with(case, chunks, [edit])
    out["behind on shards"] = step_with(case, chunks, [behind])
    out["beside"] = step_with(
        case,
        chunks,
        [
            mf.HookFunction(site),
            mf.HookFunction(site, double, keep_as="seen", reduce=norm),
            mf.HookFunction(site, select=last, keep_as="last"),
        ],
    )
    out["says"] = {name: said(case, chunks, hook) for name, hook in wrong().items()}
    hooks = [mf.HookFunction(STREAM), mf.HookFunction(STREAM, select=last)]
    try:
        mf.attach(chunks, hooks)
    except mf.HookError as error:
        out["says"]["two"] = str(error)
    out["sends"] = {}
    for name, hook in (
        ("sure", mf.HookFunction(STREAM, select=last)),
        ("asks", wished({"few": WISHES["few"]}, "forward")[0]),
    ):
        with mf.attach(chunks, [hook]):
            gpt.step(case, chunks, 0)
            with ranks.counting() as seen:
                gpt.step(case, chunks, 0)
            out["sends"][name] = seen
    with ranks.counting() as seen:
        gpt.step(case, chunks, 0)
    out["sends"] = {n: {k: v for k, v in (c - seen).items() if v} for n, c in out["sends"].items()}
    return out


def wrong() -> dict[str, Any]:
    import megatron_flex as mf

    return {
        "beyond": mf.HookFunction(STREAM, select=mf.Select(positions=[0, 16])),
        "empty": mf.HookFunction(STREAM, select=mf.Select(positions=slice(20, None))),
        "heads": mf.HookFunction(f"{CORE}:output", select=mf.Select(heads=4)),
        "top": mf.HookFunction(STREAM, reduce=mf.reduce.topk(17, "s")),
        "gradient": mf.HookFunction(STREAM, hook_type="tensor", select=mf.Select(samples=2)),
        "edit": mf.HookFunction(STREAM, double, select=mf.Select(samples=2)),
    }


def said(case: Case, chunks: list[Any], hook: Any) -> str:
    import megatron_flex as mf

    return ranks.step_says(case, chunks, mf.attach(chunks, [hook]))


def test_beside_edits_and_wholes_and_what_is_sent() -> None:
    case = Case("tp2", tp=2, layers=2)
    found = run(2, several, case)
    site, whole = f"{FC1}:output", found[0]["whole"][f"{FC1}:output"]
    close = torch.testing.assert_close
    norm = whole.norm(dim=-1)
    for way in ("", " on shards"):
        close(found[0]["edit" + way], {site: whole[-1:]})
        close(found[0]["behind" + way], {f"{site}.norm": norm[-1:], f"{site}.edited.norm": 2 * norm[-1:]})
    close(found[0]["beside"], {site: whole, f"{site}.seen": norm, f"{site}.last": whole[-1:]})
    for answer in found:
        assert answer["says"] == found[0]["says"], "all ranks raise the same"
        # Where nothing can go wrong in a step, the ranks do not ask each other whether something has.
        assert answer["sends"]["sure"] == answer["sends"]["asks"]
        assert set(answer["sends"]["asks"]) == {"all_reduce"}
    says = found[0]["says"]
    assert_names(says["beyond"], "positions", 16, -16, 15)
    assert_names(says["empty"], "positions", 20, 16)
    assert_names(says["heads"], "heads", 4)
    assert_names(says["top"], "topk(17, s)", "17", "16")
    assert_names(says["gradient"], "samples", 2)
    assert_names(says["edit"], "samples", 2)
    assert_names(says["two"], "keep_as=")
