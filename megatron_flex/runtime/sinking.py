"""Hooks that stand for a dump or for statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_flex.runtime.hooks import HookFunction, HookType
from megatron_flex.runtime.takers import TensorSink
from megatron_flex.sites import Site


class SinkHook(HookFunction):
    """A hook that keeps nothing and edits nothing, and hands what passes to its taker."""

    def __init__(
        self,
        tensor_sink: TensorSink,
        description: str,
        places: frozenset[str],
        hook_type: HookType,
        index: int,
        tags: Iterable[str],
    ) -> None:
        def chosen(site: Site) -> bool:
            return site.name in places

        chosen.__qualname__ = f"{description}: {len(places)} places"
        super().__init__(chosen, hook_type=hook_type, tags=tags, unpack_idx=index)
        self.save, self.tensor_sink = False, tensor_sink


def make_sink_hooks(
    tensor_sink: TensorSink, description: str, values: Sequence[Site], gradients: Sequence[Site], tags: Iterable[str]
) -> list[HookFunction]:
    """The hooks of a taker, as few as can be.

    Args:
        taker: what they hand tensors to.
        told: what it is, in words that all ranks have in common.
        values: the sites of which it takes the tensors.
        gradients: those of which it takes their gradients.
        tags: groups that the hooks belong to.
    """
    out: list[HookFunction] = []
    kinds: tuple[tuple[HookType, Sequence[Site]], ...] = (("forward", values), ("tensor", gradients))
    for kind, sites in kinds:
        for index in sorted({s.index for s in sites}):
            places = frozenset(s.place for s in sites if s.index == index)
            out.append(SinkHook(tensor_sink, description, places, kind, index, tags))
    return out
