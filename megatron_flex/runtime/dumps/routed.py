"""What a dump keeps of routers' decisions, by which a reader leads experts' rows home."""

from __future__ import annotations

from typing import Any

from megatron_flex.collectives import Route
from megatron_flex.dump import ROUTING, ShardEntry, DumpWriter
from megatron_flex.dump.expert_routing import choice_to_json, pack_choice
from megatron_flex.layout import replicated
from megatron_flex.runtime.captures import Key

ROUTING_LAYOUT = replicated("t", "bytes")  # each rank's are its own


class RoutingRecorder:
    """The decisions that are written of an iteration, one for each call of a layer."""

    def __init__(self) -> None:
        self._written: set[tuple[str, int, int]] = set()

    def begins(self) -> None:
        """An iteration starts."""
        self._written.clear()

    def tell(self, key: Key, route: Route, writer: DumpWriter) -> dict[str, Any] | None:
        """Write this rank's decision, if it is not written yet, before any rows that go by it.

        Returns:
            What the entry of this rank's rows says of their way; None if it has none of that expert.
        """
        dispatch, layer = route.dispatch, key.site.partition(".experts")[0]
        decision = layer, key.microbatch, key.call
        if decision not in self._written:  # of a replayed layer the decision is the same
            self._written.add(decision)
            bits, choice = pack_choice(dispatch.chosen), choice_to_json(dispatch)
            entry = ShardEntry(layer, ROUTING, key.microbatch, key.call, 0, tuple(bits.shape), "", route=choice)
            writer.put(entry, ROUTING_LAYOUT, bits, owned=True)
        return {"of": layer, "expert": route.expert} if route.here else None
