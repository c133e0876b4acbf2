"""Layouts that places have not by themselves: of `expected_shape` or told at run time; whether they hold."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import SAMPLE_AXES, max_over_ranks, gather_objects
from megatron_flex.errors import HookError
from megatron_flex.layout import TENSOR_AXIS, Layout, infer_layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.editing import EditRunner
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.sites import Site

CODE_MASK = 0x7FFFFFFF  # of a number that ranks compare
SHAPES_DIFFER = (
    "tensor parallel ranks have parts of different shapes, not all the whole and not all equal parts of the "
    "expected_shape; hook a place where they have"
)
BLOCK_ENTRIES = 1 << 20  # entries that are looked at together
FREQUENCIES = (0.7391, 1.3547, 2.2361, 2.9713)


@dataclass(frozen=True)
class TensorSketch:
    """What ranks compare of a tensor that they should have alike.

    Attributes:
        place: where it passed.
        axes: along which it should be alike; empty if only its shape should.
        layout: what was told of it, in words.
        shape: its own.
        norm: the root of the sum of its squares.
        waves: sums of its entries, weighted by waves.
        bound: by how much of the norm these may differ, as rounding may.
    """

    place: str
    axes: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    norm: float
    waves: tuple[float, ...]
    bound: float

    def fits(self, other: TensorSketch, axis: str) -> bool:
        """Whether this may be of the same tensor along an axis; ranks cannot say so exactly."""
        if (self.place, self.layout, self.shape) != (other.place, other.layout, other.shape):
            return False
        if axis not in self.axes or not all(map(_is_finite, (*self.waves, *other.waves))):
            return True
        room = self.bound * max(self.norm, other.norm) + 1e-30
        return all(abs(a - b) <= room for a, b in zip(self.waves, other.waves, strict=True))


def sketch_tensor(place: str, axes: tuple[str, ...], layout: Layout, local: Tensor) -> TensorSketch:
    """Look at a tensor."""
    shape = () if any(d.uneven for d in layout.dims) else tuple(local.shape)
    if not axes or local.is_meta:
        return TensorSketch(place, (), layout.describe(), shape, 0.0, (), 0.0)
    flat = local.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    sums = torch.zeros(1 + len(FREQUENCIES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), BLOCK_ENTRIES):
        block = flat[start : start + BLOCK_ENTRIES].double()
        count = torch.arange(start, start + block.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack([block.square().sum(), *((block * torch.cos(count * w)).sum() for w in FREQUENCIES)])
    square, *waves = sums.tolist()
    exact = not local.dtype.is_floating_point and not local.dtype.is_complex
    bound = 1e-9 if exact else max(1e-4, 8 * torch.finfo(local.dtype).eps)
    return TensorSketch(place, axes, layout.describe(), shape, square**0.5, tuple(waves), bound)


def _is_finite(value: float) -> bool:
    return value - value == 0


class LayoutInference:
    """Infers layouts where no framework tells them, and looks whether what was told can be.

    A layout follows from a rank's own tensor. Before an edit the ranks compare what they inferred, as they
    go on to send by it; what is only read is compared when the step is over.
    """

    def __init__(self, registry: HookRegistry, editing: EditRunner, mesh: Mesh) -> None:
        self._registry, self._editing = registry, editing
        self._tp = Mesh((mesh[TENSOR_AXIS],))
        self._size = mesh[TENSOR_AXIS].size
        self._inferred = 0
        self._samples = Mesh(tuple(mesh[n] for n in SAMPLE_AXES))
        self._seen: set[tuple[str, Layout]] = set()
        self._sketches: list[TensorSketch] = []

    def told(self, place: str, layout: Layout, local: Tensor) -> None:
        """A layout was told of a tensor; the first time the ranks compare at the end of the step."""
        if (place, layout) in self._seen:
            return
        self._seen.add((place, layout))
        axes = tuple(a.name for a in self._samples if a.size > 1 and a.name not in layout.axes)
        self._sketches.append(sketch_tensor(place, axes, layout, local))

    def layout(self, site: Site | ParameterSite, key: Key, local: Tensor) -> Layout:
        """The layout of a tensor at a site, alike on all tensor parallel ranks.

        Collective over `tp` if a hook with an editing function stands there and one expects a shape.
        """
        full = self._registry.expected(site.name)
        if full is None or self._size == 1:
            return infer_layout(local.shape, None, 1)
        hooks = self._registry.at(site.name)
        hook = next((h for h in hooks if h.expected_shape is not None), hooks[0])
        found = self._editing.guard(hook, key, partial(infer_layout, local.shape, full, self._size))
        code = _encode_cuts(found)
        if not any(h.editing_function for h in hooks):
            self._inferred = zlib.crc32(f"{self._inferred} {key.site} {code}".encode()) & CODE_MASK
        elif self._differ(code):
            self._editing.guard(hook, key, _raise_hook_error)
            found = None
        return found or infer_layout(local.shape, None, 1)

    def differ(self) -> str:
        """What is wrong with the layouts of what was read in this step; empty if nothing is.

        Collective over `tp` and `cp`.
        """
        code, self._inferred = self._inferred, 0
        if self._registry.expects and self._differ(code):
            return SHAPES_DIFFER
        mine, self._sketches = self._sketches, []
        if not self._registry.follows or not max_over_ranks([len(mine)], self._samples)[0]:
            return ""
        for axis in self._samples:
            told = gather_objects(mine, self._samples, [axis.name]) if axis.size > 1 else []
            for theirs in told:
                for one, other in zip(mine, theirs, strict=False):
                    if not one.fits(other, axis.name):
                        return _describe_difference(one, other, axis.name)
        return ""

    def _differ(self, code: int) -> bool:
        most, least = max_over_ranks([code, -code], self._tp)
        return most != -least


def _encode_cuts(layout: Layout | None) -> int:
    """A number that says which dims are cut."""
    return 0 if layout is None else 1 + sum(2**i for i, d in enumerate(layout.dims) if d.cuts)


def _describe_difference(one: TensorSketch, other: TensorSketch, axis: str) -> str:
    if (one.place, one.layout) != (other.place, other.layout):
        return (
            f"{axis} ranks did not pass the same places in the same layouts: {one.place} in {one.layout} "
            f"on one, {other.place} in {other.layout} on another; run the same code on them"
        )
    return (
        f"{one.place} was followed to lie as {one.layout}, alike on all {axis} ranks, but they have "
        f"different tensors there, of shapes {one.shape} and {other.shape}: something takes a rank's own "
        "part of what all have; say expected_shape there, or hook another place"
    )


def _raise_hook_error() -> None:
    raise HookError(SHAPES_DIFFER)
