"""Running what a person wrote: an editing function on a tensor, its errors kept for the step's end."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from megatron_flex.collectives import from_edit_rank, is_leader_for, replica_mesh, to_edit_rank
from megatron_flex.errors import FlexError, HookError, described
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.debug.error_origin import guard_backward, format_user_line
from megatron_flex.runtime.debugging.stopping import track_edit
from megatron_flex.runtime.hooks import EditingFunction, HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlan
from megatron_flex.runtime.context.save_context import Context
from megatron_flex.runtime.context.context_relay import ContextRelay
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.skipping import FAILED_ELSEWHERE, SkipEdit, EditSkips
from megatron_flex.runtime.streams import seed_generators
from megatron_flex.runtime.trainable_modules import TrainableModules

Result = TypeVar("Result")
SINGLE_RANK = Mesh()
TOO_LATE_TO_SKIP = "; on_error='skip' cannot leave out an edit whose result has been used"
# By this torch's checkpointing ends a replay that has recomputed all that it needs.
STOP_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


class EditRunner:
    """Runs editing functions.

    Attributes:
        save_ctx: what editing functions share.
        scopes: where that is kept.
        passing: brings it from one pipeline stage to the next.
        modules: the trainable modules that they are given.
        fired: the hooks that something has passed through.
        failure: what went wrong first in this step, in words, and the error.
        reasons: by a site's name why nothing could pass its hooks.
        skipping: counts the passes that edits were left out of.
    """

    def __init__(
        self, mesh: Mesh, clock: Clock, trainable: TrainableModules, name: str, gather_data_parallel: bool
    ) -> None:
        self.mesh, self.trainable = mesh, trainable
        self.scopes = ContextScopes(mesh, clock, gather_data_parallel)
        self.passing = ContextRelay(mesh, clock, self.scopes, self.note, name)
        self.save_ctx = Context(self.scopes)
        self.modules = trainable.modules
        self.fired: set[HookFunction] = set()
        self.failure: tuple[str, BaseException] | None = None
        self.reasons: dict[str, str] = {}
        self.skipping = EditSkips(mesh, trainable)

    def edit(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        whole: Tensor,
        layout: Layout,
        way: LocalEditPlan | None = None,
    ) -> Tensor:
        """Run editing functions one after the other; one that fails leaves the tensor as it was.

        `way`: they run on this rank's part, which `whole` then is.
        """
        if way is None:
            holders, here, shape = replica_mesh(layout, self.mesh), is_leader_for(layout, self.mesh), tuple(whole.shape)
        else:
            holders, here, shape = way.holders, way.leads, way.shard.whole
        for index, hook in enumerate(hooks):
            self.fired.add(hook)
            if hook.expected_shape is not None:
                self.guard(hook, key, partial(hook.check_shape, shape))
            if way is not None and hook in way.edits:
                find = partial(way.at, hook, key)
                edited = self._run(hook, index, key, module, whole, holders, here, find, way.edits[hook])
                whole = whole if edited is None else edited
            elif hook.editing_function is not None:
                if hook in self.passing.plan.hooks:
                    self.passing.arrive()
                if hook.run == "leader":
                    whole = self._lead(hook, index, key, module, whole, holders, here)
                else:
                    edited = self._run(hook, index, key, module, whole, holders, here, *_resolve_edit(hook, key))
                    whole = whole if edited is None else edited
        return self.scopes.anchor_gradients(whole, holders, here)

    def _run(
        self,
        hook: HookFunction,
        index: int,
        key: Key,
        module: Any,
        whole: Tensor,
        holders: Mesh,
        here: bool,
        find: Callable[[], EditingFunction | None],
        edit: EditingFunction | None,
    ) -> Tensor | None:
        replay = Clock.replaying() and not hook.backward
        skips = hook.on_error == "skip" and not replay
        if replay and self.skipping.was_skipped(key, index):
            return None
        if skips and not getattr(edit, "fresh", False):  # what it does in place is no edit if it fails
            whole = whole.clone()
        with ExitStack() as around:
            self._prepare(around, hook, index, key, whole, edit, replay)
            call = partial(call_editing_function, find, module, whole, self.save_ctx, self.modules)
            attempt = partial(self.skipping.attempt, holders) if skips else _call_once
            if hook in self.passing.plan.hooks:
                call = partial(self.scopes.call, hook, index, key, whole.device, call, attempt)
            elif skips:
                call = partial(attempt, call)
            try:
                made = self.guard(hook, key, call, late=replay)
            except SkipEdit as left:
                self.skipping.count(hook, index, key, self._told(hook, key, left.error), left, here)
                return None
        if made is not None and made.grad_fn is not None and not getattr(edit, "fresh", False):
            guard_backward(made, whole, partial(self._failed, hook, key, late=True))
        loose = made is not None and made.requires_grad and not torch.is_grad_enabled()
        return made.detach() if made is not None and loose else made

    def _prepare(
        self,
        around: ExitStack,
        hook: HookFunction,
        index: int,
        key: Key,
        whole: Tensor,
        edit: EditingFunction | None,
        replay: bool,
    ) -> None:
        """Enter what an editing function runs in; presets say what they can do without."""
        if getattr(edit, "draws", True):
            around.enter_context(seed_generators(key, index, whole))
        if self.modules or not getattr(edit, "fresh", False):
            around.enter_context(self.trainable.editing(replay))
            around.enter_context(track_edit(hook, key, self.mesh))
            if self.modules or hook.run == "leader":  # what the leader does backward, others do not
                self.trainable.contain(whole)

    def _lead(
        self, hook: HookFunction, index: int, key: Key, module: Any, whole: Tensor, holders: Mesh, here: bool
    ) -> Tensor:
        """Let the leader edit for all ranks that hold this whole."""
        whole = to_edit_rank(whole, holders)
        made: Tensor | None = whole
        if here:
            made = self._run(hook, index, key, module, whole, SINGLE_RANK, here, *_resolve_edit(hook, key))
        if hook in self.passing.plan.hooks:
            self.scopes.share(hook, partial(self._refused, hook, key), holders, here)
        return from_edit_rank(whole if made is None else made, whole, holders)

    def _refused(self, hook: HookFunction, key: Key, name: str, error: Exception) -> None:
        self.note(
            f"{_describe_hook_call(hook, key)}: save_ctx.{name} cannot be sent to the other ranks of the stage "
            f"({described(error)}); save tensors, numbers, strings or what can be pickled",
            error,
        )

    def note(self, message: str, error: BaseException) -> None:
        """Keep an error for the end of the step, if it is the first."""
        self.failure = self.failure or (message, error)

    def guard(
        self, hook: HookFunction, key: Key, call: Callable[[], Result], late: bool = False
    ) -> Result | None:
        """Run what a person wrote; keep an error for the end of the step, where all ranks raise it.

        `late`: what the function made at first has been used.
        """
        try:
            return call()
        except Exception as error:
            if isinstance(error, (SkipEdit, STOP_RECOMPUTATION)):
                raise
            self._failed(hook, key, error, late)
            return None

    def _failed(self, hook: HookFunction, key: Key, error: BaseException, late: bool = False) -> None:
        self.note(self._told(hook, key, error) + TOO_LATE_TO_SKIP * (late and hook.on_error == "skip"), error)

    def _told(self, hook: HookFunction, key: Key, error: BaseException | None) -> str:
        if error is None:
            return f"{_describe_hook_call(hook, key)}: {FAILED_ELSEWHERE}"
        line = "" if isinstance(error, FlexError) else f" in {format_user_line(error)}"
        return f"{_describe_hook_call(hook, key)}: {described(error)}{line}"

    def check_shapes(self, hooks: list[HookFunction], key: Key, shape: Sequence[int]) -> None:
        """Compare a whole's shape with what hooks expect."""
        for hook in hooks:
            self.guard(hook, key, partial(hook.check_shape, shape))


def call_editing_function(
    find: Callable[[], EditingFunction | None],
    module: Any,
    whole: Tensor,
    context: Namespace,
    modules: nn.ModuleDict,
) -> Tensor:
    """Run the editing function that `find` gives for this pass, and check what it returns.

    Raises:
        HookError: it returns no tensor, or one of another shape, dtype or device.
    """
    edit = find()
    assert edit is not None
    shape, dtype, device = whole.shape, whole.dtype, whole.device
    out = edit(module, whole, context, modules)
    if not isinstance(out, Tensor):
        raise HookError(
            f"the editing function returned {type(out).__name__}; return a tensor like the one it got"
        )
    for what, got, want in (
        ("shape", tuple(out.shape), tuple(shape)),
        ("dtype", out.dtype, dtype),
        ("device", out.device, device),
    ):
        if got != want:
            raise HookError(
                f"the editing function returned {what} {got} for {want}; return the {what} it got"
            )
    return out


def _resolve_edit(
    hook: HookFunction, key: Key
) -> tuple[Callable[[], EditingFunction | None], EditingFunction | None]:
    """What finds a hook's editing function for one pass, which may raise, and that of any pass."""
    return partial(hook.editing_at, key), hook.editing_of(key.site)


def _call_once(function: Callable[[], Tensor]) -> Tensor:
    return function()


def _describe_hook_call(hook: HookFunction, key: Key) -> str:
    when = f"iteration {key.iteration}, microbatch {key.microbatch}"
    return f"hook ({hook.describe()}) at {key.site}, {when}"
