"""Layouts that places have not by themselves: of `expected_shape` or told at run time; whether they hold."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import SAMPLE, any_rank, everyone
from megatron_flex.errors import HookError
from megatron_flex.layout import AXIS, Layout, declared
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.editing import Editing
from megatron_flex.runtime.registry import Registry
from megatron_flex.sites import Site

BITS = 0x7FFFFFFF  # of a number that ranks compare
DIFFER = (
    "tensor parallel ranks have parts of different shapes, not all the whole and not all equal parts of the "
    "expected_shape; hook a place where they have"
)
PIECE = 1 << 20  # entries that are looked at together
WAVES = (0.7391, 1.3547, 2.2361, 2.9713)


@dataclass(frozen=True)
class Sketch:
    """What ranks compare of a tensor that they should have alike.

    Attributes:
        place: where it passed.
        axes: along which it should be alike; empty if only its shape should.
        layout: what was told of it, in words.
        shape: its own.
        norm: the root of the sum of its squares.
        waves: sums of its entries, weighted by waves; None where they are no numbers.
        bound: by how much of the norm these may differ, as rounding may.
    """

    place: str
    axes: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    norm: float
    waves: tuple[float, ...]
    bound: float

    def fits(self, other: Sketch, axis: str) -> bool:
        """Whether this may be of the same tensor along an axis; ranks cannot say so exactly."""
        if (self.place, self.layout, self.shape) != (other.place, other.layout, other.shape):
            return False
        if axis not in self.axes or not all(map(_finite, (*self.waves, *other.waves))):
            return True
        room = self.bound * max(self.norm, other.norm) + 1e-30
        return all(abs(a - b) <= room for a, b in zip(self.waves, other.waves, strict=True))


def sketch(place: str, axes: tuple[str, ...], layout: Layout, local: Tensor) -> Sketch:
    """Look at a tensor."""
    shape = tuple(local.shape)
    if not axes or local.is_meta:
        shape = () if any(d.uneven for d in layout.dims) else shape
        return Sketch(place, (), layout.describe(), shape, 0.0, (), 0.0)
    flat = local.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    sums = torch.zeros(1 + len(WAVES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE].double()
        count = torch.arange(start, start + piece.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack([piece.square().sum(), *((piece * torch.cos(count * w)).sum() for w in WAVES)])
    square, *waves = sums.tolist()
    exact = not local.dtype.is_floating_point and not local.dtype.is_complex
    bound = 1e-9 if exact else max(1e-4, 8 * torch.finfo(local.dtype).eps)
    return Sketch(place, axes, layout.describe(), shape, square**0.5, tuple(waves), bound)


def _finite(value: float) -> bool:
    return value - value == 0


class Declared:
    """Infers layouts where no framework tells them, and looks whether what was told can be.

    A layout follows from a rank's own tensor. Before an edit the ranks compare what they inferred, as they
    go on to send by it; what is only read is compared when the step is over.
    """

    def __init__(self, registry: Registry, editing: Editing, mesh: Mesh) -> None:
        self._registry, self._editing = registry, editing
        self._tp = Mesh((mesh[AXIS],))
        self._size = mesh[AXIS].size
        self._inferred = 0
        self._samples = Mesh(tuple(mesh[n] for n in SAMPLE))
        self._seen: set[tuple[str, Layout]] = set()
        self._sketches: list[Sketch] = []

    def told(self, place: str, layout: Layout, local: Tensor) -> None:
        """A layout was told of a tensor; the first time the ranks compare at the end of the step."""
        if (place, layout) in self._seen:
            return
        self._seen.add((place, layout))
        axes = tuple(a.name for a in self._samples if a.size > 1 and a.name not in layout.axes)
        self._sketches.append(sketch(place, axes, layout, local))

    def layout(self, site: Site | ParameterSite, key: Key, local: Tensor) -> Layout:
        """The layout of a tensor at a site, alike on all tensor parallel ranks.

        Collective over `tp` if a hook with an editing function stands there and one expects a shape.
        """
        whole = self._registry.expected(site.name)
        if whole is None or self._size == 1:
            return declared(local.shape, None, 1)
        hooks = self._registry.at(site.name)
        hook = next((h for h in hooks if h.expected_shape is not None), hooks[0])
        found = self._editing.guard(hook, key, partial(declared, local.shape, whole, self._size))
        code = _code(found)
        if not any(h.editing_function for h in hooks):
            self._inferred = zlib.crc32(f"{self._inferred} {key.site} {code}".encode()) & BITS
        elif self._differ(code):
            self._editing.guard(hook, key, _refuse)
            found = None
        return found or declared(local.shape, None, 1)

    def differ(self) -> str:
        """What is wrong with the layouts of what was read in this step; empty if nothing is.

        Collective over `tp` and `cp`.
        """
        code, self._inferred = self._inferred, 0
        if self._registry.expects and self._differ(code):
            return DIFFER
        mine, self._sketches = self._sketches, []
        if not self._registry.follows or not any_rank([len(mine)], self._samples)[0]:
            return ""
        for axis in self._samples:
            told = everyone(mine, self._samples, [axis.name]) if axis.size > 1 else []
            for theirs in told:
                for one, other in zip(mine, theirs, strict=False):
                    if not one.fits(other, axis.name):
                        return _unlike(one, other, axis.name)
        return ""

    def _differ(self, code: int) -> bool:
        most, least = any_rank([code, -code], self._tp)
        return most != -least


def _code(layout: Layout | None) -> int:
    """A number that says which dims are cut."""
    return 0 if layout is None else 1 + sum(2**i for i, d in enumerate(layout.dims) if d.cuts)


def _unlike(one: Sketch, other: Sketch, axis: str) -> str:
    if (one.place, one.layout) != (other.place, other.layout):
        return (
            f"{axis} ranks did not pass the same places in the same layouts: {one.place} in {one.layout} "
            f"on one, {other.place} in {other.layout} on another; run the same code on them"
        )
    return (
        f"{one.place} was followed to lie as {one.layout}, alike on all {axis} ranks, but they have "
        f"different tensors there, of shapes {one.shape} and {other.shape}: something takes a rank's own part "
        "of what all have; say expected_shape there, or hook another place"
    )


def _refuse() -> None:
    raise HookError(DIFFER)
