"""Figures of dumps, statistics and caches of a spread model are those of plain Megatron on one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_flex import figures
from megatron_flex.figures import FigureError
from tests.distributed.test_docs import ROOT, blocks, execute
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

LAYERS, HALF = 4, gpt.SEQUENCE // 2
SPREAD = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=LAYERS)
TIED = replace(SPREAD, name="tied", rms=False, bias=True, gated=False, rope=False, tied=True)
STREAM = [f"decoder.layers.{n}:output" for n in range(LAYERS)]
PROBS = [f"decoder.layers.{n}.self_attention.core_attention:probs" for n in range(LAYERS)]
SITES = [
    "decoder.layers.*",
    "decoder.layers.0:input",
    "**.core_attention:probs",
    "embedding.**",
    "output_layer",
]
MEASURED = ["decoder.layers.*", "decoder.layers.0.mlp.linear_fc1:output"]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def repeated(count: int) -> list[dict[str, Tensor]]:
    """Microbatches of random tokens, twice each."""
    generator = torch.Generator().manual_seed(5)
    out = []
    for _ in range(count):
        once = torch.randint(0, gpt.VOCABULARY, (gpt.BATCH, HALF), generator=generator)
        tokens = torch.cat([once, once], 1)
        out.append({"tokens": tokens, "labels": tokens.roll(-1, 1)})
    return out


def truth_of(case: Case) -> Any:
    changes.setattr(gpt, "data", repeated)
    return oracle.run(
        case, [*STREAM, "decoder.layers.0:input", *PROBS, "output_layer:output", MEASURED[1]], []
    )


def record(case: Case, state: dict[str, Tensor], folder: str, parameters: list[str], real: int = 0) -> Any:
    """A dump and statistics of a step, and on each rank what figures make of a cache of the same tokens."""
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable()
    if real:
        import megatron.training.global_vars as known

        changes.setattr(known, "_GLOBAL_TOKENIZER", SimpleNamespace(vocab_size=real))
    changes.setattr(gpt, "data", repeated)
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dump = mf.Dump(f"{folder}/dump", SITES, parameters=parameters, order="blocks")
    statistics = mf.Statistics(f"{folder}/statistics", MEASURED, histogram=True)
    with mf.attach(chunks, dumps=dump, statistics=statistics):
        for _ in range(2):
            gpt.step(case, chunks, 0)
    tokens = torch.cat([batch["tokens"] for batch in repeated(case.microbatches)])
    with mf.attach(chunks) as flex:
        logits, cache = flex.interp.run_with_cache(tokens)
        _, own = flex.interp.run_with_cache(tokens, ["decoder.layers.*", "**.core_attention:probs"])
        return {
            "logits": logits,
            "lens": cache.logit_lens(cache.accumulated_resid()),
            "patterns": cache.stack_activation("pattern"),
            "norms": figures.norms(cache),
            "token norms": figures.norms(cache, tokens=True),
            "attention": figures.attention(cache, 2, sample=1),
            "logit lens": figures.logit_lens(cache, sample=3),
            "own lens": figures.logit_lens(own, sample=3, positions=[-1]),
            "own attention": figures.attention(own, 2, sample=1),
            "induction": figures.induction(cache),
            "histograms": figures.histograms(cache, "decoder.layers.1"),
            "heat": figures.heat(cache, "blocks.1.hook_resid_post", sample=2),
        }


class Runs(NamedTuple):
    """What a module's tests share.

    Attributes:
        truth: of plain Megatron on one process.
        spread: the folder of the run with tensor and pipeline parallelism.
        one: that of one process.
        caches: what each rank of the first made of caches.
    """

    truth: Any
    spread: Path
    one: Path
    caches: list[Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("figures")
    truth = truths.once(truth_of, SPREAD.single())
    caches = run(4, record, SPREAD, truth["state"], str(folder / "spread"), ["**"], timeout=240)
    run(1, record, SPREAD.single(), truth["state"], str(folder / "one"), ["**"], timeout=240)
    return Runs(truth, folder / "spread", folder / "one", caches)


def of_truth(runs: Runs, site: str) -> Tensor:
    """`[sample, ...]` of one process, from microbatches that have samples in their second dim."""
    parts = runs.truth["values"][site]
    return torch.cat([p if site.endswith("probs") else p.transpose(0, 1) for p in parts])


def test_norms(runs: Runs) -> None:
    import megatron_flex as mf

    wanted = [float(of_truth(runs, site).double().norm()) for site in STREAM]
    spread = figures.norms(runs.spread / "dump")
    one = figures.norms(runs.one / "dump")
    measured = figures.norms(runs.spread / "statistics")
    for found in (spread, one, measured):
        assert found.sites == tuple(STREAM)
        assert found.iterations == (0, 1)
        np.testing.assert_allclose(found.values, [wanted, wanted], **CLOSE)
        assert found.counts.tolist() == [[of_truth(runs, STREAM[0]).numel()] * LAYERS] * 2
        assert not found.broken.any()
    with mf.open_dump(runs.spread / "dump") as dump:
        read = [[float(dump[site].torch()[n].double().norm()) for site in STREAM] for n in (0, 1)]
        np.testing.assert_allclose(figures.norms(dump).values, read, rtol=1e-6)
    assert_names(spread.caption, "decoder.layers.*:output", "0-1", "[s/tp, b, h]")
    assert measured.caption == spread.caption
    for cache in runs.caches:
        assert cache["norms"].sites == tuple(STREAM)
        np.testing.assert_allclose(cache["norms"].values, [wanted], **CLOSE)
        assert cache["norms"].caption == "norm of decoder.layers.*:output · [s/tp, b, h]"


def test_histograms_are_those_of_statistics(runs: Runs) -> None:
    from megatron_flex import open_statistics

    found = figures.histograms(runs.spread / "statistics", "decoder.layers.1")
    assert found.counts.tolist() == [
        list(row) for row in open_statistics(runs.spread / "statistics")[STREAM[1]].histogram
    ]
    values = of_truth(runs, STREAM[1]).double().numpy()
    inner = np.digitize(values.ravel(), np.delete(found.edges[1:-1], len(found.edges) // 2 - 1))
    assert found.counts.sum(1).tolist() == [values.size] * 2
    assert abs(np.bincount(inner, minlength=128) - np.delete(found.counts[0], 64)).sum() <= 4, (
        "but for round-off"
    )
    of_dump = figures.histograms(runs.spread / "dump", STREAM[1])
    assert (of_dump.site, of_dump.iterations) == (STREAM[1], (0, 1))
    assert np.array_equal(of_dump.counts, found.counts)
    assert np.array_equal(of_dump.edges, found.edges)
    for cache in runs.caches:
        assert abs(cache["histograms"].counts - found.counts[:1]).sum() <= 4


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention(runs: Runs, layer: int) -> None:
    wanted = of_truth(runs, PROBS[layer])
    for sample in range(len(wanted)):
        spread, one = (
            figures.attention(path / "dump", layer, iteration=1, sample=sample)
            for path in (runs.spread, runs.one)
        )
        for found in (spread, one):
            np.testing.assert_allclose(found.values, wanted[sample], **CLOSE)
            np.testing.assert_allclose(found.values.sum(-1), 1.0, **CLOSE)
            assert found.queries == found.keys == tuple(range(gpt.SEQUENCE))
    assert spread.caption == f"{PROBS[layer]} · iteration 1 · sample 3 · [b, n/tp, s, s]"
    for cache in runs.caches if layer == 2 else ():
        for name in ("attention", "own attention"):
            np.testing.assert_allclose(cache[name].values, wanted[1], **CLOSE)


def test_norms_of_tokens(runs: Runs) -> None:
    each = [of_truth(runs, site).double().norm(dim=-1).flatten() for site in STREAM]
    wanted = [
        [float(e.mean()) for e in each],
        [float(np.percentile(e, 10)) for e in each],
        [float(np.percentile(e, 90)) for e in each],
    ]
    found = figures.norms(runs.spread / "dump", tokens=True).token_norms
    assert found is not None
    np.testing.assert_allclose(found, np.array(wanted)[:, None].repeat(2, 1), **CLOSE)
    for cache in runs.caches:
        np.testing.assert_allclose(cache["token norms"].token_norms[:, 0], wanted, **CLOSE)
    assert figures.norms(runs.spread / "statistics", tokens=True).token_norms is None
    assert figures.norms(runs.spread / "dump").token_norms is None


def lens_by_hand(runs: Runs, sample: int) -> Tensor:
    """`[layer, token, vocabulary]`: probabilities, with nothing of the library."""
    state = runs.truth["state"]
    streams = torch.stack([of_truth(runs, site)[sample] for site in ("decoder.layers.0:input", *STREAM)])
    weight = state["decoder.final_layernorm.weight"]
    bias = state.get("decoder.final_layernorm.bias")
    if bias is None:
        streams = torch.nn.functional.rms_norm(streams, streams.shape[-1:], weight, 1e-5)
    else:
        streams = torch.nn.functional.layer_norm(streams, streams.shape[-1:], weight, bias, 1e-5)
    words = state.get("output_layer.weight", state["embedding.word_embeddings.weight"])
    return (streams @ words.T).softmax(-1)


def check_lens(found: figures.LogitLens, wanted: Tensor, top: int) -> None:
    best = wanted.topk(top, -1)
    assert found.layers == tuple(range(LAYERS + 1))
    np.testing.assert_allclose(found.probabilities, best.values, rtol=1e-4, atol=1e-6)
    assert float((torch.tensor(found.ids) == best.indices).double().mean()) > 0.99, (
        "but for ties in round-off"
    )


def test_logit_lens(runs: Runs) -> None:
    import megatron_flex as mf

    wanted = lens_by_hand(runs, 3)
    final = of_truth(runs, "output_layer:output")[3].softmax(-1)
    torch.testing.assert_close(wanted[-1], final, rtol=1e-4, atol=1e-6)
    for path in (runs.spread, runs.one):
        found = figures.logit_lens(path / "dump", sample=3)
        check_lens(found, wanted, 5)
        assert (found.iteration, found.tokens) == (1, tuple(range(gpt.SEQUENCE)))
    with mf.open_dump(runs.spread / "dump") as dump:
        few = figures.logit_lens(dump, 0, 3, 2, positions=slice(-4, None))
    check_lens(few, wanted[:, -4:], 2)
    assert few.tokens == (12, 13, 14, 15)
    assert_names(few.caption, "iteration 0", "sample 3", "[s/tp, b, h]")
    for cache in runs.caches:
        check_lens(cache["logit lens"], wanted, 5)
        check_lens(cache["logit lens"], cache["lens"][:, 3].softmax(-1), 5)
        last = cache["logits"][3].softmax(-1).topk(5, -1).values
        np.testing.assert_allclose(cache["logit lens"].probabilities[-1], last, rtol=1e-4, atol=1e-6)
        own = cache["own lens"]
        assert (own.layers, own.tokens) == ((1, 2, 3, 4), (15,))
        np.testing.assert_allclose(own.probabilities, cache["logit lens"].probabilities[1:, -1:], **CLOSE)


def test_entropies_and_ranks_of_the_logit_lens(runs: Runs) -> None:
    wanted = lens_by_hand(runs, 3)
    answers = wanted[-1].argmax(-1)
    following = list(range(gpt.SEQUENCE))
    found = figures.logit_lens(runs.spread / "dump", sample=3)
    chosen = figures.logit_lens(runs.spread / "dump", sample=3, targets=following)
    entropies = -(wanted * wanted.log()).sum(-1)
    np.testing.assert_allclose(found.entropies, entropies, rtol=1e-4)
    np.testing.assert_allclose(runs.caches[0]["logit lens"].entropies, entropies, rtol=1e-4)
    for lens, targets in ((found, answers), (chosen, torch.tensor(following))):
        assert lens.targets is not None
        assert lens.targets.tolist() == targets.tolist()
        own = wanted.gather(-1, targets.expand(len(wanted), -1)[..., None])
        ranks = 1 + (wanted > own).sum(-1)
        assert float((torch.tensor(lens.ranks) == ranks).double().mean()) > 0.97, "but for ties in round-off"
    assert found.ranks is not None
    assert (found.ranks[-1] == 1).all()
    assert chosen.ranks is not None
    assert chosen.ranks.max() > 10
    with raises(figures.FigureError, "targets", 2, 16):
        figures.logit_lens(runs.spread / "dump", targets=[1, 2])
    with raises(figures.FigureError, "targets", 9999):
        figures.logit_lens(runs.spread / "dump", targets=[9999] * gpt.SEQUENCE)


def test_heat(runs: Runs) -> None:
    wanted = of_truth(runs, STREAM[1])[2]
    for path in (runs.spread, runs.one):
        found = figures.heat(path / "dump", "decoder.layers.1", sample=2)
        np.testing.assert_allclose(found.values, wanted, rtol=1e-4, atol=1e-5)
        assert found.block == (1, 1)
        assert (len(found.rows), len(found.columns)) == (gpt.SEQUENCE, gpt.HIDDEN)
    small = figures.heat(runs.spread / "dump", STREAM[1], 1, 2, (6, 10))  # 16 by 3, 32 by 4
    means = [
        [float(wanted[r : r + 3, c : c + 4].abs().mean()) for c in range(0, gpt.HIDDEN, 4)]
        for r in range(0, gpt.SEQUENCE, 3)
    ]
    np.testing.assert_allclose(small.values, means, **CLOSE)
    assert (small.block, small.rows) == ((3, 4), (0, 3, 6, 9, 12, 15))
    for cache in runs.caches:
        np.testing.assert_allclose(cache["heat"].values, wanted, rtol=1e-4, atol=1e-5)


def induction_by_hand(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, from the patterns of one process."""
    out = np.zeros((2, LAYERS, gpt.HEADS))
    for layer, site in enumerate(PROBS):
        patterns = of_truth(runs, site)
        for head in range(gpt.HEADS):
            for query in range(HALF, gpt.SEQUENCE):
                for sample in patterns[:, head, query]:
                    out[0, layer, head] += float(sample[query - HALF + 1])
                    out[1, layer, head] += float(sample[query - 1])
    out /= HALF * len(patterns)
    return out[0], out[1]


def test_induction(runs: Runs) -> None:
    scores, previous = induction_by_hand(runs)
    uniform = sum(1 / (query + 1) for query in range(HALF, gpt.SEQUENCE)) / HALF
    made = [figures.induction(runs.spread / "dump"), figures.induction(runs.one / "dump", 0)]
    for found in (*made, *(cache["induction"] for cache in runs.caches)):
        assert found.layers == tuple(range(LAYERS))
        np.testing.assert_allclose(found.scores, scores, **CLOSE)
        np.testing.assert_allclose(found.previous, previous, **CLOSE)
        assert found.uniform == pytest.approx(uniform)
    for cache in runs.caches:  # by the formula of the field, on the cache's own stack
        half = cache["patterns"][..., HALF:, :]
        np.testing.assert_allclose(cache["induction"].scores, half.diagonal(1, -2, -1).mean((1, -1)), **CLOSE)


def test_divergence(runs: Runs, tmp_path: Path) -> None:
    from megatron_flex.compare import compare

    same = figures.divergence(compare(runs.one / "dump", runs.spread / "dump"))
    assert same.first is None
    state = {n: t.clone() for n, t in runs.truth["state"].items()}
    state["decoder.layers.2.mlp.linear_fc2.weight"] *= 1.1
    run(1, record, SPREAD.single(), state, str(tmp_path), ["decoder.final_layernorm.weight"])
    comparison = compare(runs.spread / "dump", tmp_path / "dump")
    found = figures.divergence(comparison)
    assert comparison.first is not None
    assert found.first == (comparison.first.name, comparison.first.iteration) == (STREAM[2], 0)
    for row in comparison.rows:
        at = found.iterations.index(row.iteration), found.sites.index(row.name)
        assert (found.errors[at], found.tolerances[at]) == (row.error, row.tolerance)
    assert list(found.sites) == list(dict.fromkeys(row.name for row in comparison.rows))
    assert_names(found.caption, STREAM[2], "iteration 0")
    with raises(FigureError, "output_layer.weight"):
        figures.logit_lens(tmp_path / "dump")


def test_logit_lens_of_tied_embeddings_with_a_layer_norm(tmp_path: Path) -> None:
    truth = truths.once(truth_of, TIED.single())
    runs = Runs(truth, tmp_path, tmp_path, [])
    wanted = lens_by_hand(runs, 1)
    caches = run(4, record, TIED, truth["state"], str(tmp_path / "all"), ["**"], timeout=240)
    check_lens(figures.logit_lens(tmp_path / "all" / "dump", sample=1), wanted, 5)
    for cache in caches:
        check_lens(cache["logit lens"], lens_by_hand(runs, 3), 5)
    few = ["decoder.final_layernorm.*", "embedding.word_embeddings.weight"]
    run(4, record, TIED, truth["state"], str(tmp_path / "few"), few, timeout=240)
    with raises(FigureError, "output_layer.weight", "tied=True"):
        figures.logit_lens(tmp_path / "few" / "dump")
    check_lens(figures.logit_lens(tmp_path / "few" / "dump", sample=1, tied=True), wanted, 5)
    named = ["decoder.final_layernorm.*", "output_layer.weight"]  # which is a copy, of the embeddings
    run(4, record, TIED, truth["state"], str(tmp_path / "named"), named, timeout=240)
    check_lens(figures.logit_lens(tmp_path / "named" / "dump", sample=1), wanted, 5)


def test_padding_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training", reason="the number of tokens is megatron.training's to know")
    real, case = 45, replace(SPREAD, tp=4, pp=1, groups=4)
    truth = truths.once(truth_of, case.single())
    truth["state"]["output_layer.weight"][real:] *= 30  # logits of padding that would drown all others
    caches = run(4, record, case, truth["state"], str(tmp_path), ["**"], real, timeout=240)
    runs = Runs(truth, tmp_path, tmp_path, [])
    truth["state"]["output_layer.weight"] = truth["state"]["output_layer.weight"][:real]
    check_lens(figures.logit_lens(tmp_path / "dump", sample=3), lens_by_hand(runs, 3), 5)
    for cache in caches:
        check_lens(cache["logit lens"], lens_by_hand(runs, 3), 5)


def test_the_page_on_plots_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    dumped, drawn, cached, numbers = blocks(ROOT / "docs" / "view.md")
    folder = f"folder = {str(tmp_path / 'dump')!r}\n"
    run(4, execute, folder + dumped)
    printed: list[str] = []
    names = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    exec(folder + drawn, names)
    exec(folder + numbers, names)
    caption = "norm of decoder.layers.*:output · iterations 0-1 · [s/tp, b, h]"
    lens = f"(0, 1, 2, 3, 4) {(5, gpt.SEQUENCE, 3)}"
    assert printed == [caption, f"{tuple(STREAM)} (0, 1) (2, 4)", lens]
    answers = run(4, execute, folder + cached, alone=True)  # matplotlib keeps its fonts open
    assert all("mean over 2 samples · [b, n/tp, s, s]" in answer[0].replace("\n", " ") for answer in answers)
    pictures = ("attention", "lens", "histograms", "heat", "divergence", "induction")
    assert all((tmp_path / "dump" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in pictures)
