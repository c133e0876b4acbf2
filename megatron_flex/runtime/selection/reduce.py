"""Reductions of a tensor before it is sent: `reduce.mean("s")`, `norm`, `sum`, `topk`, `dot`.

Each reduction defines the contribution of a local shard, and how the contributions of all ranks combine to
the single-device result. Dims are named or numbered; reduced dims are removed, as in torch.

Examples:
    >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.3", reduce=mf.reduce.norm("h")))
    >>> losses = train_step(chunks)
    >>> flex.output_dict["decoder.layers.3:output"][0].shape
    torch.Size([16, 2])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives import checksum
from megatron_flex.errors import HookError
from megatron_flex.runtime.selection.entry_selection import DimReference, locate_dim

LOW_BITS = 0xFFFFFFFF
NAN_BITS = 0x7FC00000
NO_ENTRY = -(1 << 63)  # marks a missing entry


def is_rankable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype fit into the upper half."""
    return not dtype.is_complex and dtype.itemsize <= 4


def select_candidates(local: Tensor, dim: int, entries: Tensor | None, count: int, largest: bool) -> Tensor:
    """The candidates of a rank.

    Args:
        local: its shard.
        dim: the dim along which entries are selected.
        entries: the indices of the shard's entries in the full tensor; None if they are the same.
        count: the number of candidates; a smaller shard is filled up with markers of missing entries.
        largest: whether to select the largest entries, which include NaN, or the smallest.
    """
    shape = [1] * local.ndim
    shape[dim] = local.shape[dim]
    places = torch.arange(local.shape[dim], device=local.device) if entries is None else entries
    keys = (_order_values(local, largest) << 32) | (LOW_BITS - places.view(shape))
    keys = keys.topk(min(count, local.shape[dim]), dim).values
    missing = count - keys.shape[dim]
    if missing:
        shape = list(keys.shape)
        shape[dim] = missing
        keys = torch.cat([keys, keys.new_full(shape, NO_ENTRY)], dim)
    return keys


def select_top(
    candidates: Tensor, dim: int, k: int, largest: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The values and indices of the top k, from the candidates of all ranks."""
    keys = candidates.topk(k, dim).values
    return _restore_values(keys >> 32, largest, dtype), LOW_BITS - (keys & LOW_BITS)


def _order_values(values: Tensor, largest: bool) -> Tensor:
    """32-bit integers in the order of the values, as int64."""
    if values.dtype.is_floating_point:
        bits = (values.float() + 0.0).view(torch.int32)  # +0 and -0 are equal
        bits = torch.where(values.isnan(), NAN_BITS, bits)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = values.to(torch.int32)
    return (bits if largest else ~bits).long()


def _restore_values(ordered: Tensor, largest: bool, dtype: torch.dtype) -> Tensor:
    bits = ordered.to(torch.int32)
    bits = bits if largest else ~bits
    if not dtype.is_floating_point:
        return bits.to(dtype)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32).to(dtype)


INDICES = ".indices"  # suffix of the indices of the top entries
Results = dict[str, Tensor]  # by the suffix of the site's name


class ReductionContext(NamedTuple):
    """The tensor's properties that a reduction uses.

    Attributes:
        dims: the dims to reduce.
        number: the number of entries of the full tensor that become one; 0 if only all ranks together know.
        entries: the indices, in the last of these dims of the full tensor, of this rank's entries; None for
            all.
        most: the largest number of these entries on any rank.
        dtype: the full tensor's dtype.
    """

    dims: tuple[int, ...]
    number: int
    entries: Tensor | None
    most: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, repr=False)
class Reduction(ABC):
    """Reduces many numbers to one.

    Attributes:
        dims: the dims to reduce.
        linear: whether the reduction of a sum is the sum of the reductions.
        counts: whether the reduction needs the number of entries of the full tensor.
        sized: whether some lengths are invalid.
    """

    dims: tuple[DimReference, ...]
    linear: ClassVar[bool] = True
    counts: ClassVar[bool] = False
    sized: ClassVar[bool] = False

    @property
    def adds(self) -> bool:
        """Whether the result has a new last dim."""
        return False

    def __post_init__(self) -> None:
        if not self.dims or len(set(self.dims)) < len(self.dims):
            raise HookError(f"{self.describe()}: name the dims that it goes along, each once")

    def places(self, names: Sequence[str], site: str = "the tensor") -> tuple[int, ...]:
        """The indices of the dims.

        Raises:
            HookError: a dim does not exist.
        """
        indices = tuple(locate_dim(d, names, self.describe(), site) for d in self.dims)
        if len(set(indices)) < len(indices):
            raise HookError(f"{self.describe()}: these are not different dims of {site}; name each once")
        return indices

    def check(self, length: int, dtype: torch.dtype | None = None) -> None:  # noqa: B027 - most take any
        """Raise a HookError if the length of the last dim, or the tensor's dtype, is invalid."""

    @abstractmethod
    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        """The contribution of the local shard; each of the dims is kept, with one entry, or several
        candidates.

        The shard may be empty.
        """

    @abstractmethod
    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        """The single-device result, from the contributions of all ranks concatenated along the dims."""

    @abstractmethod
    def describe(self) -> str:
        """The reduction as text."""

    def __repr__(self) -> str:
        return self.describe()

    def reduce_full(self, tensor: Tensor, where: ReductionContext) -> Results:
        """The reduction of the full tensor, as on a single device."""
        return self.combine(self.part(tensor, where), where)

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether local shards of that dtype can be reduced before they are sent."""
        return True


def _choose_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _SumReduction(Reduction):
    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        return local.sum(where.dims, keepdim=True, dtype=_choose_sum_dtype(local.dtype))

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        total = _widen(parts).sum(where.dims)
        return {"": total.to(where.dtype) if where.dtype.is_floating_point else total}

    def describe(self) -> str:
        return f"sum({', '.join(map(str, self.dims))})"


class _MeanReduction(_SumReduction):
    counts = True

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        mean = _widen(parts).sum(where.dims) / where.number
        exact = not where.dtype.is_floating_point and not where.dtype.is_complex
        return {"": mean.to(torch.float32 if exact else where.dtype)}

    def describe(self) -> str:
        return f"mean({', '.join(map(str, self.dims))})"


class _NormReduction(Reduction):
    linear = False

    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        values = local.abs() if local.is_complex() else local
        values = values if values.is_floating_point() else values.float()
        norm: Tensor = torch.linalg.vector_norm(
            values, 2, where.dims, keepdim=True, dtype=_choose_sum_dtype(values.dtype)
        )
        return norm

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        norm = torch.linalg.vector_norm(parts.double(), 2, where.dims)
        return {"": norm.to(where.dtype if where.dtype.is_floating_point else parts.dtype)}

    def describe(self) -> str:
        return f"norm({', '.join(map(str, self.dims))})"


@dataclass(frozen=True, eq=False, repr=False)
class _TopKReduction(Reduction):
    k: int = 1
    largest: bool = True
    linear: ClassVar[bool] = False
    sized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise HookError(f"topk({self.k!r}): k is the number of entries, at least 1")

    def check(self, length: int, dtype: torch.dtype | None = None) -> None:
        if self.k > length:
            raise HookError(f"{self.describe()}: {self.k} of {length} entries; take at most {length}")
        if dtype is not None and dtype.is_complex:
            raise HookError(f"{self.describe()}: complex numbers have no order; take another tensor")

    def holds(self, dtype: torch.dtype) -> bool:
        return is_rankable(dtype)

    def reduce_full(self, tensor: Tensor, where: ReductionContext) -> Results:
        if self.holds(tensor.dtype):
            return super().reduce_full(tensor, where)
        (dim,) = where.dims
        ordered = tensor.sort(dim=dim, descending=self.largest, stable=True)
        return {"": ordered.values.narrow(dim, 0, self.k), INDICES: ordered.indices.narrow(dim, 0, self.k)}

    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        (dim,) = where.dims
        return select_candidates(local, dim, where.entries, min(self.k, where.most), self.largest)

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        (dim,) = where.dims
        values, indices = select_top(parts, dim, self.k, self.largest, where.dtype)
        return {"": values, INDICES: indices}

    def describe(self) -> str:
        return f"topk({self.k}, {self.dims[0]}" + ("" if self.largest else ", smallest") + ")"


@dataclass(frozen=True, eq=False, repr=False)
class _DotReduction(Reduction):
    direction: Tensor = field(default_factory=lambda: torch.ones(1), repr=False)
    _moved: dict[tuple[torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    sized: ClassVar[bool] = True

    @property
    def adds(self) -> bool:
        return self.direction.ndim == 2

    def check(self, length: int, dtype: torch.dtype | None = None) -> None:
        if self.direction.shape[-1] != length:
            raise HookError(
                f"{self.describe()}: a direction of {self.direction.shape[-1]} for a last dim of {length}; "
                "give one number for each entry"
            )

    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        wide = (
            _choose_sum_dtype(where.dtype)
            if where.dtype.is_floating_point or where.dtype.is_complex
            else torch.float32
        )
        at = local.device, wide
        if at not in self._moved:  # once: the copy makes the host wait for the device
            self._moved[at] = self.direction.to(*at)
        direction = self._moved[at]
        if where.entries is not None:
            direction = direction[..., where.entries]
        products: Tensor = local.to(wide) @ (direction.mT if self.adds else direction)
        return products.unsqueeze(-2 if self.adds else -1)

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        total = _widen(parts).sum(where.dims)
        return {"": total.to(where.dtype if where.dtype.is_floating_point else parts.dtype)}

    def describe(self) -> str:
        return f"dot({'x'.join(map(str, self.direction.shape))} #{checksum(self.direction) % 0xFFFFFB:06x})"


def mean(*dims: DimReference) -> Reduction:
    """The mean along dims, summed in fp32 and rounded once."""
    return _MeanReduction(dims)


def sum(*dims: DimReference) -> Reduction:
    """The sum along dims, computed in fp32 and rounded once."""
    return _SumReduction(dims)


def norm(*dims: DimReference) -> Reduction:
    """The root of the sum of squares along dims."""
    return _NormReduction(dims)


def topk(k: int, dim: DimReference, largest: bool = True) -> Reduction:
    """The largest, or smallest, entries along a dim, in order; among equal entries those with the lowest
    index.

    The values are captured under the site's name, and their indices within the selection with the suffix
    `.indices`.
    """
    return _TopKReduction((dim,), k, largest)


def dot(direction: Tensor) -> Reduction:
    """The product with a direction along the last dim.

    Args:
        direction: `[h]`, which removes the last dim, or `[k, h]`, which replaces it by a dim of length k.
    """
    if not isinstance(direction, Tensor) or direction.ndim not in (1, 2) or not direction.numel():
        shape = tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise HookError(f"dot: a direction is a tensor [h] or [k, h], not {shape}")
    return _DotReduction((-1,), direction.detach())
