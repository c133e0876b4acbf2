"""How far two correct runs may differ at a site: given, derived from dtype and depth, or measured.

A reduction with another order of summation or other roundings has an error of the unit roundoff of its
result, and of the fp32 roundoff for each term. Such errors are independent, so that they grow
as the square root of the number of reductions before a site; its gradient has those of the full forward pass
and of the backward pass so far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT
from megatron_flex.dump.schema import Manifest

REDUCTIONS_PER_LAYER = (
    8  # norm, qkv, scores, softmax, their product with values, proj, norm, fc1, fc2: in sequence
)
DERIVED_MARGIN = 6.0  # factor of derived tolerances over the expected independent errors
MEASURED_MARGIN = 5.0  # factor of measured tolerances over the noise
DEFAULT_REDUCTION_WIDTH = 4096  # terms of a sum, where the model's width is unknown
MAX_PEAK_TOLERANCE = 0.75  # of the greatest difference over the peak, which single entries reach
MAX_TOLERANCE = 0.5  # upper bound of tolerances: unrelated tensors differ by 1 or more
FP8_ROUNDOFF = 2.0**-4  # of e4m3
FP32_ROUNDOFF = 2.0**-24  # unit roundoff of the sums inside a kernel
WIDTH_FIELDS = ("hidden_size", "n_embd")  # of configs of Megatron and transformers
LAYER_FIELDS = ("num_layers", "num_hidden_layers", "n_layer")
LAYER_PATTERN = re.compile(r"\.(\d+)(?=[.:]|$)")


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a dump's numbers.

    Attributes:
        computed: the compute dtype of the run.
        stored: the dtype that the dump was cast to; None if it was not.
        width: the hidden size.
        layers: the number of layers; 0 if unknown.
        fp8: whether linears multiply in fp8.
    """

    computed: torch.dtype | None = None
    stored: torch.dtype | None = None
    width: int = DEFAULT_REDUCTION_WIDTH
    layers: int = 0
    fp8: bool = False

    def get_unit(self, dtype: torch.dtype | None = None) -> float:
        """The roundoff of one reduction, with that of the sums inside a kernel.

        Where an operand is quantized to fp8, round-off in the dtype around it moves the share `u / u8` of its
        entries over a boundary, by `u8` each: together the root of `u * u8`.

        Args:
            dtype: of a tensor, for a run whose compute dtype is unknown.
        """
        unit = get_unit_roundoff(self.computed or dtype)
        if self.fp8:
            unit = math.sqrt(unit * FP8_ROUNDOFF)
        return unit + FP32_ROUNDOFF * math.sqrt(self.width)


def make_precision(
    model: Mapping[str, Any], computed: torch.dtype | None = None, stored: torch.dtype | None = None
) -> Precision:
    """From a model's config.

    Args:
        model: the fields of the config, as Megatron or transformers names them.
        computed: the compute dtype where none of the fields gives it.
        stored: the dtype that a dump was cast to.
    """
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    computed = next((dtype for name, dtype in half.items() if model.get(name)), computed)
    width, layers = (
        next((int(model[name]) for name in names if model.get(name)), 0)
        for names in (WIDTH_FIELDS, LAYER_FIELDS)
    )
    return Precision(computed, stored, width or DEFAULT_REDUCTION_WIDTH, layers, bool(model.get("fp8")))


def read_precision(manifest: Manifest, dtypes: Sequence[torch.dtype] = ()) -> Precision:
    """From the model's config and the dump's settings.

    Args:
        manifest: of the dump.
        dtypes: of its tensors, from which the compute dtype follows where the manifest has none.
    """
    cast = getattr(torch, str(manifest.settings.get("dtype") or ""), None)
    stored = cast if isinstance(cast, torch.dtype) else None
    # A cast to a dtype would not have been requested of a run that computes in it.
    known = torch.float32 if stored is not None else find_coarsest_dtype(dtypes) if dtypes else None
    return make_precision(manifest.model, known, stored)


def get_unit_roundoff(dtype: torch.dtype | None) -> float:
    """The unit roundoff of a dtype; that of fp32 for non-floats."""
    if dtype is None or not dtype.is_floating_point:
        return FP32_ROUNDOFF
    return float(torch.finfo(dtype).eps) / 2


def find_coarsest_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The floating dtype with the greatest unit roundoff; fp32 if there is none."""
    return max((d for d in dtypes if d.is_floating_point), key=get_unit_roundoff, default=torch.float32)


@dataclass
class ReductionDepths:
    """The number of reductions before each site, from its name and its position in the order.

    Args:
        order: names of sites in execution order, values only.
        layers: the model's number of layers, at least the highest layer in the names.
    """

    order: Sequence[str]
    layers: int = 0
    _after_layers: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        numbers = [n for n in map(parse_layer_number, self.order) if n is not None]
        self.layers = max([self.layers, *(n + 1 for n in numbers)])
        after_layers, in_layers = set(), False
        for name in self.order:
            in_layers = in_layers or parse_layer_number(name) is not None
            if in_layers and parse_layer_number(name) is None:
                after_layers.add(name)
        self._after_layers = frozenset(after_layers)

    @property
    def full_depth(self) -> int:
        """The depth of the full forward pass."""
        return REDUCTIONS_PER_LAYER * max(self.layers, 1) + REDUCTIONS_PER_LAYER // 2

    @property
    def layer(self) -> int:
        """The depth of a layer by itself."""
        return REDUCTIONS_PER_LAYER + 1

    def forward(self, name: str) -> int:
        """The depth of a site's value."""
        layer = parse_layer_number(name)
        if layer is not None:
            return (
                REDUCTIONS_PER_LAYER * ((self.layers + layer if name.startswith("mtp.") else layer) + 1) + 1
            )
        return self.full_depth if name in self._after_layers else 1

    def depth_of(self, item: ComparedTensor) -> int:
        """The depth of a site's value or gradient, a parameter's gradient, or a parameter."""
        if item.kind == GRADIENT:
            return 2 * self.full_depth - self.forward(item.site) + 1
        if item.kind in (PARAMETER, PARAMETER_GRADIENT):
            return 2 * self.full_depth
        return self.forward(item.name)


def parse_layer_number(name: str) -> int | None:
    """The layer number of a site; None outside of layers."""
    matched = LAYER_PATTERN.search(name)
    return None if matched is None else int(matched[1])


def get_cast_roundoff(precisions: Sequence[Precision], dtypes: Sequence[torch.dtype]) -> float:
    """The roundoff of casts: of dumps that were cast, and of two dtypes that differ."""
    return sum(
        get_unit_roundoff(dtype)
        for precision, dtype in zip(precisions, dtypes, strict=True)
        if dtype.is_floating_point and (precision.stored is not None or dtypes[0] != dtypes[1])
    )


def derive_tolerance(
    item: ComparedTensor,
    depth: int,
    precisions: Sequence[Precision],
    dtypes: Sequence[torch.dtype],
    most: float = MAX_TOLERANCE,
) -> float:
    """The tolerance from dtype and depth, of runs with the same parameters.

    Args:
        item: the compared tensor.
        depth: reductions before it.
        precisions: of both dumps.
        dtypes: of both tensors, as dumped.
        most: its upper bound.
    """
    unit = max(precision.get_unit(dtype) for precision, dtype in zip(precisions, dtypes, strict=True))
    bound = 0.0 if item.kind == PARAMETER else DERIVED_MARGIN * unit * math.sqrt(depth)
    return min(bound + 2 * get_cast_roundoff(precisions, dtypes), most)


class Tolerances:
    """The tolerances, by site.

    Args:
        given_tolerance: a bound for all, or patterns (globs over names; the first match counts) with one
            each, the others derived; None: all derived.
        order: the names of the sites in the order of execution.
        precisions: of the two runs.
    """

    def __init__(
        self,
        given_tolerance: float | Mapping[str, float] | None,
        order: Sequence[str],
        precisions: Sequence[Precision],
    ) -> None:
        self.given_tolerance, self.precisions = given_tolerance, precisions
        self.depths = ReductionDepths(order, max(p.layers for p in precisions))

    @property
    def unit(self) -> float:
        """The unit roundoff of the less precise run, with that of the sums inside a kernel."""
        return max(p.get_unit() for p in self.precisions)

    @property
    def fp8(self) -> bool:
        """Whether a run multiplies in fp8."""
        return any(p.fp8 for p in self.precisions)

    @property
    def gradient_noise(self) -> float:
        """The derived tolerance of gradients of parameters."""
        return min(DERIVED_MARGIN * self.unit * math.sqrt(2 * self.depths.full_depth), MAX_TOLERANCE)

    def given(self, item: ComparedTensor) -> float | None:
        """The bound that the caller gave for a site; None if it is to be derived or measured."""
        if isinstance(self.given_tolerance, Mapping):
            tolerance = next((t for p, t in self.given_tolerance.items() if fnmatchcase(item.name, p)), None)
            return None if tolerance is None else float(tolerance)
        return None if self.given_tolerance is None else float(self.given_tolerance)

    def derived(
        self,
        item: ComparedTensor,
        dtypes: Sequence[torch.dtype],
        depth: int | None = None,
        most: float = MAX_TOLERANCE,
    ) -> float:
        """The bound from dtype and depth.

        Args:
            item: the compared tensor.
            dtypes: of both tensors.
            depth: reductions before it; None for those of its site.
            most: its upper bound.
        """
        depth = self.depths.depth_of(item) if depth is None else depth
        return derive_tolerance(item, depth, self.precisions, dtypes, most)

    def bound(
        self, item: ComparedTensor, dtypes: Sequence[torch.dtype], isolated: bool = False, more: float = 0.0
    ) -> float:
        """The given bound, or that from dtype and depth.

        Args:
            item: the compared tensor.
            dtypes: of both tensors.
            isolated: whether both runs began with the same input of the layer.
            more: what the tensors may differ by besides.
        """
        given = self.given(item)
        if given is not None:
            return given
        depth = min(self.depths.depth_of(item), self.depths.layer) if isolated else None
        return min(self.derived(item, dtypes, depth) + more, MAX_TOLERANCE)

    def cast(self, dtypes: Sequence[torch.dtype]) -> float:
        """What casts of the dumped values may add."""
        return 2 * get_cast_roundoff(self.precisions, dtypes)
