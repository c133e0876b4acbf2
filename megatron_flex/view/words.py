"""Layouts, shapes and series of numbers as people say them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_flex.layout import Cut, Dim, Layout, Sizes

EVERY_RANK = "every rank"


def describe_layout(layout: Layout, sizes: Sizes) -> str:
    """`[s, b, f] · s over cp (zigzag) then tp · f over tp`: what is cut, and how.

    Args:
        layout: the layout.
        sizes: the mesh; axes with one rank are not told.
    """
    order = layout.permute or tuple(range(len(layout.dims)))
    dims = [layout.dims[i] for i in order]
    names = [d.name or f"d{i}" for i, d in enumerate(dims)]
    description = [f"[{', '.join(names)}]"]
    for name, dim in zip(names, dims, strict=True):
        cuts = [c for c in dim.cuts if sizes.get(c.axis, 1) > 1]
        if cuts:
            description.append(f"{name} over {' then '.join(map(_describe_cut, cuts))}{_describe_segments(dim)}")
    sums = [a for a in layout.partial if sizes.get(a, 1) > 1]
    if sums:
        description.append(f"a sum over {', '.join(sums)}")
    if len(description) == 1 and any(n > 1 for n in sizes.values()):
        description.append(EVERY_RANK)
    return " · ".join(description)


def _describe_cut(cut: Cut) -> str:
    words = cut.axis + (" (zigzag)" if cut.order == "zigzag" else "")
    if cut.copies > 1:
        words += f" ({cut.copies} {'summands' if cut.partial else 'copies'} each)"
    return words


def _describe_segments(dim: Dim) -> str:
    return "" if len(dim.segments) < 2 else ", part by part"


def describe_shape(shape: Sequence[int | str]) -> str:
    """`s x b x 512`; names where only the data tell."""
    return " x ".join(map(str, shape))


def describe_numbers(numbers: Iterable[int]) -> str:
    """`0-15,17,20-24`; every other one and the like as `0-30:2`."""
    left = sorted(set(numbers))
    out: list[str] = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        run = 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        if run < 3 and step != 1:
            run = 1
        first, last = left[0], left[run - 1]
        out.append(str(first) if run == 1 else f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}")
        left = left[run:]
    return ",".join(out)
