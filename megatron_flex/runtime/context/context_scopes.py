"""The values of microbatches and of the run on this rank, and the gradients of tensors among them.

Within one graph a tensor is passed as it is. Into another graph (a later virtual stage; into and out of a
region with activation recomputation) the tensor is read without its graph: the gradients from its readers are
accumulated beside it, and an anchor on the output of the edit that made the tensor adds them to the
backward pass there.

A value, from the call that writes it to the backward pass:

    call              the function runs on a view of the values, a `CallNamespace`
    _commit           what it wrote becomes the state of the microbatch, each value with its version: the call
                      that made it, which a replay can name again
    share             if one rank ran the function, the other ranks of the stage receive the changes;
                      `context_relay` sends values on to the next stage
    _read             in the same graph a later call reads the tensor itself, otherwise without its graph
    anchor_gradients  after the last edit of the site its output keeps the saved tensors, and before an edit
                      of one rank the input of that edit keeps those of the edits before; its backward pass
                      runs after those of all readers, and gives each tensor the sum of their gradients

What a call may do follows from its pass (`CallMode`):

    PLAIN      reads and writes the state; tensors have graphs
    FIRST      of a recomputed region: has no graph; takes a snapshot of the state, and writes the state
    REPLAY     the recomputation: has a graph; reads that snapshot, and writes nothing but anchors
    NO_GRAPH   evaluation, and edits of gradients: reads and writes the state, without gradients
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from megatron_flex.collectives import broadcast_package, equal_over_ranks, pack_values, unpack_values
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_values import (
    IMMUTABLE_TYPES,
    CallFrame,
    CallMode,
    CallNamespace,
    Changes,
    ContextEntry,
    DetachedRead,
    GradientAnchor,
    MicrobatchValues,
    TensorId,
    ValueVersion,
    bring_to_device,
    detach_value,
    list_tensors,
    map_leaves,
)
from megatron_flex.runtime.hooks import HookFunction


class ContextScopes:
    """The values shared by the editing functions of this rank.

    Attributes:
        run: values of the run, by name.
        kept: values that were kept beyond the end of their microbatch, by name and microbatch.
        micros: the microbatches in progress.
        frame: the running call, if there is one.
        once: whether functions that one rank runs use the context on this stage.
        shared: whether functions that all ranks run use it; every rank of the stage then holds every value.
    """

    def __init__(self, mesh: Mesh, clock: Clock, gather_data_parallel: bool) -> None:
        self.mesh, self.clock = mesh, clock
        self.run: dict[str, Any] = {}
        self.kept: dict[str, dict[int, Any]] = {}
        self.micros: dict[int, MicrobatchValues] = {}
        self.frame: CallFrame | None = None
        self.once = self.shared = False
        data = mesh["dp"].size if gather_data_parallel else 1
        self.alone = mesh["tp"].size * mesh["cp"].size * data == 1
        self.stage, self.stages = mesh["pp"].coord, mesh["pp"].size
        self._anchors: list[tuple[bool, TensorId, Tensor]] = []
        self._changes = Changes(), Changes()  # of the microbatch and of the run, by the last call

    @property
    def virtual_stage(self) -> int:
        return self.clock.chunk * self.stages + self.stage

    def begin(self) -> MicrobatchValues:
        """Return the values of the clock's microbatch; they are created on first use."""
        number = self.clock.microbatch
        if number not in self.micros:
            self.micros[number] = MicrobatchValues(torch.is_grad_enabled())
        return self.micros[number]

    def drop(self, *numbers: int) -> None:
        """Discard microbatches; their tensors are released explicitly, because their graphs refer to them."""
        for number in numbers:
            micro = self.micros.pop(number, None)
            if micro is not None:
                micro.clear()

    # -- one call --------------------------------------------------------------------------------------

    def call(
        self,
        hook: HookFunction,
        index: int,
        key: Key,
        device: torch.device,
        function: Callable[[], Tensor],
        attempt: Callable[[Callable[[], Tensor]], Tensor],
    ) -> Tensor:
        """Run an editing function, passed as a call without arguments, with the context of its microbatch.

        Values are moved to the device of the call, as layers of one model may be on several. `attempt` makes
        the call; the changes are applied unless it raises.
        """
        self._changes = Changes(), Changes()
        frame = self.frame = self._frame(hook, index, key, device)
        try:
            out = attempt(partial(_call_checked, frame, function))
        finally:
            self.frame = None
        self._commit(frame)
        return out

    def _frame(self, hook: HookFunction, index: int, key: Key, device: torch.device) -> CallFrame:
        micro, mode = self.begin(), self._mode(hook)
        values: Mapping[str, ContextEntry] = micro.state
        run: Mapping[str, Any] = self.run
        # The replay of a call reads what its first pass read, although later calls have changed the values.
        if mode is CallMode.FIRST:
            values, run = micro.snapshots[key.site, key.call, index] = dict(micro.state), dict(self.run)
        elif mode is CallMode.REPLAY:
            values, run = micro.snapshots.get((key.site, key.call, index), (micro.state, self.run))
        # A container that is changed in place must not change the snapshot.
        replayed = mode in (CallMode.FIRST, CallMode.REPLAY)
        copy_containers = partial(map_leaves, leaf=_copy_item)
        return CallFrame(
            hook,
            index,
            key,
            mode,
            micro,
            CallNamespace(
                values, bring_to_device(device, partial(self._read, micro, mode, hook.run == "once"))
            ),
            CallNamespace(run, bring_to_device(device, copy_containers if replayed else lambda value: value)),
        )

    def _mode(self, hook: HookFunction) -> CallMode:
        """How a call takes part in autograd: in a graph or without, in a region's first pass or replay."""
        if hook.backward:  # the graph of a gradient edit ends with the step
            return CallMode.NO_GRAPH
        if self.clock.replaying():
            return CallMode.REPLAY
        if not self.begin().training:
            return CallMode.NO_GRAPH
        # In a microbatch that trains, gradients are off only in the first pass of a recomputed region.
        return CallMode.PLAIN if torch.is_grad_enabled() else CallMode.FIRST

    def _read(self, micro: MicrobatchValues, mode: CallMode, once: bool, entry: ContextEntry) -> Any:
        """The value for one call: copies of containers, and tensors that propagate gradients back."""
        # If every rank made the tensor and only the edit's rank reads it, that rank's graph has no path back.
        same = self.alone or entry.once or not once
        numbers = count()

        def leaf(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return _copy_item(item) if mode is CallMode.FIRST else item
            number = next(numbers)
            if mode in (CallMode.FIRST, CallMode.NO_GRAPH) or not entry.wants[number]:
                return item  # no graph here, or none that the tensor came from
            tensor_id = entry.version, number
            if same and mode is CallMode.PLAIN and entry.virtual_stage == self.virtual_stage:
                return item  # of this graph: autograd needs no help
            if same and (recomputed := self._find_saved(tensor_id)) is not None:
                return recomputed  # by an edit before this one at the site, and so of this graph
            # Of another graph: its gradients are added up, and the anchor of the edit that made it has them.
            token = torch.empty(0, requires_grad=True)
            # torch does not type `apply`
            return DetachedRead.apply(token, [item], partial(micro.add_gradient, tensor_id))  # type: ignore[no-untyped-call]

        return map_leaves(entry.value, leaf)

    def _find_saved(self, tensor_id: TensorId) -> Tensor | None:
        """A tensor that an edit of this pass has saved, whose gradients no anchor takes yet."""
        # The last one: an exception that ends a recomputation leaves those of its pass.
        return next((tensor for _, saved, tensor in reversed(self._anchors) if saved == tensor_id), None)

    def _commit(self, frame: CallFrame) -> None:
        key, mode, once = frame.key, frame.mode, frame.hook.run == "once"
        written: dict[str, ContextEntry] = {}
        for name, value in frame.values.touched().items():
            version = ValueVersion(self.virtual_stage, key.site, key.call, frame.index, name)
            tensors = list_tensors(value)
            if mode in (CallMode.PLAIN, CallMode.REPLAY):
                self._anchors += [(once, (version, n), t) for n, t in enumerate(tensors) if t.requires_grad]
            wants = tuple(_wants_gradient(t, mode) for t in tensors)
            stage = self.virtual_stage if mode is CallMode.PLAIN else None
            written[name] = ContextEntry(value, version, wants, stage, once)
        if mode is CallMode.REPLAY:  # the first pass has made these changes; only the anchors are new
            return
        of_run = {name: detach_value(value) for name, value in frame.run.touched().items()}
        self._changes = Changes(written, frame.values.removed), Changes(of_run, frame.run.removed)
        self._apply(frame.micro)

    def _apply(self, micro: MicrobatchValues) -> None:
        of_microbatch, of_run = self._changes
        of_microbatch.apply(micro.state)
        of_run.apply(self.run)

    def keep(self, name: str) -> None:
        """Keep a value of the running call's microbatch beyond the end of the microbatch."""
        if self.frame is not None and self.frame.mode is not CallMode.REPLAY:
            value = detach_value(self.frame.values[name])
            self.kept.setdefault(name, {}).pop(self.clock.microbatch, None)  # reinserted as the last one
            self.kept[name][self.clock.microbatch] = value

    # -- functions that run once -----------------------------------------------------------------------

    def share(
        self, hook: HookFunction, refused: Callable[[str, Exception], None], holders: Mesh, is_sender: bool
    ) -> None:
        """Broadcast the changes made by a call on one rank. Collective over `holders`.

        Args:
            hook: the hook of the call.
            refused: called with the name of a value that cannot be sent.
            holders: the axes of the ranks for which the call runs.
            is_sender: whether the call ran on this rank.
        """
        if self.alone or not self.shared or self._mode(hook) is CallMode.REPLAY:
            return
        micro, (of_microbatch, of_run) = self.begin(), self._changes
        items: dict[Any, Any] = {("removed", ""): (of_microbatch.removed, of_run.removed)}
        items |= {("run", name): value for name, value in of_run.written.items()}
        entries = of_microbatch.written.items()
        items |= {("value", name): replace(entry, virtual_stage=None) for name, entry in entries}

        def refuse(key: tuple[str, str], error: Exception) -> None:
            (self.run if key[0] == "run" else micro.state).pop(key[1], None)
            refused(key[1], error)

        received = unpack_values(
            broadcast_package(pack_values(items, refuse) if is_sender else None, holders)
        )
        if not is_sender:
            removed, removed_of_run = received["removed", ""]
            written, written_of_run = (
                {name: item for (kind, name), item in received.items() if kind == scope}
                for scope in ("value", "run")
            )
            self._changes = Changes(written, removed), Changes(written_of_run, removed_of_run)
            self._apply(micro)

    # -- gradients -------------------------------------------------------------------------------------

    def anchor_gradients(self, full: Tensor, holders: Mesh, leads: bool, saving: bool) -> Tensor:
        """Anchor the output of edits at a site, so that gradients reach the tensors that these edits saved.
        Collective over `holders` if `saving` and a function that one rank runs may read them.

        Args:
            full: the output.
            holders: the axes of the ranks that hold it.
            leads: whether this rank runs the functions that one rank runs.
            saving: whether all ranks run a function at the site that may save tensors.
        """
        anchors, self._anchors = self._anchors, []
        for once in (False, True) if full.is_floating_point() else ():
            saved = [(tensor_id, tensor) for by, tensor_id, tensor in anchors if by is once]
            # If every rank made the tensor, only the edit's rank may have read it: its gradient is used.
            spread = self.once and self.shared and not once and not self.alone
            if spread and saving and torch.is_grad_enabled():
                same = equal_over_ranks(len(saved), holders, "the tensors that edits saved")
                saved = saved if same else []  # a function failed, and has saved none on that rank
            if saved:
                tensor_ids = [tensor_id for tensor_id, _ in saved]
                take = partial(_take_gradients, self.begin(), tensor_ids, holders if spread else None, leads)
                # torch does not type `apply`
                full = cast(Tensor, GradientAnchor.apply(full, take, *(t for _, t in saved)))  # type: ignore[no-untyped-call]
        return full


def _take_gradients(
    micro: MicrobatchValues, tensor_ids: list[TensorId], holders: Mesh | None, leads: bool
) -> list[Tensor | None]:
    """The gradients of saved tensors, in their order; None for an unused tensor."""
    grads = {n: micro.gradients.pop(t) for n, t in enumerate(tensor_ids) if t in micro.gradients}
    if holders is not None:
        grads = unpack_values(broadcast_package(pack_values(grads, _raise_error) if leads else None, holders))
    return [grads.get(n) for n in range(len(tensor_ids))]


def _call_checked(frame: CallFrame, function: Callable[[], Tensor]) -> Tensor:
    """Call a function, and check that its recomputation will read the same values."""
    out = function()
    if frame.mode is CallMode.FIRST:
        changed = [*frame.values.changed_in_place(), *frame.run.changed_in_place()]
        if changed:
            raise HookError(
                f"save_ctx.{changed[0]} was changed in place, and activation recomputation needs it as "
                f"it was; write save_ctx.{changed[0]} = ... with a new tensor"
            )
    return out


def _wants_gradient(tensor: Tensor, mode: CallMode) -> bool:
    """Whether a gradient is to be propagated back; for a tensor of a first pass only the replay decides."""
    if mode is CallMode.FIRST:
        return tensor.is_floating_point() or tensor.is_complex()
    return mode is CallMode.PLAIN and tensor.requires_grad


def _copy_item(item: Any) -> Any:
    return item if isinstance(item, IMMUTABLE_TYPES) else copy.deepcopy(item)


def _raise_error(key: Any, error: Exception) -> None:
    raise error
