"""A layout as a picture: which rank holds which block of the tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import prod
from textwrap import wrap

from megatron_flex.layout.algebra import Dim, Layout, Sizes, Span
from megatron_flex.layout.blocks import is_partial
from megatron_flex.layout.spans import coordinates, full_order, spans

WIDTH, HEIGHT, LEFT, TOP = 440, 150, 40, 22  # pixels: size of the tensor, and margins
LETTER, LINE = 7, 14  # pixels: width of a letter, height of a text line
LINE_LETTERS = 70  # characters of a text line
RankCoords = tuple[tuple[str, int], ...]
UNNAMED_DIM = re.compile(r"d\d+")
ASSUMED_SIZE = 2  # ranks of each axis where the mesh is not given


@dataclass(frozen=True, slots=True)
class DrawingBlock:
    """A rectangle of the drawn dims, in entries of the smallest tensor that can be sharded this way.

    Attributes:
        rows: its range along the first dim.
        columns: its range along the second dim.
        ranks: the ranks that hold it, or a term of it: each axis with the coordinate.
    """

    rows: Span
    columns: Span
    ranks: tuple[RankCoords, ...]


@dataclass(frozen=True, slots=True)
class LayoutPicture:
    """The content of a drawing.

    Attributes:
        names: of the two dims; the first may be missing.
        lengths: the number of entries of each.
        blocks: ordered by the first rank that holds them.
        more: names of sharded dims that are not drawn.
        summed: whether the tensor is partial.
    """

    names: tuple[str, str]
    lengths: tuple[int, int]
    blocks: tuple[DrawingBlock, ...]
    more: tuple[str, ...]
    summed: bool


def make_picture(layout: Layout, sizes: Sizes) -> LayoutPicture:
    """The drawing of the last two sharded dims; if fewer are sharded, another dim is added."""
    order = full_order(layout)
    dims = [replace(layout.dims[i], uneven=False, keep=None) for i in order]
    names = [d.name or f"d{i}" for i, d in enumerate(dims)]
    cut = [i for i, d in enumerate(dims) if any(sizes.get(c.axis, 1) > 1 for c in d.cuts)]
    beside = sorted((i for i in range(len(dims)) if i not in cut), key=lambda i: (i + 1 < len(dims), i))
    drawn = sorted((cut[-2:] + beside)[:2])
    lengths = [_least_length(dims[i], sizes) for i in drawn]
    ranks_by_block: dict[tuple[Span, Span], list[RankCoords]] = {}
    for coords in coordinates(layout, sizes):
        live = tuple((a, c) for a, c in coords.items() if sizes.get(a, 1) > 1)
        each = [spans(dims[i], n, coords, sizes) for i, n in zip(drawn, lengths, strict=True)]
        each = [[(0, 1)]] * (2 - len(each)) + each
        for rows in each[0]:
            for columns in each[1]:
                ranks = ranks_by_block.setdefault((rows, columns), [])
                if live not in ranks:
                    ranks.append(live)
    missing = 2 - len(drawn)
    named = [""] * missing + [names[i] for i in drawn]
    long = [1] * missing + lengths
    return LayoutPicture(
        (named[0], named[1]),
        (long[0], long[1]),
        tuple(DrawingBlock(rows, columns, tuple(ranks)) for (rows, columns), ranks in ranks_by_block.items()),
        tuple(names[i] for i in cut[:-2]),
        is_partial(layout, sizes),
    )


def draw_layout(layout: Layout, sizes: Sizes | None = None) -> str:
    """Draw a layout as SVG: the tensor in blocks, each with the ranks that hold it.

    Args:
        layout: the layout.
        sizes: the sizes of the mesh axes; two ranks on each axis if None.

    Returns:
        The SVG element as text.

    Examples:
        >>> (site,) = flex.sites("decoder.layers.0.mlp.linear_fc1:output")
        >>> site.layout.draw({"tp": 2})
        '<svg xmlns="http://www.w3.org/2000/svg" ... aria-label="[s, b, gate|up/tp in 2 segments]" ...</svg>'
    """
    assumed = sizes is None
    axis_sizes = dict.fromkeys((*layout.axes, *layout.shared), ASSUMED_SIZE) if sizes is None else dict(sizes)
    shown = make_picture(layout, axis_sizes)
    words = [layout.describe(axis_sizes)]
    if shown.summed:
        words.append("partial: each rank has a term of the sum")
    if shown.more:
        words.append(f"{', '.join(shown.more)} cut too")
    if assumed and layout.axes:
        words.append(f"drawn for {ASSUMED_SIZE} ranks of each axis")
    title = escape("; ".join(words))
    caption = [piece for sentence in words for piece in wrap(sentence, LINE_LETTERS)]
    keys = list(dict.fromkeys(b.ranks for b in shown.blocks))
    body = [_draw_block(b, shown, keys.index(b.ranks), len(keys)) for b in shown.blocks]
    rows, columns = map(escape, shown.names)
    height = TOP + HEIGHT + 10 + LINE * len(caption)
    beside = max(0, (len(shown.names[0]) + 3) * LETTER - LEFT)  # extra width for a long name
    width = beside + LEFT + WIDTH + 8
    below = "".join(
        f'<text x="{LEFT}" y="{TOP + HEIGHT + LINE * n + 4}" font-size="11">{escape(sentence)}</text>'
        for n, sentence in enumerate(caption, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" width="{width}" '
        f'height="{height}" viewBox="{-beside} 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="currentColor">'
        f'<text x="{LEFT + WIDTH / 2:g}" y="{TOP - 7}" text-anchor="middle">{columns} →</text>'
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT / 2:g}" text-anchor="end">{rows}{" ↓" if rows else ""}</text>'
        f"{''.join(body)}"
        f"{below}</svg>"
    )


def _least_length(dim: Dim, sizes: Sizes) -> int:
    """The smallest length that can be sharded this way."""
    chunks = prod(
        sizes.get(c.axis, 1) // c.copies * (2 if c.order == "zigzag" else 1)
        for c in dim.cuts
        if sizes.get(c.axis, 1) > 1
    )
    return sum(dim.segments) * chunks


def _draw_block(block: DrawingBlock, shown: LayoutPicture, number: int, count: int) -> str:
    high, wide = HEIGHT / shown.lengths[0], WIDTH / shown.lengths[1]
    x, width = LEFT + block.columns[0] * wide, (block.columns[1] - block.columns[0]) * wide
    y, height = TOP + block.rows[0] * high, (block.rows[1] - block.rows[0]) * high
    words = escape(_describe_ranks(block.ranks))
    fits = len(words) * LETTER < width and height > 14
    label = (
        f'<text x="{x + width / 2:.4g}" y="{y + height / 2 + 4:.4g}" text-anchor="middle">{words}</text>'
        if fits
        else ""
    )
    return (
        f'<g><title>{words}</title><rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" '
        f'fill="hsl({360 * number / max(count, 1):.0f} 65% 55%)" fill-opacity=".35" stroke="currentColor"/>'
        f"{label}</g>"
    )


def _describe_ranks(ranks: tuple[RankCoords, ...]) -> str:
    """`tp 0`, `tp 0,1`, `cp 0 tp 1`; `every rank`."""
    by_axis: dict[str, set[int]] = {}
    for axis, coord in (pair for rank in ranks for pair in rank):
        by_axis.setdefault(axis, set()).add(coord)
    if not by_axis:
        return "every rank"
    if prod(map(len, by_axis.values())) == len(ranks):
        return " ".join(f"{a} {','.join(map(str, sorted(n)))}" for a, n in by_axis.items())
    return "; ".join(" ".join(f"{a} {c}" for a, c in rank) for rank in ranks)


Layout.draw = draw_layout


def format_shape(dims: Sequence[str], shape: Sequence[int | str]) -> str:
    """`[sample 8, token 16, h 512]`; `[s, b, h 512]` where the data determine a length.

    A dim without a name, which a dump numbers as `d0`, is its length only: `[512]`.
    """
    named = (("" if UNNAMED_DIM.fullmatch(d) else d, n) for d, n in zip(dims, shape, strict=False))
    return "[" + ", ".join(d if d == n else f"{d} {n}".strip() for d, n in named) + "]"
