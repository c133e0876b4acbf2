"""The mean over tokens of a tensor, where it could not be taken while writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_flex.dump.reading.assembling import StoredTensor
from megatron_flex.dump.selection import SAMPLE_DIM, TOKEN_DIM
from megatron_flex.layout import DimIndex, Layout, compact_index


class TokenMean:
    """A tensor without its dim of tokens.

    Args:
        whole: the tensor.
        kept: for a sample of it the positions to average.
        dtype: of the mean, which is taken in fp32.
    """

    def __init__(self, tensor: StoredTensor, kept: Callable[[int], Sequence[int]], dtype: torch.dtype) -> None:
        token = tensor.dim(TOKEN_DIM)
        assert token is not None
        self._whole, self._kept, self._token = tensor, kept, token
        self.dtype, self.where = dtype, tensor.where
        self.shape = tuple(n for d, n in enumerate(tensor.shape) if d != token)

    @property
    def layout(self) -> Layout:
        """Of the tensor as it is stored."""
        return self._whole.layout

    @property
    def dims(self) -> list[str]:
        """The names of its dims."""
        return [n for d, n in enumerate(self._whole.dims) if d != self._token]

    def dim(self, name: str) -> int | None:
        """The first dim of that name; there are no tokens."""
        found = self._whole.dim(name)
        if found is None or name == TOKEN_DIM:
            return None
        return found - (found > self._token)

    def region(self, wanted: Sequence[DimIndex]) -> Tensor:
        """The entries wanted of each dim."""
        sample = self._whole.dim(SAMPLE_DIM)
        each: list[tuple[int | None, Sequence[int]]] = [(None, self._kept(0))]
        at = None if sample is None else sample - (sample > self._token)
        if at is not None:
            each = [(i, self._kept(i)) for i in wanted[at]]
        out = [self._mean(wanted, at, item, kept) for item, kept in each]
        if not out:
            return torch.empty([len(i) for i in wanted], dtype=self.dtype)
        return (out[0] if at is None else torch.cat(out, at)).to(self.dtype)

    def _mean(self, wanted: Sequence[DimIndex], at: int | None, item: int | None, kept: Sequence[int]) -> Tensor:
        indices = list(wanted)
        if at is not None and item is not None:
            indices[at] = compact_index([item])
        indices.insert(self._token, compact_index(kept))
        return self._whole.region(indices).sum(self._token, dtype=torch.float32) / max(len(kept), 1)
