"""Walking through an array of a dump that does not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_flex.dump.reader import DumpArray
from megatron_flex.errors import DumpError

EXPORT_BLOCK = 16 << 20  # bytes that are read at a time
WIDENED_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # what neither numpy nor Arrow has

BlockSlices = tuple[slice, ...]


def read_blocks(array: DumpArray, most: int = EXPORT_BLOCK) -> Iterator[tuple[BlockSlices, Tensor]]:
    """The values in row-major order, in slabs of at most so many bytes, each with where it is."""
    for where in split_into_slabs(array.shape, array.dtype.itemsize, most):
        yield where, array[where].torch()


def split_into_slabs(shape: Sequence[int], itemsize: int, most: int = EXPORT_BLOCK) -> Iterator[BlockSlices]:
    """Slices that make up an array in row-major order, each of at most so many bytes, or one value."""
    if 0 in shape:
        return
    yield from _split_into_slabs(tuple(shape), itemsize, most, ())


def _split_into_slabs(shape: tuple[int, ...], itemsize: int, most: int, front: BlockSlices) -> Iterator[BlockSlices]:
    axis = len(front)
    if axis == len(shape):
        yield front
        return
    each = itemsize
    for length in shape[axis + 1 :]:
        each *= length
    step = max(1, most // each)
    for first in range(0, shape[axis], step):
        region = (*front, slice(first, min(first + step, shape[axis])))
        if each > most:
            yield from _split_into_slabs(shape, itemsize, most, region)
        else:
            yield (*region, *(slice(0, n) for n in shape[axis + 1 :]))


@dataclass(slots=True)
class ExportColumn:
    """An array that is exported.

    Attributes:
        name: in the export.
        array: over (iteration, sample, token, *features), or of a parameter over (iteration, *dims).
    """

    name: str
    array: DumpArray

    @property
    def dtype(self) -> torch.dtype:
        """Of the values where the format has no narrower floats: those of 8 bits and bfloat16 become fp32."""
        return torch.float32 if self.array.dtype in WIDENED_DTYPES else self.array.dtype

    def check_same_shapes(self) -> None:
        """Raises DumpError where iterations have different shapes."""
        shapes = {self.array.at(p).shape[1:] for p in self.array.passes}
        if len(shapes) > 1:
            examples = " and ".join(str(list(s)) for s in sorted(shapes)[:2])
            raise DumpError(
                f"{self.name}: iterations have different shapes, such as {examples}; choose iterations of one "
                "shape, or a tensor for each (--per-iteration)"
            )

    def by_iteration(self) -> list[ExportColumn]:
        """One column for each iteration, without that axis."""
        return [
            ExportColumn(
                f"{self.name}/{number}" + (f".{run_of}" if run_of else ""), self.array.at((number, run_of))[0]
            )
            for number, run_of in self.array.passes
        ]


def beside(path: Path) -> Path:
    """The temporary name of what will be `path` once it is whole."""
    return path.with_name(f".{path.name}.tmp")
