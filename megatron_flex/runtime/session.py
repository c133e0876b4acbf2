"""A session: one model with hooks. It puts taps in and out and runs what stands at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, Undo
from megatron_flex.collectives import Agreement, gather_objects, is_leader
from megatron_flex.errors import HookError
from megatron_flex.config import flex_config
from megatron_flex.layout import shard_over_data
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Captures
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.debug.dry_run import DryRun
from megatron_flex.runtime.debug.hook_trace import Tracer
from megatron_flex.runtime.editing import EditRunner
from megatron_flex.runtime.failing import raise_on_all_ranks
from megatron_flex.runtime.firing import HookDispatcher
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.context.context_relay import ContextPlan
from megatron_flex.runtime.session_sinks import SessionSinks
from megatron_flex.runtime.session_taps import SessionTaps
from megatron_flex.runtime.survey import ParameterIndex
from megatron_flex.runtime.trainable_modules import NO_GRADIENT, TrainableModules
from megatron_flex.runtime.verify import VerificationRequest, make_verify_error
from megatron_flex.sites import SiteTable, model_order


class Session:
    """The hooks of one model.

    Making one is collective over the pipeline stages, which tell each other their sites. While no hook is
    registered nothing inside the model is touched; what stands is an entry in front of the schedule.

    An error in a hook does not stop the rank that has it, whose peers would wait for it: the tensor goes on
    unedited, and at the end of the step all ranks raise.

    Attributes:
        over_data: whether the samples of all data parallel ranks are put together.
        delivered: called on every rank whenever what was read has arrived in the leader's `captures`.
        probing: while the model is run for what is read, how many of the step's microbatches count; hooks
            that do not fire then are not found to be wrong.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # of sessions on the same ranks

    def __init__(self, adapter: Adapter, gather_data_parallel: bool = False) -> None:
        adapter.check()
        self.adapter, self.mesh = adapter, adapter.mesh
        self.over_data = gather_data_parallel = gather_data_parallel and self.mesh["dp"].size > 1
        own, parameters = adapter.sites(), adapter.parameters()
        self._plain = own
        if gather_data_parallel:
            own = [replace(s, layout=shard_over_data(s.layout)) for s in own]
        mine = [s.remote() for s in own], [p.remote() for p in parameters], adapter.without_layout()
        told = gather_objects(mine, self.mesh, ["pp"])
        self.sites = SiteTable(sorted((s for sites, _, _ in told for s in sites), key=model_order))
        everywhere = [p for _, ps, _ in told for p in ps]
        self.registry = HookRegistry(self.sites, {p.name: p for p in everywhere})
        unknown = {name: kind for _, _, names in told for name, kind in names.items()}
        self.rehearsal = DryRun(adapter, parameters, self.mesh)
        self.survey = ParameterIndex(adapter, parameters, everywhere, unknown)
        self.captures = Captures()
        self.clock = Clock()
        self._recorder = Recorder(self.mesh, self.captures)
        ranks = self.mesh.ranks
        name = f"session{Session._counts[ranks]}"
        Session._counts[ranks] += 1
        meeting = Agreement(f"{name}/gradients", flex_config.agree_seconds, ranks, NO_GRADIENT)
        self.trainable = TrainableModules(adapter, self.clock, meeting, gather_data_parallel, self._await_backward)
        self.editing = EditRunner(self.mesh, self.clock, self.trainable, name, gather_data_parallel)
        self.passing = self.editing.passing
        common = self.clock, self._recorder, self.editing, self.mesh, gather_data_parallel
        self.firing = HookDispatcher(self.registry, *common, self._await_backward)
        self.standing = SessionTaps(own, parameters, self.registry, self.firing, self.mesh)
        self.tracer: Tracer | None = None
        self.trace(flex_config.debug)
        self._agreement = Agreement(name, flex_config.agree_seconds, ranks)
        self.sinks = SessionSinks(self.registry, self.mesh, self.clock, name, self.standing.update_taps)
        self._agreed = -1
        self._objection = ""
        self._in_schedule, self._in_call, self._calls = False, False, 0
        self.probing: int | None = None
        self._awaits_backward = False
        self.watch = VerificationRequest()
        self.delivered: Callable[[], None] | None = None
        self._unwatch: Undo | None = adapter.watch(self)

    @property
    def is_leader(self) -> bool:
        """Whether what is read arrives here: on the first rank of the first stage of its model replica.

        Where data parallel ranks are gathered too, of the first replica only.
        """
        first = not self.over_data or self.mesh["dp"].coord == 0
        return is_leader(self.mesh) and self.mesh["pp"].coord == 0 and first

    @property
    def running(self) -> bool:
        """Whether a step is under way, in which no other can begin."""
        return self._in_schedule or self._in_call

    # -- registering -----------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse what needs the model, once it is restored.

        Raises:
            HookError: it is.
        """
        if self._unwatch is None:
            raise HookError("the model was restored, and nothing can be registered any more; attach it again")

    def add(self, hook: HookFunction, always: bool = False) -> None:
        """Register a hook, on every rank alike; `always`: active whatever groups are selected.

        Raises:
            HookError: it cannot stand there, its editing function would not do, or the model was restored.
        """
        self.check_open()
        entry = self.registry.add(hook, always)
        self.editing.skipping.expect(hook)
        try:
            self.rehearsal.consider(entry)
        except Exception:
            self.registry.remove(hook)
            raise
        if any(e is entry for e in self.registry.active[-1:]):
            self.standing.tap(entry)

    def remove(self, hook: HookFunction) -> None:
        """Take a hook out, on every rank alike; a tap that no hook needs goes with it."""
        self.registry.remove(hook)
        self.standing.update_taps()

    def register_trainable(self, name: str, module: nn.Module) -> None:
        """Register a trainable module, on every rank alike."""
        self.check_open()
        self._agreement.compare(self.trainable.check(name, module))
        self.trainable.add(name, module)

    def trace(self, on: bool) -> None:
        """Tell of each firing from now on, or no longer."""
        if self.tracer is not None:
            self.tracer.stop()
        self.tracer = Tracer(self.firing) if on else None

    def verify(self, steps: int) -> None:
        """Watch all sites for the next steps, on every rank alike."""
        self.check_open()
        self.watch.begin(self._plain, self.survey, self.firing, steps)
        self._agreed = -1

    def close(self, failed: bool = False) -> None:
        """Take everything out of the model and its schedule; `failed`: perhaps not on all ranks."""
        self.watch.stop()
        self.trace(False)
        self.standing.take_out()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._recorder.close()
        self.passing.close()
        self.registry.clear()
        self.trainable.close()
        self.sinks.close(failed)

    @property
    def in_schedule(self) -> bool:
        """Whether a run of the framework's schedule is under way."""
        return self._in_schedule

    # -- what the adapter tells ------------------------------------------------------------------------

    def step_begins(
        self,
        iteration: int | None,
        gradient_factor: Callable[[], float] | None = None,
        microbatches: int = 1,
    ) -> None:
        """A schedule starts."""
        if self._in_schedule:
            raise HookError(
                "a schedule is a step of its own, and so is step(); do not run one inside the other"
            )
        self._compare()
        self.survey.called = False
        told = self.clock.told
        self.clock.begin(iteration if told is None else told, gradient_factor)
        self.sinks.begins(microbatches, self.mesh, probing=self.probing is not None)
        self.trainable.begins(microbatches or 1)
        self.passing.begin()
        self._in_schedule, self._calls = True, 0

    def step_ends(self, failed: bool) -> None:
        """It is over: bring what was read to the leader, or forget it."""
        self._in_schedule, self._calls = False, 0
        try:
            self._end(failed, self.mesh)
        finally:
            self.passing.begin()

    def forward_begins(self, microbatch: int, chunk: int) -> None:
        """A microbatch goes forward through one of this rank's chunks."""
        self.clock.forward(microbatch, chunk)
        self.passing.forward_begins()

    def forward_ends(self, output: Any, tokens: Tensor | None = None) -> None:
        """It did."""
        self.clock.mark(output)
        if tokens is not None:
            self.clock.count(tokens)
        self.passing.forward_ends()
        self._recorder.gather_if_large()

    def backward_begins(self, output: Any) -> None:
        """A microbatch goes backward."""
        self.clock.backward(output)
        self.passing.backward_begins()

    def backward_ends(self) -> None:
        """It did."""
        self.passing.backward_ends()

    def cannot(self, why: str) -> None:
        """What this step does cannot be hooked. Raising now would leave other stages waiting."""
        self._objection = why

    def fails(self, why: str) -> None:
        """An edit made what the schedule cannot go on with."""
        self.editing.failure = self.editing.failure or (why, HookError(why))

    def hooked(self) -> bool:
        """Whether there is a hook that counts now."""
        return bool(self.registry.active)

    def call_begins(self, gradient_factor: Callable[[], float] | None = None) -> None:
        """The model is called outside a schedule; each such call is a step, or a microbatch of one."""
        if self._in_schedule:
            self.clock.scale(gradient_factor)
            self.forward_begins(self._calls, 0)
            self._calls += 1
            return
        self._compare()
        self._awaits_backward = False  # of a backward pass that raised
        self.survey.called = torch.is_grad_enabled() or self.survey.called
        self.clock.begin(None, gradient_factor)
        self.sinks.begins(1, self._replica(), called=True)
        self.trainable.begins(None)
        self.passing.begin()
        self.editing.scopes.begin()
        self._in_call = True

    def call_ends(self, failed: bool) -> None:
        """That call is over; its backward pass may follow."""
        if self._in_schedule:
            self.passing.forward_ends()
            self._recorder.gather_if_large()
            return
        self._in_call = False
        try:
            self._end(failed, self._replica(), torch.is_grad_enabled())
        finally:
            if failed or not torch.is_grad_enabled():  # else its backward pass may need the values
                self.passing.begin()

    def _compare(self) -> None:
        # A selection counts from the start of a step to that of the next one, the backward pass included.
        if self.registry.adopt():
            self.standing.update_taps()
        if self.registry.version != self._agreed or self._agreement.wanted():
            plan = ContextPlan.of(self.registry.active, self.mesh["pp"].size)
            more = plan.describe() + (", verify()" if self.watch.on else "")
            self._agreement.compare(self.registry.describe() + more)
            self.passing.adopt(plan)
            if any(e.hook.save and e.hook.tensor_sink is None for e in self.registry.active):
                self._recorder.prepare()
            self._agreed = self.registry.version

    def _replica(self) -> Mesh:
        """The mesh without data parallelism, whose ranks need not call a model equally often.

        Unless they are gathered, or share experts or trainable modules: then they do, and what one of them
        drops the others must not wait for.
        """
        if self.mesh["ep"].size > 1 or self.over_data or self.trainable.modules:
            return self.mesh
        return self.mesh.replica()

    def _end(self, failed: bool, mesh: Mesh, called: bool = False) -> None:
        watched = self.watch.on
        found = self.watch.step_ends(failed, mesh) if watched else []
        self._finish(failed, mesh, called)
        if not failed:
            self.trainable.synchronize()
            found += self.trainable.unequal() if watched else []
        if found:
            raise make_verify_error(found, self.clock.step)

    def _finish(self, failed: bool, mesh: Mesh, called: bool = False) -> None:
        failure, self.editing.failure = self.editing.failure, None
        objection, self._objection = self._objection, ""
        hooks = [e.hook for e in self.registry.active]
        if failed or not hooks or objection:
            refused = bool(hooks and objection) and not failed
            self._recorder.drop(failed or refused)
            self.sinks.ends(failed or refused, mesh, called)
            if refused:
                raise HookError(objection)
            return
        if self.probing is None:  # which may not pass where a step does: no labels, no backward pass
            self.standing.judge(h for h in hooks if torch.is_grad_enabled() or not (h.tensor_sink and h.backward))
        differ = self.firing.declared.differ()
        if differ:
            failure = failure or (differ, HookError(differ))
        can_fail = self.registry.follows or any(h.can_fail for h in hooks)
        if failure is not None and not can_fail:  # such as no memory left, which ends a rank anyhow
            raise HookError(failure[0]) from failure[1]
        wrong = can_fail and self.editing.skipping.settle(failure is not None, mesh)
        self.passing.settle()
        self.sinks.ends(wrong, mesh, called)
        if wrong:
            self._recorder.drop()
            raise_on_all_ranks(failure, mesh)
        if not self.registry.brings:  # as every rank knows: nothing to bring to the leader
            self._recorder.forget()
            return
        self._recorder.flush()
        if self.delivered is not None:
            self.delivered()

    def _await_backward(self) -> None:
        """Outside a schedule, send what this backward pass records when it is through."""
        if not self._in_schedule and not self._awaits_backward:
            self._awaits_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._awaits_backward = False
        self.trainable.meet()
        self._finish(False, self._replica())
        self.trainable.synchronize()
