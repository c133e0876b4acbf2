"""Fused tensors come apart: queries, keys and values of one projection, gate and up of a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import Undo, leaf, with_leaf
from megatron_flex.adapters.inert import behind
from megatron_flex.adapters.megatron_core.build import SiteBuilder
from megatron_flex.adapters.megatron_core.megatron_taps import group_argument
from megatron_flex.layout import Dim, Layout
from megatron_flex.sites import TapCallback, Site


@dataclass(frozen=True)
class Packing:
    """How a last dim is packed: `groups` times over, parts of relative `widths` side by side.

    Attributes:
        groups: how often the parts repeat.
        widths: the parts' widths within a group, in units that follow from the tensor's length.
        heads: a unit is a head, and a part has the shape `[..., heads, unit]`; else it stays flat.
    """

    groups: int
    widths: tuple[int, ...]
    heads: bool = False

    def split(self, packed: Tensor) -> list[Tensor]:
        """The parts of `packed`, views or copies."""
        unit = packed.shape[-1] // (self.groups * sum(self.widths))
        rows = packed.unflatten(-1, (self.groups, -1)).split([w * unit for w in self.widths], -1)
        flat = [row.flatten(-2) for row in rows]
        return [part.unflatten(-1, (-1, unit)) for part in flat] if self.heads else flat

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put parts together again, contiguous."""
        flat = [part.flatten(-2) for part in parts] if self.heads else parts
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in flat], -1).flatten(-2)


@dataclass(frozen=True, eq=False)
class FusedPart:
    """One part of a linear's fused output, taken out of it and, if a hook changed it, put back.

    Several parts of one output may be tapped: each tap sees what the ones before it left.

    Attributes:
        module: the linear.
        index: which part.
        packing: how the parts lie in the local output, or in the whole one if `gathered`.
        gathered: a rank's slice of the output ends in the midst of the parts, so the parts exist only in the
            whole. It is gathered as upstream does itself right after the projection.
    """

    module: nn.Module
    index: int
    packing: Packing
    gathered: bool = False

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` behind the module."""

        def hook(module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
            local = leaf(output, 0)
            if local is None:
                return None
            packed = self._whole(local) if self.gathered else local
            parts = self.packing.split(packed)
            part = parts[self.index].contiguous()
            new = fire(part)
            if new is part:
                return None
            parts[self.index] = new
            joined = self.packing.join(parts)
            return with_leaf(output, 0, self._own(joined, local) if self.gathered else joined)

        return behind(self.module, hook)

    def _group(self) -> Any:
        for name in ("tp_group", "_tp_group"):
            group = getattr(self.module, name, None)
            if group is not None:
                return group
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()

    def _whole(self, local: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        gather = mappings.all_gather_last_dim_from_tensor_parallel_region
        full: Tensor = gather(local, **group_argument(gather, self._group()))
        return full

    def _own(self, full: Tensor, local: Tensor) -> Tensor:
        width = local.shape[-1]
        return full.narrow(-1, torch.distributed.get_rank(self._group()) * width, width).contiguous()


def qkv(b: SiteBuilder, path: str, linear: Any, hidden: str, gated: bool) -> Iterator[Site]:
    """The parts of `linear_qkv:output`: before the norms of queries and keys, before rotary embedding.

    Its columns are, for each group of heads, `[q... | gate... | k | v]`.
    """
    groups, split = b.sizes["g"], b.sizes["g"] < b.of.tp
    heads = b.sizes["n"] // groups
    names = ("q", "gate", "k", "v") if gated else ("q", "k", "v")
    widths = (heads, heads, 1, 1) if gated else (heads, 1, 1)
    packing = Packing(groups if split else groups // b.of.tp, widths, heads=True)
    for index, name in enumerate(names):
        kept = name in ("k", "v")
        layout = b.of.groups() if kept else b.of.heads()
        if split:
            layout = _gathered_layout(layout)
        yield b.site(f"{path}:{name}", layout, FusedPart(linear, index, packing, split), hidden)


def gate_up(b: SiteBuilder, path: str, linear: Any, hidden: str, width: int) -> Iterator[Site]:
    """The halves of a gated MLP's `linear_fc1:output`, like it without the bias (added behind it).

    Each has `width` features in the whole.
    """
    for index, name in enumerate(("gate", "up")):
        tap = FusedPart(linear, index, Packing(1, (1, 1)))
        yield b.site(f"{path}:{name}", b.of.features("f"), tap, hidden, width)


def _gathered_layout(layout: Layout) -> Layout:
    """The layout of a part in a fused tensor that every rank gathers and then uses only its slice of."""
    sequence, batch, heads, size = layout.dims
    return Layout((sequence, batch, Dim(heads.name), size), shared=("tp",))
