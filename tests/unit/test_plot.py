"""Plots show the numbers of figures, whole captions and plain text, and know nothing of pyplot."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import megatron_flex as mf
from megatron_flex.figures import Attention, Divergence, Heat, Histograms, Induction, LogitLens, Norms
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, compute_bin_edges

pytest.importorskip("matplotlib")

LONG = (
    "decoder.layers.*.self_attention.core_attention:probs · iterations 0-90:10 · sample 3 · [s, b, h] · "
    "s over cp (zigzag) then tp"
)
AWKWARD = "blocks.$x^{2}$.<b>_a_</b>:output"


GENERATOR = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return GENERATOR.random(shape)


def stream(layers: int = 4, iterations: int = 3, template: str = "decoder.layers.{}:output") -> Norms:
    sites = tuple(template.format(n) for n in range(layers))
    values = 1 + random(iterations, layers)
    zeros = np.zeros(values.shape, int)
    return Norms(sites, tuple(range(0, 10 * iterations, 10)), values, zeros + 4, zeros, LONG)


def patterns(heads: int = 6, tokens: int = 8) -> Attention:
    places = tuple(range(tokens))
    return Attention(3, 7, random(heads, tokens, tokens), places, places, LONG)


def scores(layers: int = 4, heads: int = 8) -> Induction:
    return Induction(tuple(range(layers)), random(layers, heads), random(layers, heads), 0.05, 0, LONG)


def guesses(layers: int = 5, tokens: int = 16) -> LogitLens:
    ids = np.arange(layers * tokens).reshape(layers, tokens, 1)
    return LogitLens(
        tuple(range(layers)), tuple(range(4, 4 + tokens)), ids, random(layers, tokens, 1), 0, LONG
    )


def spread(iterations: int = 5) -> Histograms:
    counts = np.zeros((iterations, 2 * BINS_PER_SIGN + 1), int)
    for n in range(iterations):
        counts[n, BINS_PER_SIGN] = 3
        counts[n, BINS_PER_SIGN + 30 : BINS_PER_SIGN + 42] = range(1 + n, 13 + n)
        counts[n, BINS_PER_SIGN - 41 : BINS_PER_SIGN - 33] = range(8)
    return Histograms(
        "decoder.layers.0:output", tuple(range(iterations)), np.array(compute_bin_edges()), counts, LONG
    )


def apart(sites: int = 30) -> Divergence:
    errors = 1e-7 * (1 + random(2, sites))
    errors[:, : sites // 4] = 0
    errors[1, sites // 2 :] = 0.3
    errors[1, -1] = math.inf
    errors[0, -1] = math.nan
    names = tuple(f"decoder.layers.{n // 3}.mlp.linear_fc{n % 3}:output" for n in range(sites))
    return Divergence(names, (0, 1), errors, np.full((2, sites), 1e-5), (names[sites // 2], 1), LONG)


def tile(rows: int = 12, columns: int = 40, block: tuple[int, int] = (1, 1)) -> Heat:
    places, numbers = (
        tuple(range(0, rows * block[0], block[0])),
        tuple(range(0, columns * block[1], block[1])),
    )
    return Heat("decoder.layers.0:output", 2, random(rows, columns) - 0.5, places, numbers, block, LONG)


ALL: dict[str, Callable[[], Any]] = {
    "attention": lambda: mf.plot.attention(patterns()),
    "attention of one head": lambda: mf.plot.attention(patterns(), heads=[2]),
    "attention with tokens": lambda: mf.plot.attention(
        patterns(), tokens=range(8), tokenizer=lambda i: f" word{i}"
    ),
    "norms": lambda: mf.plot.norms(stream()),
    "norms of one site": lambda: mf.plot.norms(stream(1)),
    "norms of many": lambda: mf.plot.norms(stream(96), rms=True),
    "norms of long names": lambda: mf.plot.norms(
        stream(3, template="model.blocks.{}.a_rather_long_name:output")
    ),
    "logit lens": lambda: mf.plot.logit_lens(guesses(), tokenizer=lambda i: f"token{i}"),
    "logit lens of much": lambda: mf.plot.logit_lens(guesses(24, 60)),
    "histograms": lambda: mf.plot.histograms(spread()),
    "histograms of one": lambda: mf.plot.histograms(spread(1)),
    "histograms of many": lambda: mf.plot.histograms(spread(100)),
    "divergence": lambda: mf.plot.divergence(apart()),
    "divergence of many": lambda: mf.plot.divergence(apart(300)),
    "induction": lambda: mf.plot.induction(scores()),
    "induction of many": lambda: mf.plot.induction(scores(32, 24)),
    "heat": lambda: mf.plot.heat(tile()),
    "heat of blocks": lambda: mf.plot.heat(tile(block=(4, 2))),
}


def texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


@pytest.mark.parametrize("name", ALL)
def test_captions_and_labels_are_whole_and_apart(name: str) -> None:
    figure = ALL[name]()
    figure.draw_without_rendering()
    caption = figure.get_supxlabel()
    assert caption.replace("\n", " ").startswith(LONG)
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            seen = [
                tick for tick in axis.get_major_ticks() if within(tick.get_loc(), axis.get_view_interval())
            ]
            unseen |= {t for t in axis.get_ticklabels() if t not in {tick.label1 for tick in seen}}
            labels = [t.label1 for t in seen if t.label1.get_visible() and t.label1.get_text()]
            boxes = [t.get_window_extent() for t in labels if t.get_rotation() in (0, 90)]
            along = sorted((b.x0, b.x1) if axis is axes.xaxis else (b.y0, b.y1) for b in boxes)
            crossed = [(a, b) for a, b in itertools.pairwise(along) if a[1] > b[0] + 3]
            assert not crossed, [t.get_text() for t in labels]
    width, height = figure.bbox.width, figure.bbox.height
    outside = []
    for text in texts(figure):
        box = text.get_window_extent()
        whole = box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1
        if not whole and text not in unseen:
            outside.append((text.get_text(), box.extents.round()))
    assert not outside, f"of {width} x {height}"


def within(place: float, interval: Any) -> bool:
    return bool(min(interval) <= place <= max(interval))


def image(axes: Any) -> np.ndarray:
    return np.asarray(axes.get_images()[0].get_array())


def test_images_are_the_numbers() -> None:
    made = patterns()
    figure = mf.plot.attention(made, heads=[4, 0])
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["head 4", "head 0"]
    assert np.array_equal(image(panels[0]), made.values[4])
    assert np.array_equal(image(panels[1]), made.values[0])
    made_scores = scores()
    first, second = mf.plot.induction(made_scores).axes[:2]
    assert np.array_equal(image(first), made_scores.scores)
    assert np.array_equal(image(second), made_scores.previous)
    written = [t.get_text() for t in first.texts]
    assert written == [f"{v:.2f}" for v in made_scores.scores.ravel()]
    lens = guesses()
    axes = mf.plot.logit_lens(lens, tokenizer=lambda i: f"<{i}>").axes[0]
    assert np.array_equal(image(axes), lens.probabilities[:, :, 0])
    assert [t.get_text() for t in axes.texts] == [f"<{i}>" for i in lens.ids.ravel()]
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "embeddings",
        *(f"layer {n} output" for n in range(4)),
    ]
    signed, blocks = (mf.plot.heat(tile(block=b)).axes[0].get_images()[0] for b in ((1, 1), (4, 2)))
    assert signed.get_clim()[0] == -signed.get_clim()[1], "zero is in the middle of the colors"
    assert blocks.get_clim()[0] == 0


def test_curves_are_the_numbers() -> None:
    made = stream()
    lines = mf.plot.norms(made).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == made.values.tolist()
    lines = mf.plot.norms(made, rms=True).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == (made.values / 2).tolist()
    one = stream(1)
    (line,) = mf.plot.norms(one).axes[0].get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 10, 20], one.values[:, 0].tolist())


def test_ridges_are_the_shares_of_bins() -> None:
    made = spread(3)
    figure = mf.plot.histograms(made)
    axes = figure.axes[0]
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels[len(labels) // 2] == "0"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "1", "2"]
    ridges = [line.get_ydata() + depth for depth, line in enumerate(axes.get_lines())]
    for ridge, counts in zip(ridges, made.counts, strict=True):
        there = counts[BINS_PER_SIGN - 42 : BINS_PER_SIGN + 43]
        middle = len(ridge) // 2
        assert ridge[middle] / ridge.sum() == pytest.approx(3 / counts.sum())
        drawn, wanted = ridge / ridge.sum(), counts / counts.sum()
        assert drawn[drawn > 1e-12] == pytest.approx(wanted[wanted > 0])
        assert there.sum() == counts.sum()


def test_broken_values_are_marked() -> None:
    made = stream()
    made.values[1, 2] = math.nan
    made.broken[1, 2] = 5
    axes = mf.plot.norms(made).axes[0]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["NaNs or infinities"]
    (mark,) = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([2], [0.0])


def test_the_first_divergence_is_marked() -> None:
    made = apart()
    axes = mf.plot.divergence(made).axes[0]
    assert f"first: {made.sites[15]}" in [t.get_text() for t in axes.texts]
    red = [line for line in axes.get_lines() if line.get_label() == "above tolerance"]
    assert [list(line.get_xdata()) for line in red] == [list(range(15, 30))]
    curves = [line.get_ydata() for line in axes.get_lines()[:2]]
    low, high = axes.get_ylim()
    assert all(low < y < high for curve in curves for y in curve if not math.isnan(y)), (
        "zeros and infinities too"
    )
    assert list(curves[0][7:-1]) == made.errors[0, 7:-1].tolist()


def test_names_are_text_and_not_mathematics() -> None:
    made = tile()
    made = Heat(AWKWARD, 0, made.values, made.rows, made.columns, (1, 1), f"{AWKWARD} · iteration 0")
    figure = mf.plot.heat(made, tokens=range(12), tokenizer=lambda i: "$a^b$\n")
    figure.draw_without_rendering()
    shown = [t for t in texts(figure) if "$" in t.get_text()]
    assert len(shown) > 12
    assert not any(t.get_parse_math() for t in shown)
    assert "$a^b$⏎" in [t.get_text() for t in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mf.plot.attention(patterns(), heads=[6]), "layer 3 has heads 0 to 5; 6 is none of them"),
        (lambda: mf.plot.attention(patterns(), heads=[]), "layer 3 has heads 0 to 5; none was named"),
        (
            lambda: mf.plot.attention(patterns(), tokens=[1, 2]),
            "tokens has 2 of the sample's, and position 7 is drawn",
        ),
        (
            lambda: mf.plot.histograms(
                Histograms("x", (0,), np.array(compute_bin_edges()), np.zeros((1, 129)), "")
            ),
            "x: no finite",
        ),
    ],
)
def test_bad_input_is_one_line(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(mf.FlexError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(mf.FlexError, match=r"^plots need matplotlib: pip install megatron-flex\[plot\]$"):
        mf.plot.norms(stream())


def test_pyplot_stays_out_and_matplotlib_waits() -> None:
    code = (
        "import io, sys, megatron_flex as mf\n"
        "assert not {'megatron_flex.plot', 'megatron_flex.figures'} & set(sys.modules)\n"
        "mf.plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import numpy as np\n"
        "made = mf.figures.Heat('a', 0, np.eye(3), (0, 1, 2), (0, 1, 2), (1, 1), 'b')\n"
        "mf.plot.heat(made).savefig(io.BytesIO())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
