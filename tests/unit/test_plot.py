"""Plots show the numbers of figures, whole captions and plain text, and know nothing of pyplot."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import megatron_flex as mf
from megatron_flex.figures import Attention, Divergence, Heat, Histograms, Induction, LogitLens, Norms
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, compute_bin_edges
from tests.support.messages import assert_names, raises

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


def of_tokens(layers: int = 4, iterations: int = 3) -> Norms:
    made = stream(layers, iterations)
    mean = 5 + random(iterations, layers)
    return replace(made, token_norms=np.stack([mean, mean - 2, mean + 3]))


def patterns(heads: int = 6, tokens: int = 8) -> Attention:
    places = tuple(range(tokens))
    return Attention(3, 7, random(heads, tokens, tokens), places, places, LONG)


def scores(layers: int = 4, heads: int = 8) -> Induction:
    return Induction(tuple(range(layers)), random(layers, heads), random(layers, heads), 0.05, 0, LONG)


def guesses(layers: int = 5, tokens: int = 16) -> LogitLens:
    ids = np.arange(layers * tokens).reshape(layers, tokens, 1)
    places, ranks = tuple(range(4, 4 + tokens)), 1 + np.arange(layers * tokens)[::-1].reshape(layers, tokens)
    probabilities, entropies = random(layers, tokens, 1), random(layers, tokens)
    return LogitLens(
        tuple(range(layers)), places, ids, probabilities, 0, LONG, entropies, ranks, ids[-1, :, 0]
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
    "logit lens by rank": lambda: mf.plot.logit_lens(guesses(), show="rank"),
    "logit lens by entropy": lambda: mf.plot.logit_lens(guesses(24, 30), show="entropy"),
    "norms of tokens": lambda: mf.plot.norms(of_tokens()),
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
    assert np.array_equal(image(first), made_scores.scores / made_scores.uniform)
    assert np.array_equal(image(second), made_scores.previous / made_scores.uniform)
    written = [t.get_text() for t in first.texts]
    assert written == [f"{v / 0.05:.1f}" for v in made_scores.scores.ravel()]
    lens = guesses()
    axes = mf.plot.logit_lens(lens, tokenizer=lambda i: f"<{i}>").axes[0]
    assert np.array_equal(image(axes), lens.probabilities[:, :, 0])
    assert [t.get_text() for t in axes.texts] == [f"<{i}>" for i in lens.ids.ravel()]
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "embeddings",
        *(f"layer {n} output" for n in range(4)),
    ]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "downwards, as a table prints them"
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


def bell(iterations: int = 3) -> tuple[Histograms, np.ndarray]:
    """Histograms of normal numbers and some zeros, and the numbers."""
    edges = np.array(compute_bin_edges())
    numbers = np.random.default_rng(1).normal(size=(iterations, 20_000))
    numbers[:, :500] = 0
    inner = np.array([0.0, *(-e for e in edges[1:BINS_PER_SIGN][::-1])])  # magnitudes, ascending
    counts = []
    for row in numbers:
        up, down = (np.histogram(sign * row[sign * row > 0], [*inner, np.inf])[0] for sign in (1, -1))
        counts.append([*down[::-1], (row == 0).sum(), *up])
    return Histograms("x:output", tuple(range(iterations)), edges, np.array(counts), LONG), numbers


def ridge(axes: Any, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Heights of a ridge above its base, and the places of its edges."""
    from matplotlib.patches import StepPatch

    filled = [p for p in axes.patches if isinstance(p, StepPatch) and p.get_fill()]
    values, edges, base = filled[depth].get_data()
    return np.asarray(values) - base, np.asarray(edges)


def test_ridges_are_densities_without_an_empty_middle() -> None:
    made, numbers = bell()
    axes = mf.plot.histograms(made).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "1", "2"]
    linear = 2.0  # the power of two that has nine of ten normal numbers below it
    for depth, row in enumerate(numbers):
        heights, edges = ridge(axes, depth)
        low, high = edges[:-1], edges[1:]
        inside = (low >= -1) & (high <= 1)
        wanted = [((row / linear > a) & (row / linear <= b) & (row != 0)).sum() / (b - a)
                  for a, b in zip(low[inside], high[inside], strict=True)]  # fmt: skip
        assert heights[inside] / heights[inside].sum() == pytest.approx(
            np.array(wanted) / sum(wanted), rel=0.02
        )
        assert ((heights * (high - low)).sum()) > 0
        middle = heights[(low < 0.1) & (high > -0.1)]
        assert middle.min() > 0.8 * heights.max(), "the density is greatest around zero"
    assert [t.get_text() for t in axes.texts] == [" 2.5 % zeros"] * 3
    assert axes.get_xticks().tolist()[:1] < [-1]
    labels = dict(
        zip(axes.get_xticks().tolist(), (t.get_text() for t in axes.get_xticklabels()), strict=True)
    )
    assert (labels[0.0], labels[1.0], labels[-1.0]) == ("0", "$2^{1}$", "$-2^{1}$")


def test_every_value_is_in_a_ridge() -> None:
    made = spread(3)
    axes = mf.plot.histograms(made).axes[0]
    scales = set()
    for depth, counts in enumerate(made.counts):
        heights, edges = ridge(axes, depth)
        there = counts.sum() - counts[BINS_PER_SIGN]
        scales.add(round((heights * np.diff(edges)).sum(), 9))
        assert there > 0
    assert len(scales) == 1, "each ridge has the same area: all values but the zeros"


def test_broken_values_are_marked() -> None:
    made = stream()
    made.values[1, 2] = math.nan
    made.broken[1, 2] = 5
    axes = mf.plot.norms(made).axes[0]
    assert len(axes.get_legend().get_texts()) == 1
    (mark,) = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([2], [0.0])


def test_divergence_is_by_layer_with_a_series_for_each_kind() -> None:
    made = apart()
    axes = mf.plot.divergence(made).axes[0]
    series = {line.get_label(): line for line in axes.get_lines() if ":output" in str(line.get_label())}
    assert sorted(series) == [f"mlp.linear_fc{n}:output" for n in range(3)]
    assert [t.get_text() for t in axes.get_xticklabels()] == [str(n) for n in range(10)]
    low, high = axes.get_ylim()
    for kind, line in series.items():
        own = [n for n, name in enumerate(made.sites) if name.endswith(kind)]
        assert list(line.get_xdata()) == [n // 3 for n in own]
        drawn = line.get_ydata()
        assert all(low < y < high for y in drawn)
        finite = [k for k, n in enumerate(own) if 0 < made.errors[1, n] < math.inf]
        assert [drawn[k] for k in finite] == [made.errors[1, own[k]] for k in finite]
    marks = {t.get_text(): y for t, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    equal = [series["mlp.linear_fc0:output"].get_ydata()[0], series["mlp.linear_fc1:output"].get_ydata()[0]]
    assert equal == [marks["equal"]] * 2, "errors of zero are at the floor, which is labelled"
    assert series["mlp.linear_fc2:output"].get_ydata()[-1] == marks["NaN"]


def test_the_first_divergence_is_marked() -> None:
    made = apart()
    axes = mf.plot.divergence(made).axes[0]
    assert f"first: {made.sites[15]}" in [t.get_text() for t in axes.texts]
    (over,) = [line for line in axes.get_lines() if line.get_label() == "above its own tolerance"]
    assert list(over.get_xdata()) == [n // 3 for n in range(15, 30)]
    earlier = mf.plot.divergence(made, iteration=0).axes[0]
    assert not [t for t in earlier.texts if t.get_text().startswith("first")]
    with raises(mf.FlexError, 7, "0, 1"):
        mf.plot.divergence(made, iteration=7)


def test_what_is_outside_of_layers_is_at_the_ends_and_few_kinds_are_named() -> None:
    kinds = [f"decoder.layers.{n}.kind{k}:output" for n in range(2) for k in range(14)]
    sites = ("embedding:output", *kinds, "output_layer:output", "loss:output")
    errors = np.full((1, len(sites)), 1e-7)
    errors[0, sites.index("decoder.layers.1.kind13:output")] = 1e-3
    made = Divergence(sites, (4,), errors, np.full(errors.shape, 1e-5), (kinds[-1], 4), LONG)
    axes = mf.plot.divergence(made).axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["before", "0", "1", "after"]
    named = [t.get_text() for t in axes.get_legend().get_texts()]
    assert named[0] == "kind13:output"
    assert "7 other kinds" in named
    looks = [
        (line.get_color(), line.get_marker()) for line in axes.get_lines() if line.get_label() in named[:10]
    ]
    assert len(set(looks)) == len(looks) == 10, "no two kinds look alike"


def test_the_best_head_is_framed_and_named_in_multiples_of_chance() -> None:
    made = scores()
    for axes, values in zip(mf.plot.induction(made).axes, (made.scores, made.previous), strict=False):
        layer, head = np.unravel_index(values.argmax(), values.shape)
        (frame,) = [p for p in axes.patches if p.get_label() == "best"]
        assert (
            frame.get_x() + frame.get_width() / 2,
            frame.get_y() + frame.get_height() / 2,
        ) == pytest.approx((head, layer))
        assert_names(axes.get_title(), f"layer {layer}", f"head {head}", f"{values.max() / 0.05:.1f}×")


def test_ranks_and_entropies_are_the_numbers() -> None:
    lens = guesses()
    ranks = mf.plot.logit_lens(lens, show="rank")
    assert np.array_equal(image(ranks.axes[0]), lens.ranks)
    assert [t.get_text() for t in ranks.axes[0].texts] == [str(r) for r in lens.ranks.ravel()]
    assert ranks.get_suptitle()
    entropies = mf.plot.logit_lens(lens, show="entropy").axes[0]
    assert np.array_equal(image(entropies), lens.entropies)
    with raises(mf.FlexError, "show='loss'", "probability", "entropy"):
        mf.plot.logit_lens(lens, show="loss")  # type: ignore[arg-type]
    with raises(mf.FlexError, "figures.logit_lens"):
        mf.plot.logit_lens(replace(lens, ranks=None), show="rank")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"\xe8", "\\xe8"),
        ("<0xE8>", "\\xe8"),
        (b"a", "a"),
        (b"\n", "⏎"),
        (b"\x1b", "\\x1b"),
        ("\x0b", "\\x0b"),
        (b"\xc3\xa9", "é"),
        ("Ġthe", "␣the"),
        ("▁the", "␣the"),
        ("\u200b", "\\u200b"),
        ("a rather long one", "a␣rather…"),
    ],
)
def test_tokens_and_bytes_are_shown_as_they_are(text: str | bytes, shown: str) -> None:
    from matplotlib.figure import Figure

    figure = mf.plot.logit_lens(guesses(1, 1), tokens=[0] * 5, tokenizer=lambda _: text)
    assert isinstance(figure, Figure)
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == [shown]


def test_norms_have_the_mean_token_and_a_band() -> None:
    made = of_tokens()
    assert made.token_norms is not None
    axes = mf.plot.norms(made).axes[0]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == made.token_norms[0].tolist()
    (band,) = axes.collections
    outline = band.get_paths()[0].vertices
    for n in range(4):
        ends = outline[outline[:, 0] == n][:, 1]
        assert (ends.min(), ends.max()) == pytest.approx(
            (made.token_norms[1, -1, n], made.token_norms[2, -1, n])
        )
    (legend,) = axes.get_legend().get_texts()
    assert_names(legend.get_text(), "10th", "90th")
    labels = [p.axes[0].get_ylabel() for p in (mf.plot.norms(made, rms=True), mf.plot.norms(stream()))]
    assert labels[0] == "RMS"
    assert len({axes.get_ylabel(), *labels}) == 3, "of a token and of the full tensor"


def test_attention_names_its_scale_and_takes_tokens() -> None:
    figure = ALL["attention with tokens"]()
    bar = figure.axes[-1]
    assert (bar.get_ylabel() != "", figure.axes[0].images[0].norm.gamma) == (True, 0.5)
    assert [t.get_text() for t in figure.axes[4].get_xticklabels()] == [f"␣word{n}" for n in range(8)]


def test_all_plots_have_one_style() -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "figure.dpi": 72, "lines.linewidth": 9}):
        for name, make in ALL.items():
            figure = make()
            assert figure.dpi == 150, name
            for axes in figure.axes:
                sizes = {t.get_fontsize() for t in (*axes.texts, axes.title, axes.xaxis.label)}
                assert all(5 <= size <= 9 for size in sizes), name
                assert not axes.spines["top"].get_visible() or axes.get_label() == "<colorbar>", name
    assert matplotlib.rcParams["figure.dpi"] != 150, "the caller's settings stay"


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
        (lambda: mf.plot.attention(patterns(), heads=[6]), (3, 0, 5, 6)),
        (lambda: mf.plot.attention(patterns(), heads=[]), (3, 0, 5)),
        (
            lambda: mf.plot.attention(patterns(), tokens=[1, 2]),
            (2, 7),
        ),
        (
            lambda: mf.plot.histograms(
                Histograms("x", (0,), np.array(compute_bin_edges()), np.zeros((1, 129)), "")
            ),
            ("x",),
        ),
    ],
)
def test_bad_input_is_one_line(make: Callable[[], Any], says: tuple[object, ...]) -> None:
    with raises(mf.FlexError, *says) as error:
        make()
    assert "\n" not in str(error.value)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(mf.FlexError, "pip install megatron-flex[plot]"):
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
