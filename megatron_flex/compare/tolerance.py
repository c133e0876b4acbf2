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

import torch

from megatron_flex.compare.compared_dump import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    ComparedDump,
    ComparedTensor,
)
from megatron_flex.dump.schema import read_settings

REDUCTIONS_PER_LAYER = (
    8  # norm, qkv, scores, softmax, their product with values, proj, norm, fc1, fc2: in sequence
)
DERIVED_MARGIN = 6.0  # factor of derived tolerances over the expected independent errors
MEASURED_MARGIN = 5.0  # factor of measured tolerances over the noise
DEFAULT_REDUCTION_WIDTH = 4096  # terms of a sum, where the model's width is unknown
MOST_TOLERANCE = 0.5  # upper bound of tolerances: unrelated tensors differ by 1 or more
FP32_ROUNDOFF = 2.0**-24  # unit roundoff of the sums inside a kernel
LAYER_PATTERN = re.compile(r"\.(\d+)(?=[.:]|$)")


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a dump's numbers.

    Attributes:
        computed: the compute dtype of the run.
        stored: the dtype that the dump was cast to; None if it was not.
        width: the hidden size.
        layers: the number of layers; 0 if unknown.
    """

    computed: torch.dtype | None = None
    stored: torch.dtype | None = None
    width: int = DEFAULT_REDUCTION_WIDTH
    layers: int = 0


def read_precision(source: ComparedDump) -> Precision:
    """From the model's config and the dump's settings, as its manifest has them."""
    model, settings = source.manifest.model, read_settings(source.manifest.settings)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    computed = next((dtype for name, dtype in half.items() if model.get(name)), None)
    cast = getattr(torch, str(settings.dtype or ""), None)
    stored = cast if isinstance(cast, torch.dtype) else None
    if computed is None and stored is not None:
        computed = torch.float32  # otherwise the cast would not have been requested
    width, layers = model.get("hidden_size"), model.get("num_layers")
    return Precision(computed, stored, int(width or DEFAULT_REDUCTION_WIDTH), int(layers or 0))


def get_unit_roundoff(dtype: torch.dtype | None) -> float:
    """The unit roundoff of a dtype; that of fp32 for non-floats."""
    if dtype is None or not dtype.is_floating_point:
        return FP32_ROUNDOFF
    return float(torch.finfo(dtype).eps) / 2


@dataclass
class ReductionDepths:
    """The number of reductions before each site, from its name and its position in the order.

    Args:
        order: names of sites in execution order, values only.
        layers: the model's number of layers, at least the highest layer in the names.
    """

    order: Sequence[str]
    layers: int = 0
    _behind: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        numbers = [n for n in map(parse_layer_number, self.order) if n is not None]
        self.layers = max([self.layers, *(n + 1 for n in numbers)])
        after_layers, in_layers = set(), False
        for name in self.order:
            in_layers = in_layers or parse_layer_number(name) is not None
            if in_layers and parse_layer_number(name) is None:
                after_layers.add(name)
        self._behind = frozenset(after_layers)

    @property
    def whole(self) -> int:
        """The depth of the full forward pass."""
        return REDUCTIONS_PER_LAYER * max(self.layers, 1) + REDUCTIONS_PER_LAYER // 2

    def forward(self, name: str) -> int:
        """The depth of a site's value."""
        layer = parse_layer_number(name)
        if layer is not None:
            return (
                REDUCTIONS_PER_LAYER * ((self.layers + layer if name.startswith("mtp.") else layer) + 1) + 1
            )
        return self.whole if name in self._behind else 1

    def of(self, item: ComparedTensor) -> int:
        """The depth of a site's value or gradient, a parameter's gradient, or a parameter."""
        if item.kind == GRADIENT:
            return 2 * self.whole - self.forward(item.site) + 1
        if item.kind in (PARAMETER, PARAMETER_GRADIENT):
            return 2 * self.whole
        return self.forward(item.name)


def parse_layer_number(name: str) -> int | None:
    """The layer number of a site; None outside of layers."""
    found = LAYER_PATTERN.search(name)
    return None if found is None else int(found[1])


def derive_tolerance(
    item: ComparedTensor,
    depth: int,
    precisions: Sequence[Precision],
    dtypes: Sequence[torch.dtype],
    steps: int,
) -> float:
    """The tolerance from dtype and depth.

    Args:
        item: the compared tensor.
        depth: reductions before it.
        precisions: of both dumps.
        dtypes: of both tensors, as dumped.
        steps: the number of earlier training steps, whose errors are in the parameters.
    """
    unit, cast = 0.0, 0.0
    for precision, dtype in zip(precisions, dtypes, strict=True):
        own_roundoff = get_unit_roundoff(precision.computed or dtype)
        unit = max(unit, own_roundoff + FP32_ROUNDOFF * math.sqrt(precision.width))
        if dtype.is_floating_point and (precision.stored is not None or dtypes[0] != dtypes[1]):
            cast += get_unit_roundoff(dtype)
    bound = DERIVED_MARGIN * unit * math.sqrt(depth)
    if item.kind == PARAMETER:
        # At first nothing was computed. Later an optimizer has divided gradients by their own size, which
        # makes a whole step of the last digits of one that is nearly zero.
        bound = math.sqrt(bound) if steps else 0.0
    else:
        bound *= 1 + steps
    return min(bound + 2 * cast, MOST_TOLERANCE)


class Tolerances:
    """The tolerances, by site.

    Args:
        said: a bound for all, or patterns (globs over names; the first match counts) with one each, the
            others derived; None: all derived.
        a: the first dump.
        b: the second dump.
        depths: of the sites.
    """

    def __init__(
        self,
        said: float | Mapping[str, float] | None,
        a: ComparedDump,
        b: ComparedDump,
        depths: ReductionDepths,
    ) -> None:
        self.said, self.depths = said, depths
        self.precisions = read_precision(a), read_precision(b)

    def of(
        self, item: ComparedTensor, dtypes: Sequence[torch.dtype], steps: int, noise: float | None = None
    ) -> float:
        """The tolerance of one site.

        Args:
            item: the compared tensor.
            dtypes: of both tensors.
            steps: the number of earlier training steps that may have moved the parameters apart.
            noise: the measured noise there; None where it was not measured.
        """
        if isinstance(self.said, Mapping):
            found = next((t for p, t in self.said.items() if fnmatchcase(item.name, p)), None)
            if found is not None:
                return float(found)
        elif self.said is not None:
            return float(self.said)
        if noise is not None:
            return max(MEASURED_MARGIN * noise, derive_tolerance(item, 1, self.precisions, dtypes, 0))
        return derive_tolerance(item, self.depths.of(item), self.precisions, dtypes, steps)
