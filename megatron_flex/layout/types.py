"""Layout, the data: which mesh axis cuts which tensor dim, and what is summed or copied instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_flex.errors import LayoutError

Order = Literal["contiguous", "zigzag"]
Span = tuple[int, int]  # a half-open interval of indices in the whole
Sizes = Mapping[str, int]  # how many coordinates each axis has; 1 where missing
Coords = Mapping[str, int]  # a rank's coordinate on each axis; 0 where missing
Lengths = Mapping[int, Sequence[int]]  # for each uneven dim the lengths of its parts, in order


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis slicing one tensor dim.

    Attributes:
        axis: the mesh axis.
        order: `contiguous` gives coordinate c the c-th of n equal parts; `zigzag` gives it parts c and
            2n-1-c of 2n (context parallelism balances causal attention this way).
        copies: this many neighbouring coordinates hold the same part (key/value heads, when there are
            fewer of them than ranks).
        partial: the copies are not equal, their sum is the part. It is what the gradient of copies is.
    """

    axis: str
    order: Order = "contiguous"
    copies: int = 1
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor.

    Attributes:
        name: what people call it (`s`, `b`, `h`), for showing only.
        cuts: applied one after the other: sequence parallelism inside context parallelism is
            `(Cut("cp", "zigzag"), Cut("tp"))`.
        segments: relative widths of packed parts that are cut each by itself; `(1, 1)` for a `[gate | up]`.
        keep: how many leading entries are real, if the rest is padding (a vocabulary); None for all.
        uneven: the parts may differ in length, so that only the shards themselves can tell it.
    """

    name: str = ""
    cuts: tuple[Cut, ...] = ()
    segments: tuple[int, ...] = (1,)
    keep: int | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        plain = self.segments == (1,) and all(c.order == "contiguous" and c.copies == 1 for c in self.cuts)
        if self.uneven and not plain:
            raise LayoutError(f"dim {self.name!r} is uneven: it takes plain contiguous cuts only")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the shards of one tensor make the whole.

    Attributes:
        dims: one `Dim` for each dim of the local tensor.
        partial: axes over which the whole is the sum of the local tensors.
        shared: axes over which the tensor is replicated, while every rank holds only its share of the
            gradient, so that the whole gradient is the sum. (On any other axis not named here tensor and
            gradient are replicated, both whole.)
        permute: the whole's dims in terms of the local ones, where a framework transposes a tensor
            in the sharded run only; None for the same order.
    """

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    permute: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.permute is not None and sorted(self.permute) != list(range(len(self.dims))):
            raise LayoutError(f"permute {self.permute} must name each of {len(self.dims)} dims once")
        cut = [c.axis for d in self.dims for c in d.cuts]
        axes = cut + list(self.partial) + list(self.shared)
        if len(set(axes)) != len(axes):
            raise LayoutError(f"axes {axes} of one layout repeat; an axis cuts, sums or shares a tensor once")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the local tensors differ, in the order in which coordinates are counted."""
        return tuple(c.axis for d in self.dims for c in d.cuts) + self.partial

    def live(self, sizes: Sizes) -> tuple[str, ...]:
        """The axes of this layout that really split something on a mesh with these sizes."""
        return tuple(a for a in self.axes if sizes.get(a, 1) > 1)

    def gradient(self) -> Layout:
        """The layout of the gradient at the same place; the gradient's gradient is the layout again."""
        dims = tuple(
            replace(d, cuts=tuple(replace(c, partial=not c.partial) if c.copies > 1 else c for c in d.cuts))
            for d in self.dims
        )
        return replace(self, dims=dims, partial=self.shared, shared=self.partial)

    def describe(self, sizes: Sizes | None = None) -> str:
        """Return the layout in words, such as `[s/cp zigzag/tp, b, 4h/tp gate|up]`."""
        live = None if sizes is None else {a for a, n in sizes.items() if n > 1}
        dims = ", ".join(_describe_dim(d, i, live) for i, d in enumerate(self.dims))
        sums = [a for a in self.partial if live is None or a in live]
        return f"[{dims}]" + (f" summed over {', '.join(sums)}" if sums else "")

    def _repr_html_(self) -> str:
        """A drawing, in notebooks: which rank holds which block; for two ranks of each axis."""
        from megatron_flex.layout.layout_drawing import draw_layout  # which needs this file

        return draw_layout(self)


def replicated(*names: str) -> Layout:
    """The layout of a tensor with dims of these names that every rank holds whole."""
    return Layout(tuple(Dim(n) for n in names))


def shard_over_data(layout: Layout) -> Layout:
    """The layout of the samples of all data parallel ranks together: cut over `dp` along the batch dim `b`.

    A layout without that dim, or with that cut, is returned as it is. Ranks may have different numbers of
    samples.
    """
    if "dp" in layout.axes or all(d.name != "b" for d in layout.dims):
        return layout
    return replace(
        layout,
        dims=tuple(
            replace(d, cuts=(Cut("dp"), *d.cuts), uneven=True) if d.name == "b" else d for d in layout.dims
        ),
    )


def without_data_axis(layout: Layout) -> Layout:
    """The layout of a data parallel rank's own samples; the inverse of `shard_over_data`."""
    dims = []
    for dim in layout.dims:
        cuts = tuple(c for c in dim.cuts if c.axis != "dp")
        gone = len(cuts) < len(dim.cuts)
        dims.append(replace(dim, cuts=cuts, uneven=dim.uneven and bool(cuts)) if gone else dim)
    return replace(layout, dims=tuple(dims))


def _describe_dim(dim: Dim, index: int, live: set[str] | None) -> str:
    cuts = [c for c in dim.cuts if live is None or c.axis in live]
    text = dim.name or f"d{index}"
    for c in cuts:
        text += f"/{c.axis}" + (" zigzag" if c.order == "zigzag" else "")
        text += f" in {c.copies} {'summands' if c.partial else 'copies'}" if c.copies > 1 else ""
    return text + (f" in {len(dim.segments)} segments" if cuts and len(dim.segments) > 1 else "")
