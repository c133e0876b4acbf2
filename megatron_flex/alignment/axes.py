"""Axes of tensors as text, and the rearrangement of a tensor from one form into another.

`b s (n d)` has three dims; the last holds the heads `n`, each with its features `d`. `s b n d` is the same
tensor in Megatron's order. `1` is a dim of one entry, which is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from megatron_flex.errors import LayoutError

Sizes = Mapping[str, int]
SINGLE = "1"  # a dim of one entry
SAMPLES, POSITIONS = "b", "s"  # the axes that number samples and positions


@cache
def parse_axes(text: str) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim: `b s (n d)` gives `(("b",), ("s",), ("n", "d"))`."""
    dims = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple((packed or single).split()) for packed, single in dims)


@cache
def canonical_axes(text: str) -> tuple[str, ...]:
    """The order in which tensors are compared: samples, positions, then the other axes as written."""
    names = [axis for dim in parse_axes(text) for axis in dim]
    first = [axis for axis in (SAMPLES, POSITIONS) if axis in names]
    return (*first, *(axis for axis in names if axis not in first))


def unpack(tensor: Tensor, axes: str, sizes: Sizes) -> Tensor:
    """The tensor with one dim for each axis, in the order of the text.

    Args:
        tensor: with the dims of `axes`.
        axes: its axes.
        sizes: the known lengths; of the axes of one dim, one length may be unknown.

    Raises:
        LayoutError: the tensor does not have these axes.
    """
    dims = parse_axes(axes)
    if tensor.ndim != len(dims):
        raise LayoutError(f"a tensor of shape {tuple(tensor.shape)} does not have the axes {axes!r}")
    shape: list[int] = []
    for length, dim in zip(tensor.shape, dims, strict=True):
        if len(dim) == 1:
            shape.append(length)
            continue
        given = [sizes.get(axis, -1) for axis in dim]
        product = math.prod(n for n in given if n > 0)
        if given.count(-1) > 1 or not product or length % product or (-1 not in given and product != length):
            lengths = ", ".join(f"{a}={n if n > 0 else '?'}" for a, n in zip(dim, given, strict=True))
            raise LayoutError(f"a dim of {length} entries is not ({' '.join(dim)}) with {lengths}")
        shape += [length // product if n == -1 else n for n in given]
    return tensor.reshape(shape)


def rearrange(tensor: Tensor, source: str, target: tuple[str, ...], sizes: Sizes) -> Tensor:
    """The tensor with one dim for each axis of `target`.

    Args:
        tensor: with the dims of `source`.
        source: its axes, those of `target` in any order and packing.
        target: the axes of the result.
        sizes: the known lengths.

    Returns:
        A view where torch can make one.

    Raises:
        LayoutError: the tensor does not have the axes of `source`.

    Examples:
        >>> from megatron_flex.alignment.axes import rearrange
        >>> rearrange(torch.zeros(2, 16, 32), "b s (n d)", ("s", "b", "n", "d"), {"n": 4}).shape
        torch.Size([16, 2, 4, 8])
    """
    names = [axis for dim in parse_axes(source) for axis in dim]
    wide = unpack(tensor, source, sizes)
    single = [i for i, axis in enumerate(names) if axis == SINGLE]
    names = [axis for axis in names if axis != SINGLE]
    if sorted(names) != sorted(target):
        raise LayoutError(f"the axes {source!r} are not those of {' '.join(target)!r}")
    return wide.squeeze(single).permute([names.index(axis) for axis in target])
