"""Packed sequences: their description, and layouts that shard each sequence, against indices written out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_flex as mf
from megatron_flex.dump.schema import layout_from_json, layout_to_json
from megatron_flex.errors import HookError, LayoutError
from megatron_flex.layout import Cut, Dim, Layout, PackedSequences, assemble, assemble_region, extract
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.selection import CaptureSelection, plan_selection
from megatron_flex.runtime.statistics_sink import select_counted
from tests.support.messages import raises

STREAM = Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("b"), Dim("h")))
SCORES = Layout((Dim("b"), Dim("n", (Cut("tp"),)), Dim("s", (Cut("cp", "zigzag"),)), Dim("s")))


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Real lengths, lengths with padding, and how many ranks shard them."""
    cp, tp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (1, 2)]))
    parts = 2 * cp * tp
    padded = [parts * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))]
    return [draw(st.integers(1, n)) for n in padded], padded, cp, tp


def ends(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def held(padded: Sequence[int], cp: int, tp: int, rank: int, part: int) -> list[int]:
    """The tokens of a rank: two chunks of each sequence, and its tensor parallel part of all of them."""
    mine, start = [], 0
    for length in padded:
        chunks = torch.arange(start, start + length).chunk(2 * cp if cp > 1 else 1)
        mine += torch.cat([chunks[rank], chunks[-1 - rank]] if cp > 1 else chunks).tolist()
        start += length
    return mine[part * len(mine) // tp : (part + 1) * len(mine) // tp]


@given(packs())
@settings(max_examples=60, deadline=None)
def test_each_sequence_is_sharded(drawn: tuple[list[int], list[int], int, int]) -> None:
    real, padded, cp, tp = drawn
    pack, sizes = PackedSequences.from_ends(ends(real), ends(padded)), {"cp": cp, "tp": tp}
    full = torch.arange(sum(padded) * 2.0).view(-1, 1, 2)
    layout = pack.layout_of(STREAM)
    shards = []
    for rank, part in product(range(cp), range(tp)):
        shard = extract(layout, full, {"cp": rank, "tp": part}, sizes)
        assert torch.equal(shard, full[held(padded, cp, tp, rank, part)])
        shards.append(shard)
    assert torch.equal(assemble(layout, shards, sizes), full)
    wanted = list(range(1, sum(padded), 3))

    def read(coords: dict[str, int], where: tuple[list[int], ...]) -> Tensor:
        return shards[coords["cp"] * tp + coords["tp"]][list(where[0])]

    found = assemble_region(layout, read, full.shape, sizes, [wanted, range(1), range(2)])
    assert torch.equal(found, full[wanted])
    assert layout_from_json(layout_to_json(layout)) == layout


@given(packs(), st.data())
@settings(max_examples=60, deadline=None)
def test_sequences_are_selected(drawn: tuple[list[int], list[int], int, int], data: st.DataObject) -> None:
    real, padded, cp, tp = drawn
    pack, sizes = PackedSequences.from_ends(ends(real), ends(padded)), {"cp": cp, "tp": tp}
    full = torch.randn(sum(padded), 1, 2)
    chosen = data.draw(st.lists(st.integers(-len(real), len(real) - 1), min_size=1, max_size=4))
    position = data.draw(st.sampled_from([None, 0, -1]))
    one = [t if position is None else t[[position]] for t in pack.unpack(full)]
    wanted = CaptureSelection(mf.Select(sequences=chosen, positions=position))
    layout, out, plan = pack.layout_of(STREAM), [], None
    for rank, part in product(range(cp), range(tp)):
        coords = {"cp": rank, "tp": part}
        shard = extract(layout, full, coords, sizes)
        where = shard.shape, shard.dtype, shard.device
        plan = plan_selection(wanted, layout, *where, sizes, coords)
        out.append(plan.local(shard))
    assert plan is not None
    found = plan.finish(assemble(plan.layout, out, sizes))[""]
    assert torch.equal(found, torch.cat([one[i] for i in chosen]))


@given(packs())
@settings(max_examples=30, deadline=None)
def test_padding_is_not_counted(drawn: tuple[list[int], list[int], int, int]) -> None:
    real, padded, cp, tp = drawn
    pack, sizes = PackedSequences.from_ends(ends(real), ends(padded)), {"cp": cp, "tp": tp}
    full = torch.arange(1.0, sum(padded) + 1).view(-1, 1, 1)
    layout, counted = pack.layout_of(STREAM), []
    for rank, part in product(range(cp), range(tp)):
        mesh = Mesh(
            (Axis("cp", cp, rank, None, tuple(range(cp))), Axis("tp", tp, part, None, tuple(range(tp))))
        )
        shard = extract(layout, full, {"cp": rank, "tp": part}, sizes)
        counted += select_counted(shard, layout, mesh).flatten().tolist()
    assert sorted(counted) == torch.cat(pack.unpack(full)).flatten().tolist()


def test_the_description_of_a_pack() -> None:
    pack = PackedSequences.from_ends([0, 3, 7, 7, 7], [0, 4, 8, 8, 8])
    assert pack is PackedSequences.from_ends([0, 3, 7, 7, 7], [0, 4, 8, 8, 8])
    assert (len(pack), pack.lengths, pack.spans) == (2, (3, 4), ((0, 3), (4, 8)))
    sequence, position = pack.positions(10)
    assert sequence.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, -1, -1]
    assert position.tolist() == [0, 1, 2, -1, 0, 1, 2, 3, -1, -1]
    scores = pack.layout_of(SCORES)
    assert scores.dims[2].cuts == (Cut("cp", "zigzag", segments=(4, 4)),)
    assert scores.dims[3].sequences == pack.spans
    assert pack.layout_of(scores) is scores
    assert pack.layout_of(STREAM).describe({"cp": 2, "tp": 1}) == "[s/cp zigzag in each of 2 sequences, b, h]"
    row = PackedSequences.from_ends([0, 3, 7], [0, 4, 8], by_sequence=False).layout_of(STREAM)
    assert row.dims[0].cuts == STREAM.dims[0].cuts
    assert row.dims[0].sequences == pack.spans


@pytest.mark.parametrize(
    ("real", "padded", "said"),
    [
        ([1, 3], None, ("cu_seqlens_q=[1, 3]", 0)),
        ([], None, ("cu_seqlens_q=[]", 0)),
        ([0, 5, 3], None, ("cu_seqlens_q=[0, 5, 3]",)),
        ([0, 5], [0, 4], ("[5]", "[4]", "cu_seqlens_q_padded")),
        ([0, 5], [0, 5, 9], ("cu_seqlens_q", 2, "cu_seqlens_q_padded", 3)),
    ],
)
def test_numbers_that_describe_no_pack(
    real: list[int], padded: list[int] | None, said: tuple[object, ...]
) -> None:
    with raises(LayoutError, *said):
        PackedSequences.from_ends(real, padded)


def test_what_does_not_fit_a_pack() -> None:
    pack = PackedSequences.from_ends([0, 4, 12])
    with raises(LayoutError, "(5, 1, 2)", 5, 0, 12):
        pack.unpack(torch.zeros(5, 1, 2))
    with raises(LayoutError, "s", 16, 2, "cp", 12):
        extract(pack.layout_of(STREAM), torch.zeros(16, 1, 2), {}, {"cp": 2})
    for wrong in ("all", 1.5, [0, "each"], True):
        with raises(HookError, f"sequences={wrong!r}"):
            mf.Select(sequences=wrong)  # type: ignore[arg-type]
    assert mf.Select(sequences="each", positions=-1).describe() == "sequences each, positions -1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequences": [[4, 2]]}, ("((4, 2),)",)),
        ({"sequences": [[0, 3], [2, 5]]}, ("((0, 3), (2, 5))",)),
        ({"cuts": [{"axis": "cp", "order": "zigzag", "segments": [4, 0]}]}, ("(4, 0)",)),
    ],
)
def test_packs_that_no_dump_has(change: dict[str, object], named: tuple[str, ...]) -> None:
    record = layout_to_json(PackedSequences.from_ends([0, 4, 12]).layout_of(STREAM))
    layout_from_json(record)
    with raises(ValueError, *named):
        layout_from_json({**record, "dims": [{**record["dims"][0], **change}, *record["dims"][1:]]})


@pytest.mark.parametrize(
    ("flags", "by_sequence"),
    [({}, True), ({"dataloader_inter_document_masking": True}, False), ({"sft": True}, True)],
)
def test_what_context_parallel_ranks_shard(
    flags: dict[str, bool], by_sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron's `get_batch` does it: each sequence, or the row where documents only mask attention."""
    pytest.importorskip("megatron.core")
    global_vars = pytest.importorskip("megatron.training.global_vars")
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_flex.adapters.megatron_core.schedules import read_pack

    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", Namespace(**flags))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 7]), cu_seqlens_q_padded=torch.tensor([[0, 4, 8]])
    )
    assert read_pack(packed) == PackedSequences.from_ends([0, 3, 7], [0, 4, 8], by_sequence)
