"""Selected dumps are the selection of the whole dump, in every layout; random tokens are the same in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import dumped, gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")

LAYER = "decoder.layers.1"
IDS = "embedding.word_embeddings:input"
SITES = [  # cut, replicated, scattered, summands, with two sequences, without features, as a parameter has it
    f"{LAYER}.mlp.linear_fc1:output",
    f"{LAYER}:output",
    f"{LAYER}:mid",
    f"{LAYER}.mlp.linear_fc2:partial",
    f"{LAYER}.self_attention.core_attention:scores",
    f"{LAYER}.self_attention:k",
    "embedding.word_embeddings:output",
    "loss:output",
]
CASES = [
    Case("tp1", layers=2),
    Case("tp2 sp", tp=2, sp=True, layers=2),
    Case("tp4, fewer groups", tp=4, layers=2),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
    Case("dp2 pp2", dp=2, pp=2, layers=2, microbatches=1),
]
SAMPLES = 2 * gpt.BATCH  # in the global batch of each case above


def settings() -> dict[str, dict[str, Any]]:
    import megatron_flex as mf

    return {
        "whole": {},
        "positions": {"tokens": [5, -1, 0, 5]},
        "every third": {"tokens": slice(None, None, 3)},
        "from behind": {"tokens": slice(-5, None, 2)},
        "drawn": {"tokens": mf.sampled(4, seed=3)},
        "samples": {"samples": [0, 3]},
        "odd samples": {"samples": slice(1, None, 2)},
        "both": {"samples": slice(2, None), "tokens": [1, 2, 15]},
        "drawn of some": {"samples": [1, 2], "tokens": mf.sampled(3)},
        "mean": {"reduce": "mean"},
        "mean of some": {"reduce": "mean", "tokens": slice(0, 16, 3)},
        "mean of drawn": {"reduce": "mean", "tokens": mf.sampled(5, seed=1)},
        "mean of samples": {"reduce": "mean", "samples": [3]},
        "half": {"dtype": "bf16", "tokens": [3]},
    }


def selected(case: Case, state: dict[str, Tensor], path: str) -> None:
    """All dumps of one step at once."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dumps = [
        mf.Dump(f"{path}/{name}", SITES, gradients=True, order="blocks", **more)
        for name, more in settings().items()
    ]
    with mf.attach(chunks, dumps=dumps):
        gpt.step(case, chunks, ranks.mine(chunks))


def weights(case: Case) -> dict[str, Tensor]:
    return gpt.randomize(ranks.start(case)[0])


def expected(whole: Tensor, said: dict[str, Any], sequence: bool) -> Tensor:
    """The selection of `[sample, token, ...]`, by plain indexing."""
    import megatron_flex as mf

    tokens, samples = said.get("tokens"), said.get("samples")
    kept = list(range(SAMPLES))
    if samples is not None:
        kept = kept[samples] if isinstance(samples, slice) else sorted(samples)
    if isinstance(tokens, mf.sampled):
        at = [tokens.positions(gpt.SEQUENCE, 0, n) for n in kept]
    elif isinstance(tokens, slice):
        at = [sorted(range(gpt.SEQUENCE)[tokens])] * len(kept)
    else:
        one = {p % gpt.SEQUENCE for p in tokens} if tokens is not None else range(gpt.SEQUENCE)
        at = [sorted(one)] * len(kept)
    rows = [whole[n][a] for n, a in zip(kept, at, strict=True)] if sequence else [whole[n] for n in kept]
    out = torch.stack(rows)
    out = out.float().mean(1) if said.get("reduce") == "mean" else out
    return out.bfloat16() if said.get("dtype") == "bf16" else out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_selected_dump_is_the_selection_of_the_whole(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf

    (state,) = run(1, weights, case.single())
    run(case.world, selected, case, state, str(tmp_path), timeout=200)
    with mf.open_dump(tmp_path / "whole") as dump:
        whole = {name: dump[name].torch()[0] for name in dump.sites}
    assert len(whole) == 2 * len(SITES)
    assert all(t.shape[:2] == (SAMPLES, gpt.SEQUENCE) for t in whole.values())
    for name, said in settings().items():
        with mf.open_dump(tmp_path / name) as dump:
            assert dump.sites == list(whole)
            for site, all_ in whole.items():
                got, want = dump[site].torch()[0], expected(all_, said, True)
                if "reduce" in said:
                    assert relative(got, want) < BOUND, (name, site)
                elif "dtype" in said and dumped.summands(dump, site) > 1:  # each is rounded by itself
                    assert relative(got.float(), want.float()) < 2**-7, (name, site)
                else:
                    assert torch.equal(got, want), (name, site)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda c: c.name)
def test_only_what_is_selected_is_written(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf

    (state,) = run(1, weights, case.single())
    run(case.world, selected, case, state, str(tmp_path), timeout=200)
    for name in settings():
        with mf.open_dump(tmp_path / name) as dump:
            expected = {site: dump[site].nbytes * dumped.summands(dump, site) for site in dump.sites}
            if "mean" in name:  # ranks that cut the sequence have a summand of the mean each
                expected = {}
        got: dict[str, int] = {}
        for one in dumped.entries(tmp_path / name):
            got[one.name] = got.get(one.name, 0) + one.nbytes
        assert not expected or got == expected, name


def with_ids(case: Case, path: str) -> None:
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks, dumps=mf.Dump(path, [IDS, f"{LAYER}:output"], dtype="bf16")):
        gpt.step(case, chunks, ranks.mine(chunks))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_token_ids_come_beside_rows(case: Case, tmp_path: Path) -> None:
    """Each row has the id of its own token, from whichever stage and rank, and bf16 rounds no id."""
    import megatron_flex as mf

    run(case.world, with_ids, case, str(tmp_path / "d"))
    tokens = torch.cat([batch["tokens"] for batch in gpt.data(SAMPLES // gpt.BATCH)])
    seen = set()
    with mf.open_dump(tmp_path / "d") as dump:
        stream = dump[f"{LAYER}:output"].torch()[0]
        names = [f"{LAYER}:output", IDS]
        for rows, ids, places in dump.rows(names, 7, seed=3, dtype=torch.bfloat16, places=True):
            assert (rows.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
            for row, token, (_, sample, position) in zip(rows, ids, places.tolist(), strict=True):
                assert token == tokens[sample, position]
                assert torch.equal(row, stream[sample, position])
                seen.add((sample, position))
        assert dump.dataset(IDS, dtype=torch.bfloat16)[5] == tokens[0, 5]
    assert len(seen) == tokens.numel()


def test_settings_that_cannot_be() -> None:
    import megatron_flex as mf

    for said, words in (
        ({}, "decoder.layers.*"),
        ({"sites": "x", "every": 0}, "every=0"),
        ({"sites": "x", "samples": slice(-2, None)}, "samples=slice(-2, None, None)"),
        ({"sites": "x", "iterations": slice(0, 10, -1)}, "iterations=slice(0, 10, -1)"),
        ({"sites": "x", "microbatches": [-1]}, "microbatches=[-1]"),
        ({"sites": "x", "samples": []}, "samples=[]"),
        ({"sites": "x", "iterations": 1.5}, "iterations=1.5"),
        ({"sites": "x", "tokens": []}, "tokens=[]"),
        ({"sites": "x", "tokens": [1.5]}, "tokens=[1.5]"),
        ({"sites": "x", "tokens": "all"}, "tokens='all'"),
        ({"sites": "x", "dtype": "int4"}, "dtype='int4'"),
        ({"sites": "x", "reduce": "sum"}, "reduce='sum'"),
    ):
        with raises(mf.FlexError) as error:
            mf.Dump("d", **said)
        assert words in str(error.value)
    with raises(mf.FlexError, 0):
        mf.sampled(0)
