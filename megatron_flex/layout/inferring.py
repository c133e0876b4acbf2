"""The layout that a person declares by giving the whole's shape, where no framework tells one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_flex.errors import LayoutError
from megatron_flex.layout.types import Cut, Dim, Layout

TENSOR_AXIS = "tp"  # the axis that cuts tensors within one sample


def infer_layout(local: Sequence[int], whole: Sequence[int | None] | None, size: int) -> Layout:
    """The layout of a tensor of which a person says the whole's shape.

    Every rank holds all of a dim, or the `tp` ranks hold equal parts of it in their order.

    Args:
        local: shape of the local tensor.
        whole: shape of the whole; None for a dim that may have any length and is not cut; None altogether
            for a tensor that every rank holds.
        size: number of tensor parallel ranks.

    Raises:
        LayoutError: the shapes do not fit so.
    """
    if whole is None or size == 1:
        return Layout(tuple(Dim() for _ in local))
    full, shape = tuple(whole), tuple(local)
    if len(full) != len(shape):
        raise LayoutError(
            f"a tensor of shape {shape} is no part of the expected {full}, which has {len(full)} dims; give "
            "the shape of the whole"
        )
    cut = [i for i, (n, w) in enumerate(zip(shape, full, strict=True)) if w is not None and n != w]
    for index in cut:
        if shape[index] * size != full[index]:
            raise LayoutError(
                f"a tensor of shape {shape} is no part of the expected {full}: dim {index} must have "
                f"{full[index]} entries, or a {size}th of them on each of {size} tensor parallel ranks; "
                "give the shape of the whole"
            )
    if len(cut) > 1:
        raise LayoutError(
            f"a tensor of shape {shape} is no part of the expected {full}: tensor parallel ranks cut one "
            f"dim, not {len(cut)}; give the shape of the whole"
        )
    return Layout(tuple(Dim("", (Cut(TENSOR_AXIS),) if i in cut else ()) for i in range(len(shape))))


def name_batch_first(layout: Layout) -> Layout:
    """The layout with its first dim as the batch dim `b`, which it is where no framework says otherwise."""
    return replace(
        layout, dims=tuple(replace(d, name="b") if i == 0 else d for i, d in enumerate(layout.dims))
    )
