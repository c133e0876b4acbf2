"""Runs a user's editing functions on a tensor, with the same random stream on all ranks, and records errors.

All ranks raise the errors at the end of the step.
"""

from __future__ import annotations

import random
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from megatron_flex.collectives import (
    EditSums,
    FailedElsewhere,
    from_edit_rank,
    is_leader_for,
    replica_mesh,
    to_edit_rank,
)
from megatron_flex.config import flex_config
from megatron_flex.dump.token_selection import number_microbatch
from megatron_flex.errors import BrokenError, FlexError, HookError, describe_error, error_attributes
from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.autograd_graph import connect_output, enter_edit
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_relay import ContextRelay
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.context.save_context import Context
from megatron_flex.runtime.debug.edit_debugger import CurrentEdit, track_edit
from megatron_flex.runtime.debug.error_origin import format_user_line, guard_backward
from megatron_flex.runtime.debug.purity import draws_random_numbers
from megatron_flex.runtime.edit_failures import FAILED_ELSEWHERE, EditSkips, SkipEdit, StepFailure
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.hooks import EditingFunction, HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlan
from megatron_flex.runtime.trainable_modules import TrainableModules


@contextmanager
def seed_generators(key: Key, index: int, like: Tensor) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python from the key during an edit, and restore them
    afterwards.

    Generators that the user made are left alone.

    Args:
        key: the key that `EditRunner.make_seed` makes of the key of a pass; each has its own stream.
        index: the index of the hook among those at its site; each index has its own stream.
        like: a tensor on the device whose generator the edit would use.
    """
    devices = [like.device] if like.device.type == "cuda" else []
    seed = zlib.crc32(
        f"{flex_config.seed}/{key.site}/{key.iteration}.{key.step}/{key.microbatch}/{key.call}/{index}".encode()
    )
    with torch.random.fork_rng(devices, device_type="cuda"), _seed_other_generators(seed):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def find_replica_axis(layout: Layout, mesh: Mesh) -> Axis:
    """The axis whose ranks edit the full tensors of different samples; an axis of one rank where the layout
    gathers the samples of all of them.
    """
    return SINGLE_RANK["dp"] if "dp" in layout.axes else mesh["dp"]


@contextmanager
def _seed_other_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and, if it is imported, of numpy."""
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


@dataclass(frozen=True, slots=True)
class PlannedEdit:
    """One editing function of a planned pass.

    Attributes:
        hook: its hook.
        index: of the hook among those at the site.
        function: what is called.
        draws: whether it may draw random numbers.
        replicas: the axis whose ranks draw different ones.
        fresh: whether it changes nothing in place, and keeps no reference to its result.
        sums: its sums over ranks, if it may have some.
    """

    hook: HookFunction
    index: int
    function: EditingFunction
    draws: bool
    replicas: Axis
    fresh: bool
    sums: EditSums | None


Result = TypeVar("Result")
SINGLE_RANK = Mesh()
FORWARD_PASS, BACKWARD_PASS = "forward pass", "backward pass"  # places of errors that concern no site
PASSES = (FORWARD_PASS, BACKWARD_PASS)
MAX_EXAMINED = 4096  # functions of which it is known whether they draw random numbers
TOO_LATE_TO_SKIP = "; on_error='skip' cannot leave out an edit whose result has been used"
# Recent versions of torch raise this in checkpointing to end a replay that has recomputed all it needs.
STOP_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


class EditRunner:
    """Runs editing functions.

    Attributes:
        save_ctx: the context that editing functions share.
        scopes: where the context's values are stored.
        passing: sends the context from one pipeline stage to the next.
        modules: the trainable modules, the last argument of an editing function.
        fired: the hooks that have been called.
        failure: the first error of this step.
        complete: whether no edit of the last pass failed, or was left out, on this rank.
        reasons: by site name, why no tensor could reach its hooks.
        skipping: counts the passes in which edits were skipped.
    """

    def __init__(
        self, mesh: Mesh, clock: Clock, trainable: TrainableModules, name: str, gather_data_parallel: bool
    ) -> None:
        self.mesh, self.clock, self.trainable = mesh, clock, trainable
        self.scopes = ContextScopes(mesh, clock, gather_data_parallel)
        self.passing = ContextRelay(mesh, clock, self.scopes, self.note, name)
        self.save_ctx = Context(self.scopes)
        self.modules = trainable.modules
        self.fired: set[HookFunction] = set()
        self.failure: StepFailure | None = None
        self.complete = True
        self.reasons: dict[str, str] = {}
        self.skipping = EditSkips(mesh, trainable)
        self._drawing: dict[int, tuple[EditingFunction, bool]] = {}  # by identity, which the entry keeps

    def edit(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        full: Tensor,
        layout: Layout,
        way: LocalEditPlan | None = None,
    ) -> Tensor:
        """Run editing functions one after the other; one that fails leaves the tensor unedited.

        With a local plan `way`, `full` is this rank's shard and the functions run on the shard.
        """
        if way is None:
            holders, here, shape = (
                replica_mesh(layout, self.mesh),
                is_leader_for(layout, self.mesh),
                tuple(full.shape),
            )
        else:
            holders, here, shape = way.holders, way.leads, way.shard.full_size
        seed = self.make_seed(key, find_replica_axis(layout, self.mesh))
        self.complete = True
        full = entrance = enter_edit(full)
        sure = way is not None and way.returns_new_tensor
        for index, hook in enumerate(hooks):
            self.fired.add(hook)
            if hook.expected_shape is not None:
                self.guard(hook, key, partial(hook.check_shape, shape))
            if way is not None and hook in way.edits:
                find, sums = partial(way.at, hook, key), way.sums.get(hook)
                edited = self._run(
                    hook, index, key, seed, module, full, holders, here, find, way.edits[hook], sums
                )
                full = full if edited is None else edited
            elif hook.editing_function is not None:
                if hook in self.passing.plan.hooks:
                    self.passing.arrive()
                if hook.run == "once":
                    full = self._run_once(hook, index, key, seed, module, full, holders, here)
                else:
                    edited = self._run(
                        hook, index, key, seed, module, full, holders, here, *_resolve_edit(hook, key)
                    )
                    full = full if edited is None else edited
        saving = any(h.run != "once" for h in self.passing.plan.hooks.intersection(hooks))
        return connect_output(self.scopes.anchor_gradients(full, holders, here, saving), entrance, sure)

    def run(
        self, steps: Sequence[PlannedEdit], key: Key, module: Any, tensor: Tensor, replay: bool
    ) -> Tensor:
        """Run the editing functions of a planned pass; one that fails leaves the tensor unedited.

        Without trainable modules and without values that edits share.
        """
        self.complete = True
        for step in steps:
            try:
                if step.sums is not None:
                    call = partial(self._call_seeded, step, key, module, tensor)
                    made = step.sums.run(call, tensor)
                elif step.fresh and not step.draws:
                    made = step.function(module, tensor, self.save_ctx, self.modules)
                    check_result(made, tensor.shape, tensor.dtype, tensor.device)
                elif step.draws:
                    made = self._call_seeded(step, key, module, tensor)
                else:
                    made = self._call_planned(step, key, module, tensor)
            except Exception as error:  # recorded, unless the exception ends a pass
                if isinstance(error, (SkipEdit, STOP_RECOMPUTATION, BrokenError)):
                    raise
                self._failed(step.hook, key, error, late=replay)
                tensor = tensor if step.sums is None else step.sums.connect(tensor)
                continue
            if not step.fresh and made.grad_fn is not None:
                guard_backward(made, tensor, partial(self._failed, step.hook, key, late=True))
            tensor = made if torch.is_grad_enabled() or not made.requires_grad else made.detach()
        return tensor

    def _call_seeded(self, step: PlannedEdit, key: Key, module: Any, tensor: Tensor) -> Tensor:
        if not step.draws:
            return self._call_planned(step, key, module, tensor)
        with seed_generators(self.make_seed(key, step.replicas), step.index, tensor):
            return self._call_planned(step, key, module, tensor)

    def _call_planned(self, step: PlannedEdit, key: Key, module: Any, tensor: Tensor) -> Tensor:
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        before, CurrentEdit.edit = CurrentEdit.edit, (step.hook, key, self.mesh)
        differentiates = torch.is_grad_enabled()
        try:
            out = step.function(module, tensor, self.save_ctx, self.modules)
        finally:
            CurrentEdit.edit = before
            if torch.is_grad_enabled() != differentiates:
                torch.set_grad_enabled(differentiates)
        check_result(out, shape, dtype, device)
        return out

    def _run(
        self,
        hook: HookFunction,
        index: int,
        key: Key,
        seed: Key,
        module: Any,
        full: Tensor,
        holders: Mesh,
        here: bool,
        find: Callable[[], EditingFunction | None],
        edit: EditingFunction | None,
        sums: EditSums | None = None,
    ) -> Tensor | None:
        replay = Clock.replaying() and not hook.backward
        skips = hook.on_error == "skip" and not replay
        if replay and self.skipping.was_skipped(key, index):
            self.complete = False
            return None
        if skips and not getattr(
            edit, "returns_new_tensor", False
        ):  # a failed edit must change nothing in place
            full = full.clone()
        with ExitStack() as around:
            self._prepare(around, hook, index, key, seed, full, edit, replay)
            call = partial(call_editing_function, find, module, full, self.save_ctx, self.modules)
            if sums is not None:
                call = partial(sums.run, call, full)
            attempt = partial(self.skipping.attempt, holders) if skips else _call_once
            if hook in self.passing.plan.hooks:
                call = partial(self.scopes.call, hook, index, key, full.device, call, attempt)
            elif skips:
                call = partial(attempt, call)
            try:
                made = self.guard(hook, key, call, late=replay)
            except SkipEdit as left:
                self.complete = False
                self.skipping.count(
                    hook, index, key, self._describe_failure(hook, key, left.error), left, here
                )
                return None
        if made is None and sums is not None:
            return sums.connect(full)
        if made is not None and made.grad_fn is not None and not traits_of(edit).returns_new_tensor:
            guard_backward(made, full, partial(self._failed, hook, key, late=True))
        loose = made is not None and made.requires_grad and not torch.is_grad_enabled()
        return made.detach() if made is not None and loose else made

    def _prepare(
        self,
        around: ExitStack,
        hook: HookFunction,
        index: int,
        key: Key,
        seed: Key,
        full: Tensor,
        edit: EditingFunction | None,
        replay: bool,
    ) -> None:
        """Enter the contexts that an editing function runs in; presets declare which of them they do not
        need.
        """
        if edit is None or self._draws(edit):
            around.enter_context(seed_generators(seed, index, full))
        if self.modules or not traits_of(edit).returns_new_tensor:
            around.enter_context(self.trainable.editing(replay))
            around.enter_context(track_edit(hook, key, self.mesh))
            if self.modules or hook.run == "once":  # other ranks do not run that rank's backward pass
                self.trainable.contain(full)

    def make_seed(self, key: Key, replicas: Axis) -> Key:
        """The key that seeds the edits of a pass: with the number of the microbatch among those of all
        replicas, so that they draw what one process draws that has all microbatches; with the iteration, so
        that a resumed run goes on with other numbers; and with the steps that had this iteration before.
        """
        number = number_microbatch("interleaved", key.microbatch, replicas.coord, replicas.size)
        iteration, repeats = self.clock.seeds
        return Key(key.site, repeats, iteration, key.microbatch if number is None else number, key.call)

    def _draws(self, edit: EditingFunction) -> bool:
        """Whether a function may draw random numbers; examined once."""
        found = self._drawing.get(id(edit))
        if found is None:
            if len(self._drawing) >= MAX_EXAMINED:
                self._drawing.clear()
            found = self._drawing[id(edit)] = edit, draws_random_numbers(edit)
        return found[1]

    def _run_once(
        self,
        hook: HookFunction,
        index: int,
        key: Key,
        seed: Key,
        module: Any,
        full: Tensor,
        holders: Mesh,
        here: bool,
    ) -> Tensor:
        """Let one rank edit for all ranks that hold this full tensor."""
        if all(axis.size == 1 for axis in holders):
            alone = self._run(
                hook, index, key, seed, module, full, SINGLE_RANK, here, *_resolve_edit(hook, key)
            )
            return full if alone is None else alone
        full = to_edit_rank(full, holders)
        made: Tensor | None = full
        if here:
            found = _resolve_edit(hook, key)
            run = partial(self._run, hook, index, key, seed, module, full, SINGLE_RANK, here, *found)
            made = self.guard(hook, key, run)
        if hook in self.passing.plan.hooks:
            self.scopes.share(hook, partial(self._refused, hook, key), holders, here)
        return from_edit_rank(full if made is None else made, full, holders)

    def _refused(self, hook: HookFunction, key: Key, name: str, error: Exception) -> None:
        self.note(
            f"{_describe_hook_call(hook, key)}: save_ctx.{name} cannot be sent to the other ranks of the "
            "stage "
            f"({describe_error(error)}); save tensors, numbers, strings or what can be pickled",
            error,
            key.site,
            hook,
        )

    def note(
        self, message: str, error: BaseException, site: str | None = None, hook: HookFunction | None = None
    ) -> None:
        """Record an error for the end of the step, unless an earlier one is recorded."""
        self.failure = self.failure or StepFailure(message, error, site, hook)

    def caught(self, place: str, error: Exception) -> None:
        """Record an error of the package's own code in a forward or backward pass, for the end of the step.

        `place` is the site, or one of PASSES.

        Every entry point from the framework's passes calls this when it raises: the rank continues with the
        unedited tensor, because other ranks wait for the rank.

        Raises:
            Exception: the error, if it is not one of the package, or concerns a collective that other ranks
                are in.
        """
        site = None if place in PASSES else place
        if isinstance(error, (SkipEdit, STOP_RECOMPUTATION, BrokenError, torch.distributed.DistError)):
            with error_attributes(site=site):
                raise error
        self.complete = False
        line = "" if isinstance(error, FlexError) else f" in {format_user_line(error)}"
        when = f"iteration {self.clock.iteration}, microbatch {self.clock.microbatch}"
        self.note(f"{place}, {when}: {describe_error(error)}{line}", error, site)

    def apart(self, place: str, call: Callable[..., Any], *args: Any) -> None:
        """Call a function that does not change the tensor at the hook point; record an error instead of
        raising it.
        """
        try:
            call(*args)
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self.caught(place, error)

    def guard(
        self, hook: HookFunction, key: Key, call: Callable[[], Result], late: bool = False
    ) -> Result | None:
        """Run a user's code; record an error for the end of the step, where all ranks raise it.

        `late`: whether the function's first result has been used already.
        """
        try:
            return call()
        except Exception as error:  # recorded, unless the exception ends a pass
            if isinstance(error, (SkipEdit, STOP_RECOMPUTATION, BrokenError)):
                raise
            self._failed(hook, key, error, late)
            return None

    def _failed(self, hook: HookFunction, key: Key, error: BaseException, late: bool = False) -> None:
        self.complete = False
        if isinstance(error, FailedElsewhere):  # that rank raises
            return
        self.note(
            self._describe_failure(hook, key, error) + TOO_LATE_TO_SKIP * (late and hook.on_error == "skip"),
            error,
            key.site,
            hook,
        )

    def _describe_failure(self, hook: HookFunction, key: Key, error: BaseException | None) -> str:
        if error is None:
            return f"{_describe_hook_call(hook, key)}: {FAILED_ELSEWHERE}"
        line = "" if isinstance(error, FlexError) else f" in {format_user_line(error)}"
        return f"{_describe_hook_call(hook, key)}: {describe_error(error)}{line}"

    def check_shapes(self, hooks: list[HookFunction], key: Key, shape: Sequence[int]) -> None:
        """Compare a full tensor's shape with the shape that hooks expect."""
        for hook in hooks:
            self.guard(hook, key, partial(hook.check_shape, shape))


def call_editing_function(
    find: Callable[[], EditingFunction | None],
    module: Any,
    full: Tensor,
    context: Namespace,
    modules: nn.ModuleDict,
) -> Tensor:
    """Run the editing function that `find` returns for this pass, and check the result.

    Raises:
        HookError: the result is not a tensor, or has another shape, dtype or device.
    """
    edit = find()
    assert edit is not None
    shape, dtype, device = full.shape, full.dtype, full.device
    out = edit(module, full, context, modules)
    check_result(out, shape, dtype, device)
    return out


def check_result(out: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the result of an editing function with the tensor that it got.

    Raises:
        HookError: the result is not a tensor, or has another shape, dtype or device.
    """
    if not isinstance(out, Tensor):
        raise HookError(
            f"the editing function returned {type(out).__name__}; return a tensor like the one it got"
        )
    if out.shape == shape and out.dtype == dtype and out.device == device:
        return
    for what, got, want in (
        ("shape", tuple(out.shape), tuple(shape)),
        ("dtype", out.dtype, dtype),
        ("device", out.device, device),
    ):
        if got != want:
            raise HookError(
                f"the editing function returned {what} {got} for {want}; return the {what} it got"
            )


def _resolve_edit(
    hook: HookFunction, key: Key
) -> tuple[Callable[[], EditingFunction | None], EditingFunction | None]:
    """Return a function that finds a hook's editing function for this pass (it may raise), and that of any
    pass.
    """
    return partial(hook.editing_at, key), hook.editing_of(key.site)


def _call_once(function: Callable[[], Tensor]) -> Tensor:
    return function()


def _describe_hook_call(hook: HookFunction, key: Key) -> str:
    when = f"iteration {key.iteration}, microbatch {key.microbatch}"
    return f"hook ({hook.describe()}) at {key.site}, {when}"
