"""Copies that are out of step within one run: by the checksums of the ranks that did not write a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_flex.compare.comparison import OutOfStep
from megatron_flex.compare.source import PARAMETER, Source
from megatron_flex.dump import GRADIENT, PARAMETER_GRADIENT, REPLICA, ROUTING
from megatron_flex.errors import DumpError
from megatron_flex.layout import Coords, Layout, Sizes
from megatron_flex.sites import GRAD


class _Key(NamedTuple):
    name: str
    microbatch: int
    call: int
    span: tuple[int, int] | None
    place: tuple[tuple[str, int], ...]


def out_of_step(source: Source, iterations: Sequence[int]) -> list[OutOfStep]:
    """Tensors of which ranks that should hold the same hold something else, in the order of execution.

    Only a dump that was made with `replicas=True` has the checksums that this takes.

    Args:
        source: the dump.
        iterations: those to look at.
    """
    parameters = {p.name for p in source.manifest.parameters}
    order = {i.name: n for n, i in enumerate(source.items())}
    out = []
    for iteration in iterations:
        wrote: dict[_Key, int] = {}
        copies: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
        for rank, coords, entry, layout in _entries(source, iteration):
            name = entry.site + (GRAD if entry.kind in (GRADIENT, PARAMETER_GRADIENT) else "")
            own = entry.kind in (PARAMETER, PARAMETER_GRADIENT) or name.removesuffix(GRAD) in parameters
            key = _Key(
                name, entry.microbatch, entry.call, entry.span, _place(layout, coords, source.sizes, own)
            )
            if entry.kind == REPLICA or key in wrote:
                copies[key].append((rank, entry.crc))
            else:
                wrote[key] = entry.crc
        found = []
        for key, others in copies.items():
            first = wrote.get(key, others[0][1])
            ill = tuple(sorted(rank for rank, crc in others if crc != first))
            if ill:
                found.append(OutOfStep(source.label, key.name, iteration, key.microbatch, ill))
        out += sorted(found, key=lambda o: (order.get(o.name, len(order)), o.microbatch))
    return out


def _entries(source: Source, iteration: int) -> Any:
    """Every entry of an iteration: rank, coordinates, entry, layout."""
    written = source.dump.written((iteration, 0))
    for rank, coords in written.run.coords.items():
        for path in written.paths(rank):
            try:
                by = source.dump.files.open(path).by
            except OSError as error:
                raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
            for entries in by.values():
                for entry, layout in entries:
                    if entry.kind != ROUTING and getattr(entry, "route", None) is None:
                        yield rank, coords, entry, layout


def _place(layout: Layout, coords: Coords, sizes: Sizes, parameter: bool) -> tuple[tuple[str, int], ...]:
    """What tells ranks apart that hold different parts: equal places hold equal tensors."""
    copies: Mapping[str, int] = {
        c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial
    }
    apart = layout.axes if parameter else (*layout.axes, "dp", "pp")
    return tuple(
        (axis, coords.get(axis, 0) // copies.get(axis, 1))
        for axis in sorted(set(apart))
        if sizes.get(axis, 1) > 1
    )
