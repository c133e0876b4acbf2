"""From the native captures to the person's dict: by hook, in order, where each hook wants it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from megatron_flex.collectives import broadcast_items
from megatron_flex.compat.core.editing import GRADIENT_HOOK_TYPES
from megatron_flex.compat.core.hook_function import HookFunction
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime import Key, Session
from megatron_flex.runtime.hooks import HookType
from megatron_flex.sites import GRADIENT_SUFFIX

logger = logging.getLogger("megatron_flex.compat")
# Of several hooks under one name: what comes first in a forward, and in a backward pass.
HOOK_TYPE_ORDER: tuple[HookType, ...] = ("forward_pre", "forward", "full_backward_pre", "full_backward", "tensor")


@dataclass(frozen=True, slots=True)
class CaptureRecipient:
    """Whose capture it is.

    Attributes:
        hook: the person's hook.
        native: the native one.
        place: how it is registered, as a place in ORDER.
        divisor: gradients are divided by this; 1 where that is done already.
    """

    hook: HookFunction
    native: NativeHook
    place: int
    divisor: int


class CaptureDelivery:
    """Empties the native captures into `output_ptr` whenever something has arrived.

    Args:
        session: the native session.
        output_ptr: the person's dict.
        every_rank: give it to every rank and not to the leader alone.
    """

    def __init__(self, session: Session, output_ptr: dict[str, list[Tensor]], every_rank: bool) -> None:
        self.session, self.output_ptr, self.every_rank = session, output_ptr, every_rank
        self._recipients: dict[str, list[CaptureRecipient]] = {}
        session.delivered = self.deliver

    def add(
        self, name: str, hook: HookFunction, native: NativeHook, kind: HookType, divisor: int = 1
    ) -> None:
        """Have what is captured under a name appended for a hook.

        Args:
            name: a site's or parameter's name, or what an editing function's tensors are kept under.
            hook: the person's hook.
            native: the native one.
            kind: how it is registered.
            divisor: of gradients that are not divided yet.
        """
        self._recipients.setdefault(name, []).append(CaptureRecipient(hook, native, HOOK_TYPE_ORDER.index(kind), divisor))

    def deliver(self) -> None:
        """Do so. Where every rank is to have it, collective over the mesh."""
        captures = self.session.captures
        mine = self.session.is_leader
        items = [(k, t) for n in captures if mine for k, t in zip(captures[n].keys, captures[n], strict=True)]
        captures.clear()
        if self.every_rank:
            items = broadcast_items(items, self.session.mesh)
        active = {entry.hook for entry in self.session.registry.active}
        found = [(r, k, t) for k, t in items for r in self._recipients.get(k.site, ()) if r.native in active]
        uses = Counter(id(t) for _, _, t in found)
        for reader, _, tensor in sorted(found, key=lambda item: _delivery_order(item[0], item[1])):
            divided = tensor if reader.divisor == 1 else tensor / reader.divisor
            own = divided.clone() if divided is tensor and uses[id(tensor)] > 1 else divided
            logger.debug("%s: a tensor of shape %s", reader.hook.module_name, tuple(own.shape))
            reader.hook.keep(own, self.output_ptr)


def capture_name(name: str, kind: HookType) -> str:
    """What a native hook's captures at a site or parameter are called."""
    return name + GRADIENT_SUFFIX if kind in GRADIENT_HOOK_TYPES else name


def _delivery_order(reader: CaptureRecipient, key: Key) -> tuple[bool, int, int, int]:
    return HOOK_TYPE_ORDER[reader.place] in GRADIENT_HOOK_TYPES, key.microbatch, key.call, reader.place
