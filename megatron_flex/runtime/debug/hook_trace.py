"""Prints each call of a hook: shapes, communication, time. Not installed unless requested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_flex.collectives import CollectiveCall, Route, Timestamp, meter
from megatron_flex.layout import Layout
from megatron_flex.runtime.autograd_graph import weak_hook
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.edit_debugger import to_stderr
from megatron_flex.runtime.hook_collectives import gather_at_site, scatter_at_site
from megatron_flex.runtime.hook_dispatcher import HookDispatcher
from megatron_flex.runtime.hooks import HookFunction, describe_edit
from megatron_flex.runtime.local_edits import LocalEditPlan


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
        made = "on the shard" if self.here else f"-> {self.full_size}"
        parts = [f"{_format_key(self.key)}: {self.local} {made} in {self.layout}"]
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
    """Replaces `EditDispatcher.edit` and `CaptureDispatcher.capture` of a session until `stop()`.

    Attributes:
        last: the last call at each site.
    """

    def __init__(self, firing: HookDispatcher, write: Callable[[str], None] | None = None) -> None:
        self.firing, self.write = firing, write or to_stderr
        self.last: dict[str, HookCallTrace] = {}
        self._open: HookCallTrace | None = None  # the call whose backward pass is running
        vars(firing.edits).update(edit=self.edit)
        vars(firing.captures).update(capture=self.capture)
        firing.plan_generally(True)

    def stop(self) -> None:
        """Restore the replaced methods."""
        self._close()
        vars(self.firing.edits).pop("edit", None)
        vars(self.firing.captures).pop("capture", None)
        self.firing.plan_generally(False)

    def capture(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """As `CaptureDispatcher.capture`, and print the call."""
        self._close()
        words = (route.token_layout if route else layout).describe(self.firing.mesh.sizes)
        self.last[key.site] = seen = HookCallTrace(key, words, tuple(local.shape), out=tuple(local.shape))
        CaptureDispatcher.capture(self.firing.captures, hooks, key, local, layout, route)
        self.write(seen.describe())

    def edit(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        record: bool,
    ) -> Tensor:
        """As `EditDispatcher.edit`, and print the call."""
        self._close()
        firing = self.firing
        words = (route.token_layout if route else layout).describe(firing.mesh.sizes)
        edits = " | ".join(describe_edit(h.editing_function) for h in hooks if h.editing_function is not None)
        seen = HookCallTrace(key, words, tuple(local.shape), edits=edits)
        plan = firing.edits.planner.find_plan(hooks, key.site, local, layout, route)
        if plan is not None:
            return self._on_part(seen, hooks, key, module, local, plan, record)
        meter.sink = seen.moves.append
        try:
            full = gather_at_site(local, layout, route, firing.mesh)
            seen.full_size = tuple(full.shape)
            if record:
                firing.captures.keep_full(hooks, key, full, layout)
            before, start = len(seen.moves), Timestamp(full)
            made = firing.edits.edit_full(hooks, key, module, full, layout, record)
            seen.seconds = Timestamp(made).since(start) - sum(m.seconds for m in seen.moves[before:])
            out = scatter_at_site(made, local, layout, route, firing.mesh)
        finally:
            meter.sink = None
        seen.out = tuple(out.shape)
        self.last[key.site] = seen
        self.write(seen.describe())
        self._follow(seen, out)
        if full.grad_fn is not None:
            _find_first_node(full.grad_fn).register_hook(weak_hook(self._close))
        return out

    def _on_part(
        self,
        seen: HookCallTrace,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        plan: LocalEditPlan,
        record: bool,
    ) -> Tensor:
        seen.here, start = True, Timestamp(local)
        meter.sink = seen.moves.append
        try:
            out = self.firing.edits.edit_shard(hooks, key, module, local, plan, record)
            seen.seconds = Timestamp(out).since(start) - sum(m.seconds for m in seen.moves)
        finally:
            meter.sink = None
        seen.out = tuple(out.shape)
        self.last[key.site] = seen
        self.write(seen.describe())
        if out is not local:
            self._follow(seen, out)
            if local.grad_fn is not None:
                local.grad_fn.register_prehook(weak_hook(self._close))
        return out

    def _follow(self, seen: HookCallTrace, out: Tensor) -> None:
        """Count the collectives of the backward pass, which begins at the node that made the result."""
        first = out.grad_fn
        if first is None:
            return

        first.register_prehook(weak_hook(self._begin, seen))

    def _begin(self, seen: HookCallTrace, _: Any) -> None:
        self._close()
        self._open = seen
        meter.sink = seen.back.append

    def _close(self, *_: Any) -> None:
        if self._open is not None:
            seen, self._open, meter.sink = self._open, None, None
            self.write(seen.describe_back())


def _find_first_node(node: Any) -> Any:
    """The first of the nodes that made a full tensor: that of returning expert rows, if there is one."""
    for _ in range(2):
        before = node.next_functions[0][0] if node.next_functions else None
        if type(before).__name__ in ("_GatherBackward", "_ToTokensBackward"):
            node = before
    return node
