"""Telling of each firing of a hook: shapes, what was sent, how long it took; not there unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_flex.collectives import CollectiveCall, Route, Timestamp, meter
from megatron_flex.layout import Layout
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debugging.telling import to_stderr
from megatron_flex.runtime.firing import HookDispatcher
from megatron_flex.runtime.hooks import HookFunction, describe_edit
from megatron_flex.runtime.local_edits import LocalEditPlan
from megatron_flex.runtime.weak import weakly


@dataclass
class HookCallTrace:
    """One firing at one site, as this rank saw it.

    Attributes:
        key: when it was.
        layout: the layout, in words.
        local: the shape of this rank's tensor.
        whole: that of the whole; None where it was only read, or edited as it is here.
        out: that of what went on.
        edits: the editing functions, in words.
        moves: the collectives of the forward way, in order.
        seconds: of the editing functions, without those of collectives between them.
        back: the collectives of the backward way.
        here: whether it was edited on this rank's part.
    """

    key: Key
    layout: str
    local: tuple[int, ...]
    whole: tuple[int, ...] | None = None
    out: tuple[int, ...] = ()
    edits: str = ""
    moves: list[CollectiveCall] = field(default_factory=list)
    seconds: float = 0.0
    back: list[CollectiveCall] = field(default_factory=list)
    here: bool = False

    def describe(self) -> str:
        """In one line."""
        if self.whole is None and not self.here:
            return f"{_format_key(self.key)}: {self.local} in {self.layout}, kept to be sent later"
        made = "on the shard" if self.here else f"-> {self.whole}"
        parts = [f"{_format_key(self.key)}: {self.local} {made} in {self.layout}"]
        parts += describe_moves(self.moves)
        parts += [f"edit {self.seconds * 1e3:.2f} ms ({self.edits})", f"-> {self.out}"]
        return " | ".join(parts)

    def describe_back(self) -> str:
        """What its backward way sent, in one line."""
        return " | ".join([f"{_format_key(self.key)}, backward", *describe_moves(self.back)])


def describe_moves(moves: list[CollectiveCall]) -> list[str]:
    """Each collective with its bytes and time."""
    lines = [f"{m.op} along {m.axis}, {m.nbytes} bytes, {m.seconds * 1e3:.2f} ms" for m in moves]
    return lines or ["nothing sent"]


def _format_key(key: Key) -> str:
    call = f" call {key.call}" if key.call else ""
    return f"{key.site} iteration {key.iteration} microbatch {key.microbatch}{call}"


class Tracer:
    """Stands in for two methods of a Firing until it is taken out.

    Attributes:
        last: the last firing at each site.
    """

    def __init__(self, firing: HookDispatcher, say: Callable[[str], None] | None = None) -> None:
        self.firing, self.say = firing, say or to_stderr
        self.last: dict[str, HookCallTrace] = {}
        self._open: HookCallTrace | None = None  # whose backward way is going on
        vars(firing).update(edited=self.edited, read=self.read)

    def stop(self) -> None:
        """Take it out."""
        self._close()
        vars(self.firing).pop("edited", None)
        vars(self.firing).pop("read", None)

    def read(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """As `HookDispatcher.read`, and tell of it."""
        self._close()
        words = (route.token_layout if route else layout).describe(self.firing.mesh.sizes)
        self.last[key.site] = seen = HookCallTrace(key, words, tuple(local.shape), out=tuple(local.shape))
        HookDispatcher.read(self.firing, hooks, key, local, layout, route)
        self.say(seen.describe())

    def edited(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        record: bool,
    ) -> Tensor:
        """As `HookDispatcher.edited`, and tell of it."""
        self._close()
        firing = self.firing
        words = (route.token_layout if route else layout).describe(firing.mesh.sizes)
        edits = " | ".join(describe_edit(h.editing_function) for h in hooks if h.editing_function is not None)
        seen = HookCallTrace(key, words, tuple(local.shape), edits=edits)
        way = firing.locally.way(hooks, key, local, layout, route)
        if way is not None:
            return self._on_part(seen, hooks, key, module, local, way, record)
        meter.sink = seen.moves.append
        try:
            whole = firing.gather(local, layout, route)
            seen.whole = tuple(whole.shape)
            if record:
                firing.keep(hooks, key, whole, layout)
            before, start = len(seen.moves), Timestamp(whole)
            made = firing.edit(hooks, key, module, whole, layout, record)
            seen.seconds = Timestamp(made).since(start) - sum(m.seconds for m in seen.moves[before:])
            out = firing.scatter(made, local, layout, route)
        finally:
            meter.sink = None
        seen.out = tuple(out.shape)
        self.last[key.site] = seen
        self.say(seen.describe())
        self._follow(seen, out)
        if whole.grad_fn is not None:
            _find_first_node(whole.grad_fn).register_hook(weakly(self._close))
        return out

    def _on_part(
        self,
        seen: HookCallTrace,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        way: LocalEditPlan,
        record: bool,
    ) -> Tensor:
        seen.here, start = True, Timestamp(local)
        meter.sink = seen.moves.append
        try:
            out = self.firing.on_part(hooks, key, module, local, way, record)
            seen.seconds = Timestamp(out).since(start) - sum(m.seconds for m in seen.moves)
        finally:
            meter.sink = None
        seen.out = tuple(out.shape)
        self.last[key.site] = seen
        self.say(seen.describe())
        if out is not local:
            self._follow(seen, out)
            if local.grad_fn is not None:
                local.grad_fn.register_prehook(weakly(self._close))
        return out

    def _follow(self, seen: HookCallTrace, out: Tensor) -> None:
        """Count what the backward way sends, from the node that made what went on."""
        first = out.grad_fn
        if first is None:
            return

        first.register_prehook(weakly(self._begin, seen))

    def _begin(self, seen: HookCallTrace, _: Any) -> None:
        self._close()
        self._open = seen
        meter.sink = seen.back.append

    def _close(self, *_: Any) -> None:
        if self._open is not None:
            seen, self._open, meter.sink = self._open, None, None
            self.say(seen.describe_back())


def _find_first_node(node: Any) -> Any:
    """Of the nodes that made a whole the first: that of experts' rows on their way home, if there is one."""
    for _ in range(2):
        before = node.next_functions[0][0] if node.next_functions else None
        if type(before).__name__ in ("_GatherBackward", "_HomeBackward"):
            node = before
    return node
