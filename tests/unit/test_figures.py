"""Figures of dumps and statistics that are made by hand, and what they say where something is lacking."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_flex as mf
from megatron_flex import figures
from megatron_flex.figures import FigureError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.statistics.statistics_records import TensorStatistics
from tests.support.dumps import COLUMN, NORM, SEQUENCE, Given, sealed_again, write
from tests.support.messages import assert_names, raises

SCORES = Layout((Dim("b"), Dim("n", (Cut("tp"),)), Dim("s"), Dim("s")))
MODEL = {"normalization": "RMSNorm", "layernorm_epsilon": 1e-5}
SITE = "decoder.layers.0:output"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norms_count_what_is_broken(tmp_path: Path) -> None:
    value = random(2, 4, 8, 6)
    value[1, 2, 3] = math.nan
    value[1, 0, 0, 0] = math.inf
    write(tmp_path, {SITE: Given(value, SEQUENCE)}, mesh={"tp": 2, "dp": 2})
    found = figures.norms(tmp_path)
    good = value[1][value[1].isfinite()]
    np.testing.assert_allclose(found.values[:, 0], [float(value[0].norm()), float(good.norm())], rtol=1e-6)
    assert found.counts.tolist() == [[192], [192 - 7]]
    assert found.broken.tolist() == [[0], [7]]


def test_iterations_that_lack_a_tensor_are_blank(tmp_path: Path) -> None:
    write(tmp_path / "a", {SITE: Given(random(2, 2, 4, 6))}, iterations=[3, 5])
    assert figures.norms(tmp_path / "a", SITE).iterations == (3, 5)
    rows = [
        measured(1, "decoder.layers.0:output", 2.0),
        measured(1, "decoder.layers.1:output", 3.0),
        measured(2, "decoder.layers.1:output", None),
    ]
    found = figures.norms(statistics(rows))
    assert found.sites == ("decoder.layers.0:output", "decoder.layers.1:output")
    assert np.array_equal(found.values, [[2.0, 3.0], [math.nan, math.nan]], equal_nan=True)
    assert found.counts.tolist() == [[10, 10], [0, 0]]
    assert found.broken.tolist() == [[0, 0], [0, 10]]


def measured(
    iteration: int, site: str, norm: float | None, histogram: tuple[int, ...] = ()
) -> TensorStatistics:
    numbers: Any = dict.fromkeys(("mean", "std", "rms", "absmax", "zeros", "kurtosis"), 0.0)
    nans = 10 if norm is None else 0
    order = int(site.split(".")[2][0])
    return TensorStatistics(
        iteration=iteration,
        site=site,
        kind="value",
        order=order,
        stage=0,
        count=10,
        norm=norm,
        nans=nans,
        infinities=0,
        histogram=histogram,
        microbatches=1,
        **numbers,
    )


def statistics(rows: list[TensorStatistics]) -> Any:
    from megatron_flex.statistics.statistics_reader import OpenStatistics

    table: dict[int, dict[str, TensorStatistics]] = {}
    for row in rows:
        table.setdefault(row.iteration, {})[row.site] = row
    return OpenStatistics(Path("measured"), [], table, 0)


def test_what_statistics_lack(tmp_path: Path) -> None:
    source = statistics([measured(1, SITE, 2.0)])
    with raises(FigureError, "decoder.layers.0:output", "histogram=True"):
        figures.histograms(source, SITE)
    for make in (figures.logit_lens, figures.induction, lambda s: figures.attention(s, 0)):
        with raises(FigureError, "mf.Dump", "flex.interp.run_with_cache"):
            make(source)
    with raises(FigureError, "decoder.layer.0", "decoder.layers.0:output"):
        figures.norms(source, "decoder.layer.0")


def test_histograms_hold_each_value_once(tmp_path: Path) -> None:
    value = torch.tensor([[-3.0, -1.0, -0.5, 0.0, 0.0, 0.5], [1.0, 1.9, 2.0, 1e-30, 1e30, -1e-9]]).view(
        1, 1, 2, 6
    )
    write(tmp_path, {SITE: Given(value)})
    found = figures.histograms(tmp_path, "decoder.layers.0")
    told = {(found.edges[n], found.edges[n + 1]): int(c) for n, c in enumerate(found.counts[0]) if c}
    least, most = 2.0**-39, 2.0**23
    assert told == {
        (-4.0, -2.0): 1,
        (-2.0, -1.0): 1,
        (-1.0, -0.5): 1,
        (-(2.0**-29), -(2.0**-30)): 1,
        (0.0, 0.0): 2,
        (0.0, least): 1,
        (0.5, 1.0): 1,
        (1.0, 2.0): 2,
        (2.0, 4.0): 1,
        (most, math.inf): 1,
    }
    assert found.counts.sum() == 12
    assert found.counts[0][64] == 2


def test_a_heat_map_of_more_than_is_drawn(tmp_path: Path) -> None:
    value = random(1, 2, 8, 10)
    write(tmp_path, {SITE: Given(value, COLUMN)}, mesh={"tp": 2})
    found = figures.heat(tmp_path, SITE, sample=1, most=(3, 4))
    assert (found.block, found.rows, found.columns) == ((3, 3), (0, 3, 6), (0, 3, 6, 9))
    for i, row in enumerate(found.rows):
        for j, column in enumerate(found.columns):
            wanted = value[0, 1, row : row + 3, column : column + 3].abs().mean()
            assert found.values[i, j] == pytest.approx(float(wanted), rel=1e-5)
    assert_names(found.caption, SITE, "3 x 3", "|x|")
    whole = figures.heat(tmp_path, SITE, sample=1)
    assert np.array_equal(whole.values, value[0, 1])
    assert whole.caption == f"{SITE} · iteration 0 · sample 1 · [s, b, 4h/tp]"


def test_tokens_and_samples_that_were_picked_keep_their_numbers(tmp_path: Path) -> None:
    value = random(1, 4, 8, 6)
    write(tmp_path, {SITE: Given(value)}, tokens=slice(1, None, 3), samples=[1, 3])
    found = figures.heat(tmp_path, SITE, sample=1)
    assert found.rows == (1, 4, 7)
    assert "sample 3" in found.caption
    assert np.array_equal(found.values, value[0, 3, 1::3])
    with raises(FigureError, SITE, "0", "1", "2"):
        figures.heat(tmp_path, SITE, sample=2)


def test_what_a_dump_lacks(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "decoder.layers.0:output": Given(random(1, 2, 4, 6)),
            "decoder.layers.1:output": Given(random(1, 2, 4, 6)),
        },
    )
    with raises(
        FigureError,
        tmp_path,
        "decoder.layers.*.self_attention.core_attention:probs",
        "mf.Dump",
    ):
        figures.attention(tmp_path, 0)
    with raises(FigureError, "decoder.layers.*.self_attention.core_attention:probs", "--transformer-impl"):
        figures.induction(tmp_path)
    with raises(FigureError, tmp_path, "synthetic", "flex.interp.run_with_cache"):
        figures.logit_lens(tmp_path)
    with raises(FigureError, "decoder.layers.*", "2", "decoder.layers.0:output", "decoder.layers.1:output"):
        figures.histograms(tmp_path, "decoder.layers.*")
    with raises(FigureError, SITE, "0", "1", "7"):
        figures.heat(tmp_path, SITE, 7)
    with raises(mf.DumpError, tmp_path / "nothing"):
        figures.norms(tmp_path / "nothing")


def test_a_tensor_without_tokens_has_no_heat(tmp_path: Path) -> None:
    write(tmp_path, {SITE: Given(random(1, 1, 6), NORM)})
    with raises(FigureError, tmp_path, "decoder.layers.0:output", "microbatch", "h"):
        figures.heat(tmp_path, SITE)


def probs(tokens: int, heads: int = 2) -> torch.Tensor:
    """`[iteration, sample, token, head, key]`, causal."""
    scores = random(1, 3, tokens, heads, tokens)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return scores.masked_fill(later[:, None], -math.inf).softmax(-1)


NAME = "decoder.layers.5.self_attention.core_attention:probs"


def test_attention_of_another_layer_and_odd_sequences(tmp_path: Path) -> None:
    write(tmp_path, {NAME: Given(probs(5), SCORES)})
    with raises(FigureError, tmp_path, "5", "4"):
        figures.attention(tmp_path, 4)
    with raises(FigureError, "5", NAME):
        figures.induction(tmp_path)
    np.testing.assert_allclose(
        figures.attention(tmp_path, 5, sample=2).values, probs(5)[0, 2].transpose(0, 1)
    )


def test_what_is_not_repeated_has_no_induction_scores(tmp_path: Path) -> None:
    words, half = "embedding.word_embeddings:output", random(1, 3, 3, 4)
    write(tmp_path / "good", {words: Given(torch.cat([half, half], 2)), NAME: Given(probs(6), SCORES)})
    assert figures.induction(tmp_path / "good").layers == (5,)
    write(tmp_path / "bad", {words: Given(random(1, 3, 6, 4)), NAME: Given(probs(6), SCORES)})
    with raises(FigureError, tmp_path / "bad", 0, "torch.cat"):
        figures.induction(tmp_path / "bad")


def tell(path: Path, model: dict[str, Any]) -> None:
    """Let the manifest tell a model's config."""
    import json

    (file,) = path.glob("run-*/manifest.json")
    told = json.loads(file.read_text())
    file.write_bytes(sealed_again(json.dumps({**told, "model": model}).encode()))


def row(name: str, iteration: int, error: float, tolerance: float = 1e-5) -> Any:
    return SimpleNamespace(name=name, iteration=iteration, error=error, tolerance=tolerance)


def comparison(*rows: Any) -> Any:
    first = next((r for r in rows if not r.error <= r.tolerance), None)
    return SimpleNamespace(a="one", b="two", rows=rows, first=first)


def test_divergence_of_iterations_that_differ_in_sites() -> None:
    found = figures.divergence(
        comparison(row("a", 4, 0.0), row("b", 4, 1e-6), row("a", 6, math.inf), row("c", 6, 0.5))
    )
    assert (found.sites, found.iterations, found.first) == (("a", "b", "c"), (4, 6), ("a", 6))
    assert np.array_equal(found.errors, [[0, 1e-6, math.nan], [math.inf, math.nan, 0.5]], equal_nan=True)
    with raises(FigureError, "one", "two"):
        figures.divergence(comparison())
