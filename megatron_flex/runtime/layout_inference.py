"""Layouts for sites without a declared one: from `expected_shape`, from layouts noted at run time, or none.

Without any information a tensor is assumed to be the full tensor, replicated over tensor parallel ranks. The
ranks compare their tensors in the first pass, so that no shard is passed to a hook as the full tensor.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import SAMPLE_AXES, equal_over_ranks, gather_objects
from megatron_flex.errors import HookError
from megatron_flex.layout import TENSOR_AXIS, Layout, infer_layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.sites import Site

SHAPES_DIFFER = (
    "tensor parallel ranks have parts of different shapes or dtypes, neither the full tensor on all of them "
    "nor equal shards of the expected_shape; hook a point where they have"
)
TENSORS_DIFFER = (
    "tensor parallel ranks have different tensors at {place}, of shapes {one} and {other}, and no rule says "
    "how they make up the full tensor: give its expected_shape (where each rank has a full tensor of its "
    "own, as under dropout: expected_shape={local}), hook after the reduction of a partial sum, or register "
    "an adapter (docs/contributing/extend.md)"
)
BLOCK_ENTRIES = 1 << 20  # entries processed together
FREQUENCIES = (0.7391, 1.3547, 2.2361, 2.9713)


@dataclass(frozen=True)
class TensorSketch:
    """What ranks compare of a tensor that should be the same on all of them.

    Attributes:
        place: the name of the site.
        axes: the axes along which the tensor should be replicated; empty if only its shape should be the
            same.
        layout: the noted layout, as text.
        shape: the tensor's shape.
        norm: the root of the sum of its squares.
        waves: sums of its entries, weighted by waves.
        bound: the allowed difference of these sums, relative to the norm, to permit rounding.
    """

    place: str
    axes: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    norm: float
    waves: tuple[float, ...]
    bound: float

    def fits(self, other: TensorSketch, axis: str) -> bool:
        """Whether both sketches may be of the same tensor along an axis, up to rounding."""
        if (self.place, self.layout, self.shape) != (other.place, other.layout, other.shape):
            return False
        if axis not in self.axes or not all(map(math.isfinite, (*self.waves, *other.waves))):
            return True
        room = self.bound * max(self.norm, other.norm) + 1e-30
        return all(abs(a - b) <= room for a, b in zip(self.waves, other.waves, strict=True))


def sketch_tensor(place: str, axes: tuple[str, ...], layout: Layout, local: Tensor) -> TensorSketch:
    shape = () if any(d.uneven for d in layout.dims) else tuple(local.shape)
    if not axes or local.is_meta:
        return TensorSketch(place, (), layout.describe(), shape, 0.0, (), 0.0)
    flat = local.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    sums = torch.zeros(1 + len(FREQUENCIES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), BLOCK_ENTRIES):
        block = flat[start : start + BLOCK_ENTRIES].double()
        count = torch.arange(start, start + block.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack(
            [block.square().sum(), *((block * torch.cos(count * w)).sum() for w in FREQUENCIES)]
        )
    square, *waves = sums.tolist()
    exact = not local.dtype.is_floating_point and not local.dtype.is_complex
    bound = 1e-9 if exact else max(1e-4, 8 * torch.finfo(local.dtype).eps)
    return TensorSketch(place, axes, layout.describe(), shape, square**0.5, tuple(waves), bound)


class LayoutInference:
    """Infers layouts that no framework declares, and validates the layouts noted at run time.

    Each rank infers a layout from its own tensor. Before an edit the ranks compare the inferred layouts,
    because the edit's collectives use them; for tensors that are only captured, they compare at the end of
    the step.
    """

    def __init__(self, registry: HookRegistry, editing: EditEnvironment, mesh: Mesh) -> None:
        self._registry, self._editing = registry, editing
        self._tp = Mesh((mesh[TENSOR_AXIS],))
        self._size = mesh[TENSOR_AXIS].size
        self._inferred = 0
        self._samples = Mesh(tuple(mesh[n] for n in SAMPLE_AXES))
        self._seen: set[tuple[str, Layout]] = set()
        self._sketches: list[TensorSketch] = []
        self._assumed: dict[str, TensorSketch] = {}

    def note_layout(self, place: str, layout: Layout, local: Tensor) -> None:
        """Note a tensor's layout at run time; after the first pass the ranks compare it at the end of the
        step.
        """
        if (place, layout) in self._seen:
            return
        self._seen.add((place, layout))
        axes = tuple(a.name for a in self._samples if a.size > 1 and a.name not in layout.axes)
        self._sketches.append(sketch_tensor(place, axes, layout, local))

    def is_assumed(self, site: Site | ParameterSite) -> bool:
        """Whether the layout of a tensor that may be sharded over tensor parallel ranks is unknown."""
        plain = self._size > 1 and site.inferred and not site.propagated
        return plain and self._registry.expected(site.name) is None

    def compare_ranks(self, site: str, key: Key, local: Tensor, edits: bool) -> bool:
        """Whether a tensor of unknown layout may be replicated over all tensor parallel ranks.

        Compared in the first pass. For a tensor that is only captured the ranks compare at the end of the
        step, and this call does not wait. For an edited tensor they compare at once, because the edit must
        not see a shard; the call is then collective over `tp`.

        Args:
            site: the name of the site or parameter.
            key: the key of the tensor, or of its gradient.
            local: this rank's tensor.
            edits: whether a hook edits the tensor.
        """
        layout = infer_layout(local.shape, None, 1)
        if (key.site, layout) in self._seen:
            return True
        self._seen.add((key.site, layout))
        sketch = sketch_tensor(key.site, (TENSOR_AXIS,), layout, local)
        if not edits:
            self._assumed.setdefault(key.site, sketch)
            return True
        wrong = self._describe_unlike(gather_objects({key.site: sketch}, self._tp, [TENSOR_AXIS]))
        for hook in self._registry.at(site) if wrong else ():
            self._editing.fired.add(hook)
            self._editing.guard(hook, key, partial(_raise_hook_error, wrong))
        return not wrong

    def _describe_unlike(self, facts: Sequence[Mapping[str, TensorSketch]]) -> str:
        """Describe what differs in tensors of all tensor parallel ranks that should be equal; the same on all
        ranks.
        """
        wrong = ""
        for place in dict.fromkeys(place for sketches in facts for place in sketches):
            first, *others = (sketches[place] for sketches in facts if place in sketches)
            other = next((o for o in others if not first.fits(o, TENSOR_AXIS)), None)
            if other is not None:
                shapes = {"one": first.shape, "other": other.shape, "local": (None,) * len(first.shape)}
                wrong = wrong or TENSORS_DIFFER.format(place=place, **shapes)
            if other is not None or first.norm == 0.0:  # zeros are equal whatever they are a shard of
                self._seen = {(name, layout) for name, layout in self._seen if name != place}
        return wrong

    def layout(self, site: Site | ParameterSite, key: Key, local: Tensor) -> Layout | None:
        """The layout of a tensor at a site, the same on all tensor parallel ranks; None if no hook may see
        the tensor.

        Collective over `tp` if a hook with an editing function is at the site and one expects a shape, or in
        the first pass.
        """
        full = self._registry.expected(site.name)
        hooks = self._registry.at(site.name)
        if full is None and self.is_assumed(site):
            parameter = isinstance(site, ParameterSite)
            edits = any(h.editing_function and (parameter or not h.backward) for h in hooks)
            if not self.compare_ranks(site.name, key, local, edits):
                return None
        if full is None or self._size == 1:
            return infer_layout(local.shape, None, 1)
        inferred = self.layout_expected(site.name, key, local, backward=False)
        return inferred or infer_layout(local.shape, None, 1)

    def layout_expected(self, name: str, key: Key, local: Tensor, backward: bool) -> Layout | None:
        """The layout of a tensor, or of its gradient, from the shape that hooks expect; None if ranks differ.

        Collective over `tp` if a hook edits the tensor, or for `backward` its gradient.
        """
        full, hooks = self._registry.expected(name), self._registry.at(name)
        hook = next((h for h in hooks if h.expected_shape is not None), hooks[0])
        inferred = self._editing.guard(hook, key, partial(infer_layout, local.shape, full, self._size))
        code = _encode_cuts(inferred, local)
        if not any(h.editing_function and (h.backward or not backward) for h in hooks):
            self._inferred = zlib.crc32(f"{self._inferred} {key.site} {code}".encode())
        elif self._differ(code):
            self._editing.guard(hook, key, partial(_raise_hook_error, SHAPES_DIFFER))
            inferred = None
        return inferred

    def describe_shapes(self, at: str, watch: Callable[[], None]) -> str:
        """Describe layouts inferred from expected shapes in this step that differ; empty if none does.

        Collective over `tp` while a hook expects a shape; `at` and `watch` as in `max_over_ranks`.
        """
        code, self._inferred = self._inferred, 0
        return SHAPES_DIFFER if self._registry.has_expected_shapes and self._differ(code, at, watch) else ""

    @property
    def pending(self) -> int:
        """The number of tensors of this step that this rank has to compare with the other ranks."""
        return len(self._sketches) + len(self._assumed)

    def compare(self) -> str:
        """Describe what is wrong with the layouts of this step's captures; empty if nothing is.

        Collective over `tp` and `cp`: the ranks call it if any of them has tensors to compare.
        """
        sketches, self._sketches = self._sketches, []
        assumed, self._assumed = self._assumed, {}
        wrong = ""
        # Every rank makes all of these exchanges: what it knows alone decides nothing before the last one.
        for axis in self._samples:
            facts = gather_objects((sketches, assumed), self._samples, [axis.name]) if axis.size > 1 else []
            if axis.name == TENSOR_AXIS:
                differing = self._describe_unlike([rank_sketches for _, rank_sketches in facts])
                wrong = wrong or differing
            pairs = [
                (sketch, other)
                for rank_sketches, _ in facts
                for sketch, other in zip(sketches, rank_sketches, strict=False)
            ]
            unlike = [pair for pair in pairs if not pair[0].fits(pair[1], axis.name)]
            wrong = wrong or (_describe_difference(*unlike[0], axis.name) if unlike else "")
        return wrong

    def discard(self) -> None:
        """Discard what no rank compares: the tensors of a sink after its first step."""
        self._assumed, self._sketches = {}, []

    def forget(self) -> None:
        """Forget a failed step: its sites are compared again in their next pass, as other ranks may not have
        failed.
        """
        again = {*self._assumed, *(s.place for s in self._sketches)}
        self._seen = {(place, layout) for place, layout in self._seen if place not in again}
        self._assumed, self._sketches, self._inferred = {}, [], 0

    def _differ(self, code: int, at: str = "", watch: Callable[[], None] | None = None) -> bool:
        return not equal_over_ranks(code, self._tp, at, watch)


def _encode_cuts(layout: Layout | None, local: Tensor) -> int:
    """Encode, as one number, the sharded dims of a tensor, its shape and its dtype."""
    cut = None if layout is None else [i for i, d in enumerate(layout.dims) if d.cuts]
    return zlib.crc32(f"{cut} {tuple(local.shape)} {local.dtype}".encode())


def _describe_difference(first: TensorSketch, other: TensorSketch, axis: str) -> str:
    if (first.place, first.layout) != (other.place, other.layout):
        return (
            f"{axis} ranks did not run the same hook points in the same layouts: {first.place} in "
            f"{first.layout} on one, {other.place} in {other.layout} on another; run the same code on them"
        )
    return (
        f"{first.place} was followed to lie as {first.layout}, alike on all {axis} ranks, but they have "
        f"different tensors there, of shapes {first.shape} and {other.shape}: something takes a rank's own "
        "part of what all have; give expected_shape there, or hook another point"
    )


def _raise_hook_error(why: str) -> None:
    raise HookError(why)
