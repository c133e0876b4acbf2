"""A parameter, or its gradient, over iterations, as a source of an array."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_flex.dump.reading.array import IterationKey
from megatron_flex.dump.reading.assembling import AssembledTensor, group_shards, has_all_shards
from megatron_flex.dump.reading.shards import LocatedShard
from megatron_flex.errors import DumpError
from megatron_flex.layout import Layout, Sizes, RegionIndex

if TYPE_CHECKING:
    from megatron_flex.dump.reading.opened import OpenDump


class ParameterSource:
    """A parameter in each iteration: of which rank does not matter, as long as all of it is found.

    Args:
        dump: that has it.
        name: of the parameter.
        kind: `parameter` or `parameter_gradient`.
        stage: the pipeline stage that has it.
        passes: the iterations.
    """

    def __init__(self, dump: OpenDump, name: str, kind: str, stage: int, passes: list[IterationKey]) -> None:
        self.dump, self.name, self.kind, self.stage, self.passes = dump, name, kind, stage, passes

    def __reduce__(self) -> tuple[object, ...]:
        return ParameterSource, (self.dump, self.name, self.kind, self.stage, self.passes)

    @cached_property
    def _like(self) -> AssembledTensor:
        if not self.passes:
            raise DumpError(f"{self.name}: no iteration of the dump is whole")
        return self._assembled(self.passes[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one iteration."""
        return self._like.shape

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of its dims."""
        return tuple(self._like.dims)

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self._like.dtype

    @property
    def held(self) -> tuple[Layout, Sizes]:
        """How ranks held it, in the first iteration, and the mesh."""
        return self._like.layout, self._like.sizes

    def among(self, passes: list[IterationKey]) -> ParameterSource:
        """The same over other iterations."""
        for which in passes:
            self.dump.written(which)
        return ParameterSource(self.dump, self.name, self.kind, self.stage, passes)

    def labels(self, which: IterationKey) -> tuple[Tensor | None, Tensor | None]:
        """A parameter has neither samples nor tokens."""
        return None, None

    def pieces(self) -> Iterator[tuple[IterationKey, int, int, ParameterSource]]:
        """Each iteration by itself."""
        for which in self.passes:
            yield which, 0, 0, self.among([which])

    def read(self, which: IterationKey, where: RegionIndex, out: Tensor) -> None:
        """Read the entries wanted of one iteration into `out`."""
        one = self._like if which == self.passes[0] else self._assembled(which)
        if one.shape != self.shape or one.dtype != self.dtype:
            raise DumpError(
                f"{one.where}: {list(one.shape)} {one.dtype}, and {list(self.shape)} {self.dtype} in the "
                "first: read them one by one with .at(number)"
            )
        one.region(where, out)

    def _assembled(self, which: IterationKey) -> AssembledTensor:
        written = self.dump.written(which)
        where = f"{self.name} ({self.kind}), {written.describe()}"
        found: list[LocatedShard] = []
        for replica in written.run.replicas:
            found += self.dump.entries(written, self.name, self.kind, self.stage, replica)
            if found:
                layout, shards = group_shards(found, written.run.sizes, where)
                if has_all_shards(layout, shards, written.run.sizes):
                    break
        if not found:
            raise DumpError(f"{where}: it is not there; .at(...) chooses iterations that have it")
        if not has_all_shards(layout, shards, written.run.sizes):
            raise DumpError(f"{where}: ranks wrote only some of its shards")
        return AssembledTensor(self.dump.files, layout, written.run.sizes, shards, where)
