"""Packed sequences (`qkv_format="thd"`) without context parallelism: every site against one process."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.distributed.test_matrix import GPT, check
from tests.support import gpt, measuring, oracle, packed, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
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
CONTEXT = [
    Case("packed cp2", cp=2, packed="flat", padded=True, layers=2),
    Case("packed cp4, learned positions", cp=4, packed="kept", padded=True, layers=2, rope=False),
    Case("packed cp2 tp2 sp", cp=2, tp=2, sp=True, packed="flat", padded=True, layers=2),
    Case("packed cp2 pp2, all recomputed", cp=2, pp=2, packed="heads", padded=True, recompute=("full",)),
]
EXPERTS = [
    Case("packed experts tp2 sp ep2 etp1", tp=2, sp=True, ep=2, packed="flat", layers=2, experts=4),
    Case("packed experts dp2 ep2", dp=2, ep=2, packed="flat", layers=2, experts=4, microbatches=1),
    Case("packed experts cp2 ep2", cp=2, ep=2, packed="flat", padded=True, layers=2, experts=4),
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


@pytest.mark.parametrize("case", CONTEXT, ids=lambda c: c.name)
def test_context_parallel(case: Case, cells: list[Any]) -> None:
    """Each sequence of the pack is sharded in a zigzag of its own, and padded so that it can be."""
    check(case, cells, among=[*GPT, *PACKED, *CONTEXT])


@pytest.mark.parametrize("case", EXPERTS, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *PACKED, *CONTEXT, *EXPERTS])


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


# -- sequences one by one ----------------------------------------------------------------------------

APART = [CONTEXT[2], Case("packed tp2 sp pp2", tp=2, sp=True, pp=2, packed="heads", layers=2)]
APART_SITES = [f"{CORE}:q", "decoder.layers.1:output", "decoder.layers.1.mlp.linear_fc2:partial"]


def sequences_read(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    select, each = mf.Select, mf.Select(sequences="each")
    hooks = [
        mf.HookFunction(APART_SITES[0], select=select(sequences=[2, 0], positions=[0, -1], heads=1)),
        mf.HookFunction(APART_SITES[0], select=each, keep_as="each"),
        mf.HookFunction(APART_SITES[1], select=select(sequences=slice(1, None))),
        mf.HookFunction(APART_SITES[1], select=each, reduce=mf.reduce.norm("h"), keep_as="norm"),
        mf.HookFunction(APART_SITES[1], hook_type="tensor", select=each, reduce=mf.reduce.mean("s")),
        mf.HookFunction(APART_SITES[2], select=select(sequences=-1)),
    ]
    with mf.attach(chunks, hooks) as flex:
        gpt.step(case, chunks, 0)
        packs = flex.packed_sequences
        return {"read": {n: list(r) for n, r in flex.output_dict.items()}, "packs": packs}


@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_sequences_one_by_one(case: Case) -> None:
    """Selections and statistics of each sequence, without padding, are those of one process."""
    from megatron_flex import PackedSequences

    truth = truths.of(case.single(), APART_SITES, [])
    answers = run(case.world, sequences_read, case, truth["state"], timeout=100)
    room = packed.ROOM if case.padded else packed.ENDS
    spans = [(a, a + n - m) for a, m, n in zip(room, packed.ENDS, packed.ENDS[1:], strict=False)]
    pack = PackedSequences.from_ends(packed.ENDS, room)
    assert all(a["packs"] == {0: pack, 1: pack} for a in answers)
    assert pack.spans == tuple(spans)
    q, out, partial = (truth["values"][s] for s in APART_SITES)
    back = [g * case.cp for g in truth["gradients"][APART_SITES[1]]]  # as Megatron multiplies the loss
    parts = [[t[a:b] for a, b in spans] for t in out]
    want = {
        APART_SITES[0]: [t[[spans[2][0], spans[2][1] - 1, 0, spans[0][1] - 1]][:, [1]] for t in q],
        APART_SITES[1]: [torch.cat(p[1:]) for p in parts],
        APART_SITES[2]: [t[slice(*spans[3])] for t in partial],
    }
    for n, (a, b) in enumerate(spans):
        want[f"{APART_SITES[0]}.each.sequence{n}"] = [t[a:b] for t in q]
        want[f"{APART_SITES[1]}.norm.sequence{n}"] = [p[n].norm(dim=-1) for p in parts]
        want[f"{APART_SITES[1]}.grad.sequence{n}"] = [g[a:b].mean(0) for g in back]
    read = answers[0]["read"]
    assert set(read) == set(want)
    wrong = [(s, m) for s in want for m, t in enumerate(want[s]) if relative(read[s][m], t) > BOUND]
    assert not wrong


def sequences_estimated(case: Case) -> dict[str, Any]:
    """By name the bytes that a step captures and those that the estimate says; and what it refuses."""
    import megatron_flex as mf
    from megatron_flex import PackedSequences

    chunks, select, each = ranks.start(case), mf.Select, mf.Select(sequences="each")
    site, query = APART_SITES[1], APART_SITES[0]
    hooks = {
        "row": mf.HookFunction(site),
        "some": mf.HookFunction(site, select=select(sequences=slice(1, None))),
        "ends": mf.HookFunction(query, select=select(sequences=[2, 0], positions=[0, -1], heads=1)),
        "each": mf.HookFunction(query, select=each),
        "norms": mf.HookFunction(site, select=each, reduce=mf.reduce.norm("h")),
        "gradients": mf.HookFunction(site, hook_type="tensor", select=each, reduce=mf.reduce.mean("s")),
    }
    pack = PackedSequences.from_ends(packed.ENDS, packed.ROOM if case.padded else None)
    out: dict[str, Any] = {"refused": []}
    for name, hook in hooks.items():
        with mf.attach(chunks, [hook]) as flex:
            estimate = flex.estimate(sequences=pack, microbatches=case.microbatches)
            said = sum(h.each.leader_host * h.times for h in estimate.hooks)
            gpt.step(case, chunks, 0)
            kept = sum(t.nbytes for r in flex.output_dict.values() for t in r)
            out[name] = (kept, said) if flex.is_leader else None
            if name == "row":
                for wrong in ({"sequence_length": 7}, {"micro_batch_size": 2}, {"sequences": [5, 11]}):
                    try:
                        flex.estimate(**{"sequences": pack, **wrong})
                    except mf.FlexError as error:
                        out["refused"].append(str(error))
    return out


@pytest.mark.parametrize("case", APART, ids=lambda c: c.name)
def test_estimates_of_packed_sequences_are_what_is_captured(case: Case) -> None:
    found = run(case.world, sequences_estimated, case, timeout=100)[0]
    refused = found.pop("refused")
    assert len(found) == 6
    sums = case.tp * case.cp  # a mean over the tokens arrives as a sum of each rank's
    for name, (kept, said) in found.items():
        assert said == kept * (sums if name == "gradients" else 1) > 0, name
    assert "sequence_length=7" in refused[0]
    assert "micro_batch_size=2" in refused[1]
    assert len(refused) == (3 if case.cp > 1 else 2)
    assert case.cp == 1 or "number 0 has 5" in refused[2]


def sequences_missing(case: Case, several: list[Any]) -> list[str]:
    import megatron_flex as mf

    chunks, out = ranks.start(case), []
    for select in several:
        flex = mf.attach(chunks, [mf.HookFunction("decoder.layers.1:output", select=select)])
        out.append(ranks.step_says(case, chunks, flex))
    return out


def test_sequences_that_are_not_there() -> None:
    import megatron_flex as mf

    case = CONTEXT[0]
    several = [mf.Select(sequences=4), mf.Select(sequences=0, positions=5), mf.Select(sequences=slice(7, 9))]
    words = [
        ("sequences", 4),
        ("positions", 5, 0),
        ("sequences",),
    ]
    for said in run(2, sequences_missing, case, several):
        for text, values in zip(said, words, strict=True):
            assert_names(text, *values)
    plain = Case("tp2", tp=2, layers=2)
    for said in run(2, sequences_missing, plain, [mf.Select(sequences=0), mf.Select(sequences="each")]):
        assert all("packed_seq_params" in text for text in said), said


# -- what stays refused --------------------------------------------------------------------------------


def refused(case: Case, site: str, joined: bool) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction(site)], gather_data_parallel=joined)
    return ranks.step_says(case, chunks, flex)


@pytest.mark.parametrize("site", [SITES[0], SITES[3]])
def test_data_parallel_ranks_together(site: str) -> None:
    case = Case("packed dp2 pp2", dp=2, pp=2, packed="flat", layers=2, microbatches=1)
    for text in run(4, refused, case, site, True):
        assert_names(text, "packed_seq_params", "gather_data_parallel")
    assert run(4, refused, case, site, False) == [""] * 4


# -- packed and unpacked runs of the same sequences --------------------------------------------------

EXPERT = "decoder.layers.1.mlp.experts"
RUNS = [
    dataclasses.replace(CONTEXT[2], microbatches=1),
    Case("packed pp2", pp=2, packed="heads", layers=2),
    dataclasses.replace(EXPERTS[2], microbatches=1),
]


def dumped_sites(case: Case) -> list[str]:
    """All sites but scores, which a pack has between its sequences too."""
    return [s for s in oracle.sites_of(case) if not s.endswith((":scores", ":probs"))]


def one_by_one(case: Case) -> list[dict[str, Tensor]]:
    """The sequences of the packs of a case: tokens and labels, each a batch of one."""
    ends = packed.ENDS
    return [
        {k: t.reshape(1, -1)[:, a:b] for k, t in batch.items()}
        for batch in gpt.data(case.microbatches)
        for a, b in pairwise(ends)
    ]


def unpacked_step(chunks: list[Any], batches: list[dict[str, Tensor]]) -> None:
    """Megatron's schedule over these batches; the loss of a token counts as in the packed run."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        length = batch["tokens"].shape[1]
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
        places = torch.arange(length).expand_as(batch["tokens"])
        output = model(batch["tokens"], places, mask, labels=batch["labels"])
        real = batch.get("real", torch.ones_like(output))
        return output, lambda out: ((out * real).sum() / (gpt.BATCH * gpt.SEQUENCE), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=chunks[0],
        num_microbatches=len(batches),
        seq_length=gpt.SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )


def dump_unpacked(case: Case, path: str, sites: list[str]) -> dict[str, Tensor]:
    """Dumps of one process without packs: each sequence by itself; those of a pack padded to one length; and
    the first site with another token in the last sequence. The weights are returned."""
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics

    case = dataclasses.replace(case.single(), packed="", padded=False)
    single = one_by_one(case)
    longest = max(b["tokens"].shape[1] for b in single)
    count = len(packed.ENDS) - 1

    def pad(several: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        out = {
            k: torch.cat(
                [torch.nn.functional.pad(b[k], (0, longest - b[k].shape[1]), value=1) for b in several]
            )
            for k in several[0]
        }
        lengths = torch.tensor([b["tokens"].shape[1] for b in several])
        return {**out, "real": (torch.arange(longest)[None] < lengths[:, None]).float()}

    padded = [pad(single[i : i + count]) for i in range(0, len(single), count)]
    other = [*single[:-1], {k: (t + (torch.arange(t.shape[1]) == 3)) % 64 for k, t in single[-1].items()}]
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    runs = (("apart", single, sites), ("padded", padded, sites), ("other", other, sites[:1]))
    for name, batches, dumped in runs:
        chunks[0].zero_grad()
        with mf.attach(chunks, dumps=[mf.Dump(f"{path}/{name}", dumped, gradients=True)]) as flex:
            if name == "apart":
                flex.register_statistics(Statistics(f"{path}/statistics", MEASURED[-1:], gradients=True))
            unpacked_step(chunks, batches)
    return state


def dump_packed(case: Case, state: dict[str, Tensor], path: str, sites: list[str]) -> None:
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    with mf.attach(chunks, dumps=[mf.Dump(f"{path}/packed", sites, gradients=True)]) as flex:
        flex.register_statistics(Statistics(f"{path}/packed-statistics", MEASURED[-1:], gradients=True))
        gpt.step(case, chunks, 0)


@pytest.mark.parametrize("case", RUNS, ids=lambda c: c.name)
def test_a_packed_dump_reads_as_an_unpacked_one(case: Case, tmp_path: Path) -> None:
    """Sequence by sequence, whatever the layout, the padding and the microbatches of the two runs."""
    import megatron_flex as mf
    from megatron_flex.compare import compare

    sites = dumped_sites(case)
    (state,) = run(1, dump_unpacked, case, str(tmp_path), sites, timeout=100)
    run(case.world, dump_packed, case, state, str(tmp_path), sites, timeout=100)
    for name in ("apart", "padded"):
        found = compare(tmp_path / name, tmp_path / "packed")
        assert found.first is None, str(found.first)
        assert max(r.relative for r in found.rows) < BOUND
        assert not found.missing, found.missing
        names = {r.name for r in found.rows}
        assert {*sites} <= names
        assert len(names) > len(sites) * 1.5, "gradients too"
    lengths = [b["tokens"].shape[1] for b in one_by_one(case)]
    with mf.open_dump(tmp_path / "packed") as ours, mf.open_dump(tmp_path / "apart") as theirs:
        for site in sites:
            both = [list(dump[site].sequence_arrays()) for dump in (ours, theirs)]
            assert [ours[site].packed, theirs[site].packed] == [True, False]
            assert [s.sequence for s in both[0]] == [s.sequence for s in both[1]] == list(range(len(lengths)))
            assert [len(s.positions) for s in both[0]] == lengths
            for one, two in zip(*both, strict=True):
                assert one.positions.tolist() == two.positions.tolist()
                assert relative(one.array.torch(), two.array.torch()) < BOUND, site
    wrong = compare(tmp_path / "other", tmp_path / "packed", tolerance=BOUND, allow_missing=True).first
    assert wrong is not None
    assert wrong.name.startswith("embedding")
    assert (wrong.worst.sample, wrong.worst.token) == (len(lengths) - 1, 3)
    assert compare(tmp_path / "statistics", tmp_path / "packed-statistics").first is None
    assert compare(tmp_path / "statistics", tmp_path / "packed").first is None
