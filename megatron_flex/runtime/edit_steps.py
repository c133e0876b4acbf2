"""The steps of a pass: an editing function with all that a hook asks for around it, composed once.

A step takes the tensor, the key of the pass and whether this is activation recomputation, and returns the
tensor that the next step sees. What a hook does not ask for is not there: `compose_step` puts together a
check of the result, and around it sums over ranks, random streams, shared values, trainable modules,
`on_error="skip"`, `run="once"`; at the outside the step that leaves the tensor unedited if all this raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives import EditSums, OneRank, enter, exit, run_beside
from megatron_flex.errors import BrokenError
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.edit_debugger import CurrentEdit
from megatron_flex.runtime.debug.error_origin import guard_backward
from megatron_flex.runtime.edit_environment import (
    SINGLE_RANK,
    STOP_RECOMPUTATION,
    EditEnvironment,
    check_result,
    seed_generators,
)
from megatron_flex.runtime.edit_failures import SkipEdit
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import draws_random_numbers, uses_context
from megatron_flex.runtime.hooks import EditingFunction, HookFunction

Step = Callable[[Tensor, Key, bool], Tensor]
Find = Callable[[Key], EditingFunction]  # the editing function of one pass; it may raise


@dataclass(frozen=True, slots=True)
class PlannedEdit:
    """The edit of one hook in the passes of a site.

    Attributes:
        hook: the hook.
        index: of the hook among those at the site, which has a random stream of its own.
        function: what is called in any pass: the hook's editing function, or what it makes for a shard.
        find: finds the function of one pass, where the editing function has `for_pass`; None otherwise.
        module: the module at the site, the function's first argument.
        sums: the sums over ranks of a function on shards, if it may have some.
        holders: the axes of the ranks that hold the tensor and run the function.
        leads: whether this rank counts for all of them, and runs the functions that one rank runs.
        replicas: the axis whose ranks draw other random numbers.
    """

    hook: HookFunction
    index: int
    function: EditingFunction
    find: Find | None
    module: Any
    sums: EditSums | None
    holders: Mesh
    leads: bool
    replicas: Axis

    @property
    def returns_new_tensor(self) -> bool:
        """Whether the function changes nothing in place, and keeps no reference to its result."""
        return traits_of(self.function).returns_new_tensor


def anchor_saved(edits: Sequence[PlannedEdit], editing: EditEnvironment) -> Callable[[Tensor], Tensor] | None:
    """What connects the values that edits have saved to the tensor that continues; None if they save none."""
    if not any(uses_context(edit.function) for edit in edits):
        return None
    holders, leads, hooks = edits[0].holders, edits[0].leads, {edit.hook for edit in edits}

    def anchor(edited: Tensor) -> Tensor:
        saving = any(h.run != "once" for h in editing.context_relay.plan.hooks & hooks)
        return editing.scopes.anchor_gradients(edited, holders, leads, saving)

    return anchor


def compose_step(edit: PlannedEdit, before: Sequence[PlannedEdit], editing: EditEnvironment) -> Step:
    """The step of an edit, with what its hook and the session ask for.

    Args:
        edit: the edit.
        before: the edits before it at the site.
        editing: what all edits of the session share.
    """
    skips, shares = edit.hook.on_error == "skip", uses_context(edit.function)
    once = edit.hook.run == "once"
    alone = once and any(axis.size > 1 for axis in edit.holders)
    holders = SINGLE_RANK if once else edit.holders
    step = _call_function(edit, editing)
    if edit.sums is not None:
        step = _sum_over_ranks(step, edit.sums)
    # What a failed function has changed must be known on the host, and so must the sums that it has joined.
    changes = shares or once or bool(editing.modules) or edit.sums is not None
    if shares:
        step = _share_values(step, edit, editing, holders)
    elif skips and changes:
        step = _attempt(step, editing, holders)
    if skips:
        step = (_leave_out if changes else _replace_failed)(step, edit, editing)
    if draws_random_numbers(edit.function):
        step = _seed(step, edit, editing)
    if editing.modules or once:
        step = _train(step, editing)
    step = _protect(step, edit, editing)
    if alone:
        step = _run_on_one_rank(step, edit, editing)
    if shares and any(axis.size > 1 for axis in edit.holders):
        step = _read_from_before(step, before, editing, once)
    return _await_values(step, edit.hook, editing) if shares else step


def _call_function(edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Call the editing function, and check its result."""
    function, find, module, current = edit.function, edit.find, edit.module, (edit.hook, editing.mesh)
    context, modules, hook = editing.save_ctx, editing.modules, edit.hook

    def call_preset(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        edited = function(module, tensor, context, modules)
        check_result(edited, tensor.shape, tensor.dtype, tensor.device)
        return edited

    def call(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        of_pass = function if find is None else find(key)
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        before, CurrentEdit.edit = CurrentEdit.edit, (hook, key, current[1])
        differentiates = torch.is_grad_enabled()
        try:
            edited = of_pass(module, tensor, context, modules)
        finally:
            CurrentEdit.edit = before
            if torch.is_grad_enabled() != differentiates:
                torch.set_grad_enabled(differentiates)
        check_result(edited, shape, dtype, device)
        return edited

    return call_preset if find is None and edit.returns_new_tensor else call


def _sum_over_ranks(step: Step, sums: EditSums) -> Step:
    """Join the sums that other ranks are in, if the function fails here."""

    def summed(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        return sums.run(partial(step, tensor, key, replay), tensor)

    return summed


def _attempt(step: Step, editing: EditEnvironment, holders: Mesh) -> Step:
    """Exchange with the other holders whether the function failed; it raises on all of them alike."""

    def attempted(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        call = partial(step, tensor, key, replay)
        return call() if replay else editing.skips.attempt(holders, call)

    return attempted


def _leave_out(step: Step, edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Leave the tensor unedited on all holders where the function failed on one, and in recomputation."""
    hook, index, skips, in_place = edit.hook, edit.index, editing.skips, not edit.returns_new_tensor

    def left_out(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        if replay and skips.was_skipped(key, index):
            editing.complete = False
            return tensor
        try:  # a failed function must have changed nothing in place
            return step(tensor.clone() if in_place and not replay else tensor, key, replay)
        except SkipEdit as skip:
            editing.complete = False
            text = editing.describe_failure(hook, key, skip.error)
            skips.count(hook, index, key, text, skip, edit.leads)
            return tensor

    return left_out


def _replace_failed(step: Step, edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Likewise for a function that changes nothing else: no host waits for the others.

    Whether it failed on another rank is decided where the tensor is.
    """
    hook, index, skips, in_place = edit.hook, edit.index, editing.skips, not edit.returns_new_tensor

    def replaced(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        first = skips.find_attempt(key, index) if replay else None
        if first is not None and (first.error is not None or (first.failed.is_cpu and first.failed)):
            editing.complete = False
            return tensor
        error: Exception | None = None
        edited = tensor
        try:  # a failed function must have changed nothing in place
            edited = step(tensor.clone() if in_place and not replay else tensor, key, replay)
        except Exception as raised:  # counted at the end of the step
            if replay or isinstance(raised, (STOP_RECOMPUTATION, BrokenError)):
                raise
            error = raised
        if replay and first is None:
            return edited
        if first is None:
            failed = skips.note(hook, index, key, error, tensor, edit.holders, edit.leads)
        else:
            failed = first.failed
        editing.complete &= error is None
        if not failed.is_cpu:
            return torch.where(failed, tensor, edited)
        editing.complete &= not failed
        return tensor if failed else edited

    return replaced


def _share_values(step: Step, edit: PlannedEdit, editing: EditEnvironment, holders: Mesh) -> Step:
    """Run the function with the values of its microbatch in `save_ctx`; they change if it succeeds."""
    hook, skips = edit.hook, edit.hook.on_error == "skip"
    attempt_jointly = partial(editing.skips.attempt, holders)

    def with_values(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        call = partial(step, tensor, key, replay)
        attempt = attempt_jointly if skips and not replay else _call_once
        if hook not in editing.context_relay.plan.hooks:
            return attempt(call)
        return editing.scopes.call(hook, edit.index, key, tensor.device, call, attempt)

    return with_values


def _call_once(call: Callable[[], Tensor]) -> Tensor:
    return call()


def _read_from_before(
    step: Step, before: Sequence[PlannedEdit], editing: EditEnvironment, once: bool
) -> Step:
    """Let gradients reach what edits before this one have saved at the site, on one rank or on all."""
    anchor = anchor_saved([e for e in before if e.hook.run != "once"], editing)
    from_one = any(e.hook.run == "once" and uses_context(e.function) for e in before)

    def anchored(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        # What one rank reads of all ranks' tensors has its gradients after the backward pass of this edit.
        return step(tensor if anchor is None else anchor(tensor), key, replay)

    def beside(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        edited = step(tensor, key, replay)
        if not (torch.is_grad_enabled() and edited.requires_grad and tensor.requires_grad):
            return edited
        # The rank that saved the tensor reaches the collectives of its edit through what is read of it; the
        # others do so through the input, which the function may ignore.
        return run_beside(edited, tensor)

    return anchored if once else beside if from_one else step


def _await_values(step: Step, hook: HookFunction, editing: EditEnvironment) -> Step:
    """Receive first what functions on earlier pipeline stages have saved. Every rank calls the step."""

    def after_arrival(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        if hook in editing.context_relay.plan.hooks:
            editing.context_relay.arrive()
        return step(tensor, key, replay)

    return after_arrival


def _seed(step: Step, edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Run the function with a random stream that is the same on all ranks that hold the tensor."""

    def seeded(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        with seed_generators(editing.make_seed(key, edit.replicas), edit.index, tensor):
            return step(tensor, key, replay)

    return seeded


def _train(step: Step, editing: EditEnvironment) -> Step:
    """Collect the gradients of trainable modules, and of losses that the function computes itself."""
    trainable = editing.trainable

    def training(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        with trainable.editing(replay):
            trainable.contain(tensor)
            return step(tensor, key, replay)

    return training


def _protect(step: Step, edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Record an exception for the end of the step, and leave the tensor unedited."""
    hook, sums, certain = edit.hook, edit.sums, edit.returns_new_tensor

    def protected(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        try:
            edited = step(tensor, key, replay)
        except Exception as error:  # recorded, unless the exception ends a pass
            if isinstance(error, (SkipEdit, STOP_RECOMPUTATION, BrokenError)):
                raise
            editing.failed(hook, key, error, late=replay)
            return tensor if sums is None else sums.connect(tensor)
        if not certain and edited.grad_fn is not None:
            guard_backward(edited, tensor, partial(editing.failed, hook, key, late=True))
        return edited if torch.is_grad_enabled() or not edited.requires_grad else edited.detach()

    return protected


def _run_on_one_rank(step: Step, edit: PlannedEdit, editing: EditEnvironment) -> Step:
    """Let one rank edit for all ranks that hold the tensor."""
    exchange, hook, holders = OneRank(edit.holders), edit.hook, edit.holders
    refuse = editing.note_refused

    def run_once(tensor: Tensor, key: Key, replay: bool) -> Tensor:
        if tensor.is_floating_point() and torch.is_grad_enabled() and not tensor.requires_grad:
            # The result may still require a gradient; then all ranks must run its backward pass.
            tensor = tensor.detach().requires_grad_()
        entrance = enter(tensor, exchange)
        edited = step(entrance, key, replay) if edit.leads else entrance
        if hook in editing.context_relay.plan.hooks:
            editing.scopes.share(hook, partial(refuse, hook, key), holders, edit.leads)
        return exit(edited, entrance, tensor, exchange)

    return run_once
