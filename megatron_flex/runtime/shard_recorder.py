"""What a rank writes of a captured tensor: nothing, its shard, or the selected entries of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump import (
    REPLICA,
    Dump,
    DumpWriter,
    EntrySelection,
    Ownership,
    ShardEntry,
    compute_partial_mean,
    make_mean_layout,
    select_entries,
)
from megatron_flex.dump.part_format import DTYPE_NAMES
from megatron_flex.dump.token_selection import SAMPLE_DIM, TOKEN_DIM, find_dim, number_first_sample
from megatron_flex.errors import DumpError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import GRADIENT_SUFFIX

HALF_DTYPES = (torch.float16,)  # their range requires a loss scale


class ShardSelection(NamedTuple):
    """The selected entries of a shard.

    Attributes:
        tensor: the shard, or its mean.
        layout: the layout of `tensor`.
        picked: the selected indices; None for all.
    """

    tensor: Tensor
    layout: Layout
    picked: EntrySelection | None

    @property
    def kept(self) -> int:
        """The number of bytes to write."""
        if self.picked is None:
            return self.tensor.nbytes
        numbers = self.picked.sample if self.picked.token is None else self.picked.token
        dims = [find_dim(self.layout, name) for name in (TOKEN_DIM, SAMPLE_DIM)]
        positions = prod(self.tensor.shape[d] for d in dims if d is not None)
        return 0 if numbers is None else self.tensor.nbytes // max(positions, 1) * len(numbers)


class ShardRecorder:
    """Passes this rank's entries to the writer of a dump.

    Attributes:
        microbatches: the number of microbatches of this rank in the step; 0 if not known.
    """

    def __init__(self, dump: Dump, mesh: Mesh, writer: DumpWriter) -> None:
        self.dump, self.mesh, self.writer = dump, mesh, writer
        self.microbatches = 0
        self._ownership = Ownership(mesh)

    def take(
        self,
        entry: ShardEntry,
        local: Tensor,
        layout: Layout,
        iteration: int,
        factor: float = 1.0,
        over: Sequence[Axis] | None = None,
    ) -> None:
        """Write this rank's shard, or the selected entries of the shard, if this rank owns them.

        Args:
            entry: the entry of the shard; its shape is filled in here.
            local: the shard.
            layout: the layout of the shard.
            iteration: the iteration of the run.
            factor: the divisor of the tensor.
            over: the axes along which ranks may hold the same entries; None for those of a site.

        Raises:
            DumpError: no file format stores this dtype.
        """
        selection = self._wanted(entry.microbatch, local.detach(), layout, iteration)
        is_owner = self._ownership.mine(selection.layout, selection.kept, over=over)
        self._put(entry, selection, factor, is_owner)

    def part(self, entry: ShardEntry, local: Tensor, layout: Layout, over: Sequence[Axis]) -> None:
        """Write the entries of a shard that are inside the entry's span."""
        assert entry.span is not None
        if entry.span[0] < entry.span[1]:
            flat = ShardSelection(local.detach().reshape(-1)[slice(*entry.span)], layout, None)
            is_owner = self._ownership.mine(layout, flat.tensor.nbytes, over=over)
            self._put(entry, flat, 1.0, is_owner, tuple(local.shape))

    def copy(self, entry: ShardEntry, local: Tensor, layout: Layout) -> None:
        """Write the checksum of a copy that another rank writes, if checksums are requested."""
        self._put(entry, ShardSelection(local.detach(), layout, None), 1.0, False)

    def _put(
        self,
        entry: ShardEntry,
        selection: ShardSelection,
        factor: float,
        is_owner: bool,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if not is_owner and not self.dump.replicas:
            return
        local, layout, picked = selection
        shape = tuple(local.shape) if shape is None else shape
        # The writer must copy memory of the model, which writes to it again; memory made here it may keep.
        owned = picked is not None or factor != 1.0
        local = local if picked is None else picked.select(local, layout)
        if factor != 1.0:
            local = (local.float() if local.dtype in HALF_DTYPES else local) / factor
        if self.dump.dtype is not None and local.is_floating_point():
            owned, local = owned or self.dump.dtype != local.dtype, local.to(self.dump.dtype)
        if local.dtype not in DTYPE_NAMES:
            raise DumpError(f"no file of a dump has tensors of {local.dtype}; give the Dump a dtype")
        changes: dict[str, Any] = {"shape": shape, "picked": picked is not None}
        if not is_owner:
            end = GRADIENT_SUFFIX if "gradient" in entry.kind else ""
            changes |= {"kind": REPLICA, "site": entry.site + end}
        self.writer.put(replace(entry, **changes), layout, local, owned)

    def _wanted(self, microbatch: int, local: Tensor, layout: Layout, iteration: int) -> ShardSelection:
        """The selected entries, or their mean over the sequence if the dump asks for it."""
        dump, mesh = self.dump, self.mesh
        if dump.tokens is None and dump.samples is None and dump.reduce is None:
            return ShardSelection(local, layout, None)
        numbers, tokens = self._numbers(microbatch, local, layout), dump.tokens
        if dump.reduce == "mean" and find_dim(layout, TOKEN_DIM) is not None:
            mean = compute_partial_mean(local, layout, mesh.sizes, mesh.coords, tokens, iteration, numbers)
            if mean is None:  # the reader selects
                return ShardSelection(local, layout, None)
            local, layout, tokens = mean, make_mean_layout(layout), None
        where = layout, local.shape, mesh.sizes, mesh.coords, iteration, numbers, local.device
        return ShardSelection(local, layout, select_entries(tokens, dump.samples, *where))

    def _numbers(self, microbatch: int, local: Tensor, layout: Layout) -> list[int] | None:
        """The indices of the local samples in the global batch."""
        dim, replica = find_dim(layout, SAMPLE_DIM), self.mesh["dp"]
        if dim is None:
            return None
        count, where = local.shape[dim], (microbatch, replica.coord, replica.size, self.microbatches)
        first = number_first_sample(self.dump.order, *where, count)
        return None if first is None else list(range(first, first + count))
