"""Prints each call of a hook: shapes, communication, time. Not installed unless requested."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_flex.collectives import CollectiveCall, Exchange, Route, ShardExchange, Timestamp, meter
from megatron_flex.layout import Layout
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.edit_debugger import to_stderr
from megatron_flex.runtime.hook_dispatcher import HookDispatcher
from megatron_flex.runtime.hooks import HookFunction, describe_edit


@dataclass
class HookCallTrace:
    """One call at one site, as observed by this rank.

    Attributes:
        key: the key of the pass.
        layout: the layout, as text.
        local: the shape of this rank's tensor.
        full_size: the shape of the full tensor; None if the tensor was only captured, or edited as a shard.
        out: the shape of the result.
        edits: the editing functions, as text.
        moves: the collectives of the forward pass, in order.
        seconds: the time of the editing functions, without the collectives between them.
        back: the collectives of the backward pass.
        here: whether the local shard was edited.
    """

    key: Key
    layout: str
    local: tuple[int, ...]
    full_size: tuple[int, ...] | None = None
    out: tuple[int, ...] = ()
    edits: str = ""
    moves: list[CollectiveCall] = field(default_factory=list)
    seconds: float = 0.0
    back: list[CollectiveCall] = field(default_factory=list)
    here: bool = False

    def describe(self) -> str:
        """Format as one line."""
        if self.full_size is None and not self.here:
            return f"{_format_key(self.key)}: {self.local} in {self.layout}, kept to be sent later"
        result = "on the shard" if self.here else f"-> {self.full_size}"
        parts = [f"{_format_key(self.key)}: {self.local} {result} in {self.layout}"]
        parts += describe_moves(self.moves)
        parts += [f"edit {self.seconds * 1e3:.2f} ms ({self.edits})", f"-> {self.out}"]
        return " | ".join(parts)

    def describe_back(self) -> str:
        """Format the communication of the backward pass as one line."""
        return " | ".join([f"{_format_key(self.key)}, backward", *describe_moves(self.back)])


def describe_moves(moves: list[CollectiveCall]) -> list[str]:
    """Format each collective with its bytes and time."""
    lines = [f"{m.op} along {m.axis}, {m.nbytes} bytes, {m.seconds * 1e3:.2f} ms" for m in moves]
    return lines or ["nothing sent"]


def _format_key(key: Key) -> str:
    call = f" call {key.call}" if key.call else ""
    return f"{key.site} iteration {key.iteration} microbatch {key.microbatch}{call}"


class Tracer:
    """Prints each pass of a session until `stop()`.

    Attributes:
        last: the last call at each site.
    """

    def __init__(self, dispatcher: HookDispatcher, write: Callable[[str], None] | None = None) -> None:
        self.dispatcher, self.write = dispatcher, write or to_stderr
        self.last: dict[str, HookCallTrace] = {}
        self._open: HookCallTrace | None = None  # the call whose backward pass is running
        dispatcher.trace(self)

    def stop(self) -> None:
        self.close()
        self.dispatcher.trace(None)

    def note(self, key: Key, local: Tensor, layout: Layout, route: Route | None) -> None:
        """Print a pass that captures."""
        self.close()
        shape = tuple(local.shape)
        self.last[key.site] = call = HookCallTrace(key, self._describe(layout, route), shape, out=shape)
        self.write(call.describe())

    def follow(
        self, hooks: Sequence[HookFunction], layout: Layout, exchange: Exchange, key: Key, route: Route | None
    ) -> Exchange:
        """The exchange of one pass that edits, printed as it is used."""
        self.close()
        edits = " | ".join(describe_edit(h.editing_function) for h in hooks if h.editing_function is not None)
        on_shard = isinstance(exchange, ShardExchange)
        return TracedExchange(
            self, HookCallTrace(key, self._describe(layout, route), (), edits=edits, here=on_shard), exchange
        )

    def _describe(self, layout: Layout, route: Route | None) -> str:
        return (route.token_layout if route else layout).describe(self.dispatcher.mesh.sizes)

    def finish(self, call: HookCallTrace) -> None:
        """Print a call whose forward pass has ended."""
        self.last[call.key.site] = call
        self.write(call.describe())

    def begin_backward(self, call: HookCallTrace) -> None:
        """Count collectives as those of a call's backward pass, until it ends."""
        self.close()
        self._open = call
        meter.sink = call.back.append

    def close(self) -> None:
        """End the backward pass of a call."""
        if self._open is not None:
            call, self._open, meter.sink = self._open, None, None
            self.write(call.describe_back())


class TracedExchange:
    """The exchange of one pass, with the collectives and the time of what happens between its ends.

    The graph keeps it until the backward pass: it refers to the tracer weakly, and so not to the session.
    """

    def __init__(self, tracer: Tracer, call: HookCallTrace, inner: Exchange) -> None:
        self._tracer, self._call, self._inner = weakref.ref(tracer), call, inner
        self.joint_entrance, self.joint_exit = inner.joint_entrance, inner.joint_exit
        self.zeros_count = inner.zeros_count

    def enter(self, local: Tensor) -> Tensor:
        call = self._call
        call.local = tuple(local.shape)
        meter.sink = call.moves.append
        full = self._inner.enter(local)
        call.full_size = None if call.here else tuple(full.shape)
        self._before, self._start = len(call.moves), Timestamp(full)
        return full

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """As the exchange; prints the forward pass."""
        call = self._call
        try:
            inside = sum(m.seconds for m in call.moves[self._before :])
            call.seconds = Timestamp(edited).since(self._start) - inside
            out = self._inner.exit(edited, local)
        finally:
            meter.sink = None
        call.out = tuple(out.shape)
        tracer = self._tracer()
        if tracer is not None:
            tracer.finish(call)
        return out

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the exchange; the backward pass of the edit begins."""
        tracer = self._tracer()
        if tracer is not None:
            tracer.begin_backward(self._call)
        return self._inner.exit_gradient(grad)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """As the exchange; prints the backward pass."""
        local = self._inner.enter_gradient(grad)
        tracer = self._tracer()
        if tracer is not None:
            tracer.close()
        return local
