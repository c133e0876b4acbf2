"""Layout, the data: which mesh axis shards which tensor dim, what is partial or replicated; and the layout
that follows from a given full shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal

from megatron_flex.errors import LayoutError

Order = Literal["contiguous", "zigzag"]
Span = tuple[int, int]  # a half-open interval of indices in the full tensor
Sizes = Mapping[str, int]  # the size of each axis; 1 where missing
Coords = Mapping[str, int]  # a rank's coordinate on each axis; 0 where missing
Lengths = Mapping[int, Sequence[int]]  # for each uneven dim the lengths of its shards, in order


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis sharding one tensor dim.

    Attributes:
        axis: the mesh axis.
        order: `contiguous` gives coordinate c the c-th of n equal shards; `zigzag` gives it shards c and
            2n-1-c of 2n (context parallelism balances causal attention this way).
        copies: this many neighbouring coordinates hold the same shard (key/value heads, when there are
            fewer of them than ranks).
        partial: the copies are not equal and must be summed. The gradient of copies is partial.
        segments: relative lengths of parts that this axis shards separately, so that a rank has one shard
            of each part: the sequences of a pack under context parallelism. Later cuts shard the result.

    Examples:
        >>> from megatron_flex.layout import Cut
        >>> Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))),)).describe()
        '[s/cp zigzag/tp]'
    """

    axis: str
    order: Order = "contiguous"
    copies: int = 1
    partial: bool = False
    segments: tuple[int, ...] = (1,)


def is_plain(cut: Cut) -> bool:
    """Whether an axis shards a dim into contiguous parts, one for each coordinate."""
    return cut.order == "contiguous" and cut.copies == 1 and cut.segments == (1,)


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a tensor.

    Attributes:
        name: the usual name (`s`, `b`, `h`), for display only.
        cuts: applied one after the other: sequence parallelism inside context parallelism is
            `(Cut("cp", "zigzag"), Cut("tp"))`.
        segments: relative widths of packed parts that are sharded separately; `(1, 1)` for a `[gate | up]`.
        keep: how many leading entries are real, if the rest is padding (of a vocabulary); None for all.
        uneven: the shards may differ in length, so that the lengths are known from the shards only.
        sequences: the first token and the end of each packed sequence, without its padding; empty where
            sequences are not packed, or the dim does not count tokens.

    Raises:
        LayoutError: an uneven dim has cuts that are not plain and contiguous.

    Examples:
        >>> from megatron_flex.layout import Cut
        >>> fc1 = Dim("gate|up", (Cut("tp"),), segments=(1, 1))  # gate and up are sharded separately
        >>> Layout((Dim("s"), Dim("b"), fc1)).describe()
        '[s, b, gate|up/tp in 2 segments]'
    """

    name: str = ""
    cuts: tuple[Cut, ...] = ()
    segments: tuple[int, ...] = (1,)
    keep: int | None = None
    uneven: bool = False
    sequences: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        plain = self.segments == (1,) and all(is_plain(c) for c in self.cuts)
        if self.uneven and not plain:
            raise LayoutError(
                f"dim {self.name!r} is uneven: it takes plain contiguous cuts only", dim=self.name
            )


class _HashSlot:
    """Room for a hash that is worked out once: caches are keyed by layouts, and nested fields take long.

    It is not a field: it is neither written to files nor sent to other processes, whose hashes differ.
    """

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Layout(_HashSlot):
    """The relation of the shards of one tensor to the full tensor.

    Attributes:
        dims: one `Dim` for each dim of the local tensor.
        partial: axes over which the full tensor is the sum of the local tensors.
        shared: axes over which the tensor is replicated, while every rank holds only a partial gradient, so
            that the full gradient is the sum. (On any other axis not named here tensor and gradient are
            replicated.)
        permute: the full tensor's dims in terms of the local dims, where a framework transposes a tensor
            in the sharded run only; None for the same order.

    Raises:
        LayoutError: an axis is named twice, or `permute` does not name each dim once.

    Examples:
        >>> from megatron_flex.layout import Cut
        >>> layout = Layout((Dim("s", (Cut("tp"),)), Dim("b"), Dim("h")))  # sequence parallel
        >>> layout.describe()
        '[s/tp, b, h]'
    """

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    permute: tuple[int, ...] | None = None
    # Set by `layout_drawing`, which imports this module.
    draw: ClassVar[Callable[[Layout], str]]

    def __post_init__(self) -> None:
        if self.permute is not None and sorted(self.permute) != list(range(len(self.dims))):
            raise LayoutError(f"permute {self.permute} must name each of {len(self.dims)} dims once")
        cut = [c.axis for d in self.dims for c in d.cuts]
        axes = cut + list(self.partial) + list(self.shared)
        if len(set(axes)) != len(axes):
            raise LayoutError(f"axes {axes} of one layout repeat; an axis cuts, sums or shares a tensor once")

    def __repr__(self) -> str:
        shared = f", gradient summed over {', '.join(self.shared)}" if self.shared else ""
        order = f", permuted by {self.permute}" if self.permute is not None else ""
        return f"<Layout {self.describe()}{shared}{order}>"

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.dims, self.partial, self.shared, self.permute)))
            return self._hash

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the local tensors differ, in the order in which coordinates are counted."""
        return tuple([c.axis for d in self.dims for c in d.cuts]) + self.partial

    def active_axes(self, sizes: Sizes) -> tuple[str, ...]:
        """Return the axes of this layout that have more than one rank in a mesh of these sizes.

        Examples:
            >>> from megatron_flex.layout import Cut
            >>> Layout((Dim("s", (Cut("cp"), Cut("tp"))),)).active_axes({"cp": 1, "tp": 2})
            ('tp',)
        """
        return tuple([a for a in self.axes if sizes.get(a, 1) > 1])

    def gradient(self) -> Layout:
        """Return the layout of the gradient at the hook point; the gradient's gradient has this layout again.

        Examples:
            >>> layout = Layout((Dim("s"), Dim("h")), partial=("tp",))  # of a row parallel linear
            >>> layout.describe(), layout.gradient().describe()
            ('[s, h] summed over tp', '[s, h]')
        """
        dims = tuple(
            replace(d, cuts=tuple(replace(c, partial=not c.partial) if c.copies > 1 else c for c in d.cuts))
            for d in self.dims
        )
        return replace(self, dims=dims, partial=self.shared, shared=self.partial)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, sizes: Sizes | None = None) -> str:
        """Return the layout as text, such as `[s/cp zigzag/tp, b, 4h/tp gate|up]`.

        Examples:
            >>> from megatron_flex.layout import Cut
            >>> fc1 = Dim("gate|up", (Cut("tp"),), (1, 1))
            >>> layout = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), fc1))
            >>> layout.describe()
            '[s/cp zigzag, b, gate|up/tp in 2 segments]'
            >>> layout.describe({"cp": 1, "tp": 2})
            '[s, b, gate|up/tp in 2 segments]'
        """
        live = None if sizes is None else {a for a, n in sizes.items() if n > 1}
        dims = ", ".join(_describe_dim(d, i, live) for i, d in enumerate(self.dims))
        sums = [a for a in self.partial if live is None or a in live]
        return f"[{dims}]" + (f" summed over {', '.join(sums)}" if sums else "")

    def _repr_html_(self) -> str:
        """A drawing for notebooks: which rank holds which block, with two ranks on each axis."""
        return type(self).draw(self)


def replicated(*names: str) -> Layout:
    """The layout of a replicated tensor with dims of these names."""
    return Layout(tuple(Dim(n) for n in names))


def shard_over_data(layout: Layout) -> Layout:
    """The layout of all data parallel ranks' samples together: sharded over `dp` along the batch dim `b`.

    A layout without that dim, or already sharded this way, is returned unchanged. Ranks may have different
    numbers of samples.
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
        text += f" in {c.copies} {'partial sums' if c.partial else 'copies'}" if c.copies > 1 else ""
        text += f" in each of {len(c.segments)} sequences" if len(c.segments) > 1 else ""
    return text + (f" in {len(dim.segments)} segments" if cuts and len(dim.segments) > 1 else "")


TENSOR_AXIS = "tp"  # the axis that shards tensors within one sample


def infer_layout(local: Sequence[int], full: Sequence[int | None] | None, size: int) -> Layout:
    """The layout of a tensor whose full shape the user gives.

    Each dim is replicated, or sharded into equal contiguous parts over the `tp` ranks.

    Args:
        local: shape of the local tensor.
        full: shape of the full tensor; None for a dim of any length that is not sharded; None altogether
            for a replicated tensor.
        size: number of tensor parallel ranks.

    Raises:
        LayoutError: the shapes do not fit.
    """
    if full is None or size == 1:
        return _uncut_layout(len(local))
    expected, shape = tuple(full), tuple(local)
    if len(expected) != len(shape):
        raise LayoutError(
            f"a tensor of shape {shape} is not a part of the expected {expected}, which has {len(expected)} "
            "dims; give the shape of the full tensor"
        )
    cut = [i for i, (n, w) in enumerate(zip(shape, expected, strict=True)) if w is not None and n != w]
    for index in cut:
        if shape[index] * size != expected[index]:
            raise LayoutError(
                f"a tensor of shape {shape} is not a part of the expected {expected}: dim {index} must have "
                f"{expected[index]} entries, or a {size}th of them on each of {size} tensor parallel ranks; "
                "give the shape of the full tensor",
                dim=index,
            )
    if len(cut) > 1:
        raise LayoutError(
            f"a tensor of shape {shape} is not a part of the expected {expected}: tensor parallel ranks cut "
            f"one dim, not {len(cut)}; give the shape of the full tensor"
        )
    return Layout(tuple(Dim("", (Cut(TENSOR_AXIS),) if i in cut else ()) for i in range(len(shape))))


@cache
def _uncut_layout(dims: int) -> Layout:
    """One object for each number of dims, which caches find without a comparison."""
    return Layout(tuple(Dim() for _ in range(dims)))


def name_batch_first(layout: Layout, names: Sequence[str] = ()) -> Layout:
    """The layout with names of dims; without a batch dim among them the first dim counts samples, `b`.

    For what data parallel ranks have: a module of which nothing is known has a rank's samples along its first
    dim.

    Args:
        layout: a layout of which no framework names the dims.
        names: what is known of them, empty where unknown.
    """
    given = list(names) or [""] * len(layout.dims)
    if given and "b" not in given:
        given[0] = "b"
    return replace(layout, dims=tuple(replace(d, name=n) for d, n in zip(layout.dims, given, strict=True)))
