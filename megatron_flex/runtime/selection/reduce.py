"""What can be made of a tensor before it is sent: `reduce.mean("s")`, `norm`, `sum`, `topk`, `dot`.

Each says what a rank makes of its part and how the parts of all ranks become what one device has. Dims are
named, or numbered; those that are reduced go, as in torch.
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
from megatron_flex.runtime.selection import top_entries
from megatron_flex.runtime.selection.entry_selection import DimReference, locate_dim

INDICES = ".indices"  # what the name of the indices of the greatest has behind the name of their values
Results = dict[str, Tensor]  # by what stands behind the site's name


class ReductionContext(NamedTuple):
    """What a reduction is told of the tensor.

    Attributes:
        dims: the dims that it goes along.
        number: how many entries of the whole become one; 0 where only all ranks together know.
        entries: of the last of these dims: where this rank's entries are in the whole's; None for all.
        most: the most of them that a rank has.
        dtype: the whole's.
    """

    dims: tuple[int, ...]
    number: int
    entries: Tensor | None
    most: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Reduction(ABC):
    """One number of many.

    Attributes:
        dims: what it goes along.
        linear: whether that of a sum is the sum of theirs.
        counts: whether it has to know how many entries the whole has.
        sized: whether not every length will do.
    """

    dims: tuple[DimReference, ...]
    linear: ClassVar[bool] = True
    counts: ClassVar[bool] = False
    sized: ClassVar[bool] = False

    @property
    def adds(self) -> bool:
        """Whether a dim comes behind the others."""
        return False

    def __post_init__(self) -> None:
        if not self.dims or len(set(self.dims)) < len(self.dims):
            raise HookError(f"{self.describe()}: name the dims that it goes along, each once")

    def places(self, names: Sequence[str], site: str = "the tensor") -> tuple[int, ...]:
        """Where the dims are.

        Raises:
            HookError: one is not there.
        """
        found = tuple(locate_dim(d, names, self.describe(), site) for d in self.dims)
        if len(set(found)) < len(found):
            raise HookError(f"{self.describe()}: these are not different dims of {site}; name each once")
        return found

    def check(self, length: int, dtype: torch.dtype | None = None) -> None:  # noqa: B027 - most take any
        """Raise a HookError if the last of the dims cannot be of that length, or the tensor of that dtype."""

    @abstractmethod
    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        """What a rank makes of its entries; each of the dims stays, and has one entry, or more to choose of.

        It may have no entry at all.
        """

    @abstractmethod
    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        """What one device has, from the parts of all ranks one behind the other along the dims."""

    @abstractmethod
    def describe(self) -> str:
        """In words."""

    def whole(self, tensor: Tensor, where: ReductionContext) -> Results:
        """What one device has, of the whole."""
        return self.combine(self.part(tensor, where), where)

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether ranks can do their part for tensors of that dtype."""
        return True


def _choose_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
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


@dataclass(frozen=True, eq=False)
class _TopKReduction(Reduction):
    k: int = 1
    largest: bool = True
    linear: ClassVar[bool] = False
    sized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise HookError(f"topk({self.k!r}): k is how many are wanted, at least 1")

    def check(self, length: int, dtype: torch.dtype | None = None) -> None:
        if self.k > length:
            raise HookError(f"{self.describe()}: {self.k} of {length} entries; want at most {length}")
        if dtype is not None and dtype.is_complex:
            raise HookError(f"{self.describe()}: complex numbers have no order; take another tensor")

    def holds(self, dtype: torch.dtype) -> bool:
        return top_entries.is_rankable(dtype)

    def whole(self, tensor: Tensor, where: ReductionContext) -> Results:
        if self.holds(tensor.dtype):
            return super().whole(tensor, where)
        (dim,) = where.dims
        found = tensor.sort(dim=dim, descending=self.largest, stable=True)
        return {"": found.values.narrow(dim, 0, self.k), INDICES: found.indices.narrow(dim, 0, self.k)}

    def part(self, local: Tensor, where: ReductionContext) -> Tensor:
        (dim,) = where.dims
        return top_entries.select_candidates(local, dim, where.entries, min(self.k, where.most), self.largest)

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        (dim,) = where.dims
        values, indices = top_entries.select_top(parts, dim, self.k, self.largest, where.dtype)
        return {"": values, INDICES: indices}

    def describe(self) -> str:
        return f"topk({self.k}, {self.dims[0]}" + ("" if self.largest else ", smallest") + ")"


@dataclass(frozen=True, eq=False)
class _DotReduction(Reduction):
    direction: Tensor = field(default_factory=lambda: torch.ones(1), repr=False)
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
            _choose_sum_dtype(where.dtype) if where.dtype.is_floating_point or where.dtype.is_complex else torch.float32
        )
        direction = self.direction.to(local.device, wide)
        if where.entries is not None:
            direction = direction[..., where.entries]
        found: Tensor = local.to(wide) @ (direction.mT if self.adds else direction)
        return found.unsqueeze(-2 if self.adds else -1)

    def combine(self, parts: Tensor, where: ReductionContext) -> Results:
        total = _widen(parts).sum(where.dims)
        return {"": total.to(where.dtype if where.dtype.is_floating_point else parts.dtype)}

    def describe(self) -> str:
        return f"dot({'x'.join(map(str, self.direction.shape))} #{checksum(self.direction) % 0xFFFFFB:06x})"


def mean(*dims: DimReference) -> Reduction:
    """The mean along dims, summed in fp32 and rounded once."""
    return _MeanReduction(dims)


def sum(*dims: DimReference) -> Reduction:
    """The sum along dims, made in fp32 and rounded once."""
    return _SumReduction(dims)


def norm(*dims: DimReference) -> Reduction:
    """The root of the sum of squares along dims."""
    return _NormReduction(dims)


def topk(k: int, dim: DimReference, largest: bool = True) -> Reduction:
    """The greatest, or smallest, along a dim, in order; of equal ones those with the lowest index.

    They are kept under the site's name, and their indices, in what was selected, under that with `.indices`.
    """
    return _TopKReduction((dim,), k, largest)


def dot(direction: Tensor) -> Reduction:
    """The product with a direction along the last dim.

    Args:
        direction: `[h]`, which leaves no such dim, or `[k, h]`, which leaves one of k.
    """
    if not isinstance(direction, Tensor) or direction.ndim not in (1, 2) or not direction.numel():
        shape = tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise HookError(f"dot: a direction is a tensor [h] or [k, h], not {shape}")
    return _DotReduction((-1,), direction.detach())
