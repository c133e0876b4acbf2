"""How far two right runs may differ at a site: said, derived from dtype and depth, or measured.

A reduction whose terms are added in another order, or rounded apart, errs by the unit roundoff of what it
writes, and by that of fp32 for each of its terms that it adds. Such errors are independent, so that they grow
as the square root of how many reductions lie behind a place; its gradient has those of the whole forward pass
and of the way back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from megatron_flex.compare.source import GRADIENT, PARAMETER, PARAMETER_GRADIENT, Item, Source

PER_LAYER = 8  # norm, qkv, scores, softmax, their product with values, proj, norm, fc1, fc2: in a row
MARGIN = 6.0  # of derived tolerances, over what independent errors come to
MEASURED = 5.0  # of measured ones, over the noise
WIDTH = 4096  # terms of a sum, where the model does not say
UNRELATED = (
    0.5  # no tolerance is greater: tensors that have nothing to do with each other differ by 1 or more
)
FP32 = 2.0**-24  # unit roundoff of the sums inside a kernel
LAYER = re.compile(r"\.(\d+)(?=[.:]|$)")


@dataclass(frozen=True, slots=True)
class Precision:
    """How a dump's numbers came to be.

    Attributes:
        computed: the dtype in which the run computed.
        stored: the dtype that the dump was cast to; None if it was not.
        width: of the hidden stream.
        layers: of the model; 0 if it does not say.
    """

    computed: torch.dtype | None = None
    stored: torch.dtype | None = None
    width: int = WIDTH
    layers: int = 0


def precision_of(source: Source) -> Precision:
    """From the model's config and the dump's settings, as its manifest has them."""
    model, settings = source.manifest.model, source.manifest.settings
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    computed = next((dtype for name, dtype in half.items() if model.get(name)), None)
    cast = getattr(torch, str(settings.get("dtype") or ""), None)
    stored = cast if isinstance(cast, torch.dtype) else None
    if computed is None and stored is not None:
        computed = torch.float32  # or the cast would not have been asked for
    width, layers = model.get("hidden_size"), model.get("num_layers")
    return Precision(computed, stored, int(width or WIDTH), int(layers or 0))


def roundoff(dtype: torch.dtype | None) -> float:
    """The unit roundoff of a dtype; that of fp32 for what is no float."""
    if dtype is None or not dtype.is_floating_point:
        return FP32
    return float(torch.finfo(dtype).eps) / 2


@dataclass
class Depths:
    """How many reductions lie behind each place, by its name and its place in the order.

    Args:
        order: names of sites in execution order, values only.
        layers: how many the model has; as many as the names show, if they show more.
    """

    order: Sequence[str]
    layers: int = 0
    _behind: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        numbers = [n for n in map(layer_of, self.order) if n is not None]
        self.layers = max([self.layers, *(n + 1 for n in numbers)])
        behind, seen = set(), False
        for name in self.order:
            seen = seen or layer_of(name) is not None
            if seen and layer_of(name) is None:
                behind.add(name)
        self._behind = frozenset(behind)

    @property
    def whole(self) -> int:
        """Of the forward pass."""
        return PER_LAYER * max(self.layers, 1) + PER_LAYER // 2

    def forward(self, name: str) -> int:
        """Of a site's value."""
        layer = layer_of(name)
        if layer is not None:
            return PER_LAYER * ((self.layers + layer if name.startswith("mtp.") else layer) + 1) + 1
        return self.whole if name in self._behind else 1

    def of(self, item: Item) -> int:
        """Of a site's value or gradient, a parameter's gradient, or a parameter."""
        if item.kind == GRADIENT:
            return 2 * self.whole - self.forward(item.site) + 1
        if item.kind in (PARAMETER, PARAMETER_GRADIENT):
            return 2 * self.whole
        return self.forward(item.name)


def layer_of(name: str) -> int | None:
    """The number of the layer that a place is in; None outside of layers."""
    found = LAYER.search(name)
    return None if found is None else int(found[1])


def derived(
    item: Item,
    depth: int,
    precisions: Sequence[Precision],
    dtypes: Sequence[torch.dtype],
    steps: int,
) -> float:
    """The tolerance from dtype and depth.

    Args:
        item: what is compared.
        depth: reductions behind it.
        precisions: of both dumps.
        dtypes: of both tensors, as they are in the dumps.
        steps: how many training steps the errors of which went into the parameters came before.
    """
    unit, cast = 0.0, 0.0
    for precision, dtype in zip(precisions, dtypes, strict=True):
        here = roundoff(precision.computed or dtype)
        unit = max(unit, here + FP32 * math.sqrt(precision.width))
        if dtype.is_floating_point and (precision.stored is not None or dtypes[0] != dtypes[1]):
            cast += roundoff(dtype)
    bound = MARGIN * unit * math.sqrt(depth)
    if item.kind == PARAMETER:
        # At first nothing was computed. Later an optimizer has divided gradients by their own size, which
        # makes a whole step of the last digits of one that is nearly zero.
        bound = math.sqrt(bound) if steps else 0.0
    else:
        bound *= 1 + steps
    return min(bound + 2 * cast, UNRELATED)


class Tolerances:
    """What may be, place by place.

    Args:
        said: a bound for all, or patterns (globs over names; the first that fits counts) with one each, the
            others derived; None: all derived.
        a: the one dump.
        b: the other.
        depths: of places.
    """

    def __init__(
        self, said: float | Mapping[str, float] | None, a: Source, b: Source, depths: Depths
    ) -> None:
        self.said, self.depths = said, depths
        self.precisions = precision_of(a), precision_of(b)

    def of(self, item: Item, dtypes: Sequence[torch.dtype], steps: int, noise: float | None = None) -> float:
        """The tolerance of one place.

        Args:
            item: what is compared.
            dtypes: of both tensors.
            steps: how many training steps came before that may have moved the parameters apart.
            noise: as it was measured there; None where it was not.
        """
        if isinstance(self.said, Mapping):
            found = next((t for p, t in self.said.items() if fnmatchcase(item.name, p)), None)
            if found is not None:
                return float(found)
        elif self.said is not None:
            return float(self.said)
        if noise is not None:
            return max(MEASURED * noise, derived(item, 1, self.precisions, dtypes, 0))
        return derived(item, self.depths.of(item), self.precisions, dtypes, steps)
