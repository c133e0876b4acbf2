"""Layouts as JSON: what a manifest and each part of a dump tell of how shards make the whole."""

from __future__ import annotations

from typing import Any

from megatron_flex.layout import Cut, Dim, Layout


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout in plain values; what is as usual is left out."""
    out: dict[str, Any] = {"dims": [_dim_to_json(d) for d in layout.dims]}
    for name in ("partial", "shared"):
        if getattr(layout, name):
            out[name] = list(getattr(layout, name))
    if layout.permute is not None:
        out["permute"] = list(layout.permute)
    return out


def layout_from_json(record: dict[str, Any]) -> Layout:
    """The layout that `layout_to_json` told.

    Raises:
        LayoutError: values that no layout has.
        KeyError, TypeError, ValueError: something that `layout_to_json` never tells.
    """
    permute = record.get("permute")
    return Layout(
        tuple(_dim_from_json(d) for d in record["dims"]),
        tuple(map(str, record.get("partial", ()))),
        tuple(map(str, record.get("shared", ()))),
        None if permute is None else tuple(int(i) for i in permute),
    )


def _dim_to_json(dim: Dim) -> dict[str, Any]:
    out: dict[str, Any] = {"name": dim.name}
    if dim.cuts:
        out["cuts"] = [_cut_to_json(c) for c in dim.cuts]
    if dim.segments != (1,):
        out["segments"] = list(dim.segments)
    if dim.keep is not None:
        out["keep"] = dim.keep
    if dim.uneven:
        out["uneven"] = True
    return out


def _cut_to_json(cut: Cut) -> dict[str, Any]:
    out: dict[str, Any] = {"axis": cut.axis}
    if cut.order != "contiguous":
        out["order"] = cut.order
    if cut.copies != 1:
        out["copies"] = cut.copies
    if cut.partial:
        out["partial"] = True
    return out


def _dim_from_json(record: dict[str, Any]) -> Dim:
    keep, segments = record.get("keep"), tuple(int(n) for n in record.get("segments", (1,)))
    if min(segments, default=0) < 1 or (keep is not None and keep < 0):
        raise ValueError(f"segments {segments}, of which {keep} are kept")
    return Dim(
        str(record["name"]),
        tuple(_cut_from_json(c) for c in record.get("cuts", ())),
        segments,
        None if keep is None else int(keep),
        bool(record.get("uneven", False)),
    )


def _cut_from_json(record: dict[str, Any]) -> Cut:
    order = record.get("order", "contiguous")
    if order not in ("contiguous", "zigzag"):
        raise ValueError(f"order {order!r} is none of contiguous, zigzag")
    if int(record.get("copies", 1)) < 1:
        raise ValueError(f"{record['copies']} copies")
    return Cut(str(record["axis"]), order, int(record.get("copies", 1)), bool(record.get("partial", False)))
