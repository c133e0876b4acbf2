"""What a user's editing functions run in: shared values, trainable modules, random streams; and their errors.

All ranks raise the errors at the end of the step.
"""

from __future__ import annotations

import random
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from megatron_flex.collectives import FailedElsewhere
from megatron_flex.config import flex_config
from megatron_flex.dump.token_selection import number_microbatch
from megatron_flex.errors import BrokenError, FlexError, HookError, describe_error, error_attributes
from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_relay import ContextRelay
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.context.save_context import Context
from megatron_flex.runtime.debug.error_origin import format_user_line
from megatron_flex.runtime.edit_failures import FAILED_ELSEWHERE, EditSkips, SkipEdit, StepFailure
from megatron_flex.runtime.hooks import EditingFunction, HookFunction
from megatron_flex.runtime.trainable_modules import TrainableModules


@contextmanager
def seed_generators(key: Key, index: int, like: Tensor) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python from the key during an edit, and restore them
    afterwards.

    Generators that the user made are left alone.

    Args:
        key: the key that `EditEnvironment.make_seed` makes of the key of a pass; each has its own stream.
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


Result = TypeVar("Result")
SINGLE_RANK = Mesh()
FORWARD_PASS, BACKWARD_PASS = "forward pass", "backward pass"  # places of errors that concern no site
PASSES = (FORWARD_PASS, BACKWARD_PASS)
TOO_LATE_TO_SKIP = "; on_error='skip' cannot leave out an edit whose result has been used"
# Recent versions of torch raise this in checkpointing to end a replay that has recomputed all it needs.
STOP_RECOMPUTATION = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


class EditEnvironment:
    """What the editing functions of a session run in, and their errors.

    Attributes:
        save_ctx: the context that editing functions share.
        scopes: where the context's values are stored.
        context_relay: sends the context from one pipeline stage to the next.
        modules: the trainable modules, the last argument of an editing function.
        fired: the hooks that have been called.
        failure: the first error of this step.
        complete: whether no edit of the last pass failed, or was left out, on this rank.
        reasons: by site name, why no tensor could reach its hooks.
        skips: counts the passes in which edits were skipped.
    """

    def __init__(
        self, mesh: Mesh, clock: Clock, trainable: TrainableModules, name: str, gather_data_parallel: bool
    ) -> None:
        self.mesh, self.clock, self.trainable = mesh, clock, trainable
        self.scopes = ContextScopes(mesh, clock, gather_data_parallel)
        self.context_relay = ContextRelay(mesh, clock, self.scopes, self.record_error, name)
        self.save_ctx = Context(self.scopes)
        self.modules = trainable.modules
        self.fired: set[HookFunction] = set()
        self.failure: StepFailure | None = None
        self.complete = True
        self.reasons: dict[str, str] = {}
        self.skips = EditSkips(mesh, trainable, self.describe_failure)

    def make_seed(self, key: Key, replicas: Axis) -> Key:
        """The key that seeds the edits of a pass: with the number of the microbatch among those of all
        replicas, so that they draw what one process draws that has all microbatches; with the iteration, so
        that a resumed run goes on with other numbers; and with the steps that had this iteration before.
        """
        number = number_microbatch("interleaved", key.microbatch, replicas.coord, replicas.size)
        iteration, repeats = self.clock.seeds
        return Key(key.site, repeats, iteration, key.microbatch if number is None else number, key.call)

    def note_refused(self, hook: HookFunction, key: Key, name: str, error: Exception) -> None:
        self.record_error(
            f"{_describe_hook_call(hook, key)}: save_ctx.{name} cannot be sent to the other ranks of the "
            "stage "
            f"({describe_error(error)}); save tensors, numbers, strings or what can be pickled",
            error,
            key.site,
            hook,
        )

    def record_error(
        self, message: str, error: BaseException, site: str | None = None, hook: HookFunction | None = None
    ) -> None:
        """Record an error for the end of the step, unless an earlier one is recorded."""
        self.failure = self.failure or StepFailure(message, error, site, hook)

    @contextmanager
    def collect_failures(self) -> Iterator[list[StepFailure]]:
        """Collect what fails inside, which is not an error of the step."""
        before, self.failure = self.failure, None
        failures: list[StepFailure] = []
        try:
            yield failures
        finally:
            failures += [] if self.failure is None else [self.failure]
            self.failure = before

    def record_internal_error(self, place: str, error: Exception) -> None:
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
        self.record_error(f"{place}, {when}: {describe_error(error)}{line}", error, site)

    def record_errors_of(self, place: str, call: Callable[..., Any], *args: Any) -> None:
        """Call a function that does not change the tensor at the hook point; record an error instead of
        raising it.
        """
        try:
            call(*args)
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self.record_internal_error(place, error)

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
            self.failed(hook, key, error, late)
            return None

    def failed(self, hook: HookFunction, key: Key, error: BaseException, late: bool = False) -> None:
        self.complete = False
        if isinstance(error, FailedElsewhere):  # that rank raises
            return
        self.record_error(
            self.describe_failure(hook, key, error) + TOO_LATE_TO_SKIP * (late and hook.on_error == "skip"),
            error,
            key.site,
            hook,
        )

    def describe_failure(self, hook: HookFunction, key: Key, error: BaseException | None) -> str:
        if error is None:
            return f"{_describe_hook_call(hook, key)}: {FAILED_ELSEWHERE}"
        line = "" if isinstance(error, FlexError) else f" in {format_user_line(error)}"
        return f"{_describe_hook_call(hook, key)}: {describe_error(error)}{line}"

    def check_shapes(self, hooks: Sequence[HookFunction], key: Key, shape: Sequence[int]) -> None:
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


def _describe_hook_call(hook: HookFunction, key: Key) -> str:
    when = f"iteration {key.iteration}, microbatch {key.microbatch}"
    return f"hook ({hook.describe()}) at {key.site}, {when}"
