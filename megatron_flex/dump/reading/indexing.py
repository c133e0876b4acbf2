"""What a person writes between brackets, as entries of each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_flex.errors import DumpError
from megatron_flex.layout import DimIndex, compact_index


class IndexOutOfRange(DumpError, IndexError):
    """An index that the axis does not have."""


def parse_index_key(key: Any, shape: Sequence[int], dims: Sequence[str]) -> list[DimIndex | int]:
    """What `array[key]` means, axis by axis.

    Integers drop their axis; slices may have steps, also negative ones; lists, 1-dim tensors and 1-dim masks
    choose along their own axis, each by itself.

    Args:
        key: as Python hands it over.
        shape: of the array.
        dims: the axes' names, for errors.

    Raises:
        DumpError: too many indices, or one that is none of these.
        OutOfRange: an entry that the axis does not have.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1:
        raise DumpError("more than one ... in an index")
    given = len(keys) - len(dots)
    if given > len(shape):
        raise DumpError(f"{given} indices for an array of {len(shape)} axes ({', '.join(dims)})")
    fill: list[Any] = [slice(None)] * (len(shape) - given)
    at = dots[0] if dots else len(keys)
    keys = keys[:at] + fill + keys[at + len(dots) :]
    return [_parse_axis_key(k, n, d) for k, n, d in zip(keys, shape, dims, strict=True)]


def _parse_axis_key(key: Any, length: int, dim: str) -> DimIndex | int:
    if isinstance(key, slice):
        try:
            return compact_index(range(length)[key])
        except (TypeError, ValueError) as error:
            raise DumpError(f"{key!r} is no slice of {dim!r}: {error}") from None
    if key is None or isinstance(key, (str, float)):
        raise DumpError(f"{key!r} is no index of {dim!r}: integers, slices, lists of integers and masks are")
    if hasattr(key, "tolist"):
        key = key.tolist()
    if isinstance(key, bool):
        raise DumpError(f"{key!r} is no index of {dim!r}; a mask has one entry for each of {length}")
    if isinstance(key, range):
        key = list(key)
    if isinstance(key, (list, tuple)):
        return _parse_axis_list(list(key), length, dim)
    if hasattr(key, "__index__"):
        return _parse_axis_integer(key.__index__(), length, dim)
    raise DumpError(f"{key!r} is no index of {dim!r}: integers, slices, lists of integers and masks are")


def _parse_axis_list(key: list[Any], length: int, dim: str) -> DimIndex:
    if key and all(isinstance(k, bool) for k in key):
        if len(key) != length:
            raise IndexOutOfRange(f"a mask of {len(key)} entries for {dim!r} of {length}")
        return compact_index([i for i, k in enumerate(key) if k])
    wrong = next((k for k in key if isinstance(k, bool) or not hasattr(k, "__index__")), None)
    if wrong is not None:
        raise DumpError(
            f"{wrong!r} in a list of indices of {dim!r}; a list has integers only, or a mask of one axis"
        )
    return compact_index([_parse_axis_integer(k.__index__(), length, dim) for k in key])


def _parse_axis_integer(at: int, length: int, dim: str) -> int:
    if not -length <= at < length:
        raise IndexOutOfRange(f"index {at} is out of range for {dim!r} of {length}")
    return at % length


def compose_indices(index: DimIndex, of: DimIndex) -> DimIndex:
    """Entries of entries."""
    if isinstance(index, range) and isinstance(of, range):
        return compact_index(of[index.start : index.stop : index.step]) if len(index) else range(0)
    return compact_index([of[i] for i in index])


def apply_index(values: Sequence[Any] | Tensor, index: DimIndex | int) -> Any:
    """The same of a list, or of the first dim of a tensor."""
    if isinstance(index, int):
        return values[index]
    if isinstance(values, Tensor):
        return values[torch.tensor(list(index), dtype=torch.int64)]
    return [values[i] for i in index]
