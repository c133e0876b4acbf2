"""A session: one model with hooks, dumps and statistics. The session installs and removes taps, and begins
and ends steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, ParameterSite, StepReport, Undo
from megatron_flex.adapters.module_walk import shared_walk
from megatron_flex.collectives import (
    Agreement,
    agreement_seconds,
    gather_objects,
    global_rank,
    is_leader,
    max_over_ranks,
    note_open,
    running_transform,
)
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, HookError
from megatron_flex.handles import Handle
from megatron_flex.layout import TENSOR_AXIS, PackedSequences, shard_over_data
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Captures
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_relay import ContextPlan
from megatron_flex.runtime.debug.dry_run import DryRun
from megatron_flex.runtime.debug.hook_trace import Tracer
from megatron_flex.runtime.edit_environment import BACKWARD_PASS, FORWARD_PASS, EditEnvironment
from megatron_flex.runtime.edit_failures import StepFailure, raise_on_all_ranks
from megatron_flex.runtime.features.features import SessionFeatures
from megatron_flex.runtime.full_parameters import ParameterIndex
from megatron_flex.runtime.function_transforms import check_transform
from megatron_flex.runtime.hook_dispatcher import HookDispatcher
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.model_verification import Finding, VerificationRequest, make_verify_error
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.session_hooks import SessionHooks
from megatron_flex.runtime.session_parameters import SessionParameters
from megatron_flex.runtime.session_sinks import SessionSinks
from megatron_flex.runtime.session_taps import SessionTaps
from megatron_flex.runtime.sink_cycle import StepStart
from megatron_flex.runtime.step_agreement import STEP_END, StepAgreement
from megatron_flex.runtime.trainable_modules import NO_GRADIENT, TrainableModules
from megatron_flex.sites import Site, SiteTable, model_order

CALLED_OUTSIDE_STEP = (
    "the model is on {size} pipeline stages and was called outside the framework's schedule, where hooks "
    "would make stages wait for each other indefinitely: on every rank, put all calls of a batch, and their "
    "backward passes, into one `with flex.step():`, or remove the hooks"
)
LATE_GRADIENT = (
    "a gradient reached a hook outside the step that its forward pass was in, and {size} pipeline stages do "
    "not meet there: run the backward pass too in `with flex.step():`"
)
PACKED_SEQUENCES = (
    "packed sequences (packed_seq_params) have no batch dim along which gather_data_parallel could put the "
    "samples of data parallel ranks together; attach without it"
)


class Session:
    """The hooks of one model.

    To make a session is collective over the pipeline stages, which exchange their sites. While no hook is
    registered, no module of the model is changed; only the framework's schedule is wrapped.

    An error in a hook is not raised where it occurs, because the other ranks would wait for the rank that
    stopped. The rank continues with the unedited tensor, and all ranks raise at the end of the step.

    Attributes:
        over_data: whether captures concatenate the samples of all data parallel ranks.
        delivered: called on every rank after new captures have arrived in the leader's `captures`.
        probing: the number of the step's microbatches that count while the model runs only to be captured;
            hooks that are not called in such a run are not an error. None otherwise.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # number of sessions, by their ranks

    def __init__(self, adapter: Adapter, gather_data_parallel: bool = False) -> None:
        self.adapter, self.mesh = adapter, adapter.mesh
        self.over_data = gather_data_parallel and self.mesh["dp"].size > 1
        with shared_walk():
            adapter.check()
            local_sites, parameters = self._list_sites()
        self.captures = Captures(self.sites.own_name, None if self.is_leader else self._find_receiver())
        self.clock = Clock()
        ranks = self.mesh.ranks
        name = f"session{Session._counts[ranks]}"
        Session._counts[ranks] += 1
        self.agreement = StepAgreement(name, self.registry, self.clock, self.mesh, self._list_model_ids)
        self._recorder = Recorder(self.mesh, self.captures, name, self.agreement.check_waiting_ranks)
        gradients = Agreement(f"{name}/gradients", agreement_seconds(), ranks, NO_GRADIENT)
        self.trainable = TrainableModules(
            adapter, self.clock, gradients, self.over_data, self._await_backward
        )
        self.editing = EditEnvironment(self.mesh, self.clock, self.trainable, name, self.over_data)
        self.context_relay, self._skips = self.editing.context_relay, self.editing.skips
        common = self.clock, self._recorder, self.editing, self.mesh, self.over_data
        self.dispatcher = HookDispatcher(self.registry, *common, self._await_backward, self._find_peers)
        self.taps = SessionTaps(local_sites, parameters, self.registry, self.dispatcher, self.mesh)
        self.tracer: Tracer | None = None
        self.sinks = SessionSinks(self.registry, self.mesh, self.clock, name, self.taps.update_taps)
        trials = DryRun(adapter, parameters, self.mesh)
        self.hooks = SessionHooks(
            self.registry, self.taps, trials, self.editing, self.check_open, lambda: self.sinks.groups
        )
        self.features = SessionFeatures(
            self.registry, self.hooks, self.sites, self.mesh, self.clock, self.editing, name
        )
        self._reject_reason = ""
        self._in_schedule, self._in_call = False, False
        self._calls: Counter[int] = Counter()  # calls of each of this rank's chunks in this step
        self.probing: int | None = None
        self._awaits_backward = False
        self.verification = VerificationRequest()
        self.delivered: Callable[[], None] | None = None
        self._failed = False  # whether the last step raised an error on this rank
        self._name = name
        self._unwatch: Undo | None = adapter.watch(self)
        note_open(name, True)
        if flex_config.debug:
            self.trace(True)

    def _list_sites(self) -> tuple[list[Site], list[ParameterSite]]:
        """Exchange sites and parameters with the other stages, and return those of this rank."""
        adapter = self.adapter
        local_sites, parameters, buffers = adapter.sites(), adapter.parameters(), adapter.buffers()
        without_layout = adapter.without_layout(), adapter.buffer_owners()
        self._replica_sites = local_sites
        if self.over_data:
            local_sites = [replace(s, layout=shard_over_data(s.layout)) for s in local_sites]
        # Sites of one stage alone go nowhere, and need no copies that say nothing of this rank's modules.
        local_report = local_sites, parameters, buffers, without_layout
        if self.mesh["pp"].size > 1:
            local_report = (
                [s.remote() for s in local_sites],
                [p.remote() for p in parameters],
                [b.remote() for b in buffers],
                without_layout,
            )
        reports = gather_objects(local_report, self.mesh, ["pp"])
        self.sites = SiteTable(sorted((s for sites, *_ in reports for s in sites), key=model_order))
        everywhere = [p for _, ps, *_ in reports for p in ps]
        self.registry = HookRegistry(
            self.sites, {p.name: p for p in everywhere}, self.mesh[TENSOR_AXIS].size > 1
        )
        unknown, owners = (
            {name: kind for *_, names in reports for name, kind in names[n].items()} for n in (0, 1)
        )
        self.parameters = SessionParameters(
            ParameterIndex(adapter, parameters, everywhere, unknown, owners),
            ParameterIndex(adapter, buffers, [b for _, _, bs, _ in reports for b in bs]),
            self.check_open,
        )
        return local_sites, parameters

    @property
    def is_leader(self) -> bool:
        """Whether this rank receives captures: the first rank of the first stage of its model replica.

        With `gather_data_parallel` only the first replica has such a rank.
        """
        first = not self.over_data or self.mesh["dp"].coord == 0
        return is_leader(self.mesh) and self.mesh["pp"].coord == 0 and first

    def _find_receiver(self) -> int:
        """The global rank that receives the captures of this rank's replica."""
        rank = global_rank()
        axes = ["tp", "cp", "pp"]
        if self.over_data or self.mesh["ep"].size > 1:  # the experts of a replica are spread over replicas
            axes.append("dp")
        return rank - sum(rank - self.mesh[name].ranks[0] for name in axes if self.mesh[name].size > 1)

    @property
    def running(self) -> bool:
        """Whether a step is running; no other step can begin then."""
        return self._in_schedule or self._in_call

    # -- registering -----------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the session can have hooks; false once the model is restored."""
        return self._unwatch is not None

    def check_open(self) -> None:
        """Raise if the model has been restored.

        Raises:
            HookError: the model has been restored.
        """
        if not self.open:
            raise HookError("this FlexModel is closed and its model restored; call attach() again")

    def register_trainable(self, name: str, module: nn.Module) -> Handle:
        """Register a trainable module; the handle removes it. Every rank makes the same call."""
        self.check_open()
        self.agreement.compare(self.trainable.check(name, module))
        self.trainable.add(name, module)
        self.registry.note_change()

        def is_registered() -> bool:
            modules = self.trainable.modules
            return self.open and name in modules and modules[name] is module

        return Handle(partial(self.remove_trainable, name), f"trainable module {name!r}", is_registered)

    def remove_trainable(self, name: str) -> None:
        """Remove a trainable module. Every rank makes the same call."""
        self.check_open()
        self.agreement.compare(f"remove trainable module {name}")
        self.trainable.remove(name)
        self.registry.note_change()

    def freeze(self) -> None:
        """Freeze the parameters of the model. Every rank makes the same call."""
        self.check_open()
        self.trainable.freeze()

    def trace(self, on: bool) -> None:
        """Start or stop printing each call of a hook."""
        if on:
            self.check_open()
        if self.tracer is not None:
            self.tracer.stop()
        self.tracer = Tracer(self.dispatcher) if on else None

    def verify(self, steps: int) -> None:
        """Verify all sites during the next `steps` steps. Every rank makes the same call."""
        self.check_open()
        self.verification.begin(self._replica_sites, self.parameters.index, self.dispatcher, self.taps, steps)
        self.agreement.compare_again()

    def compare_norms(self) -> None:
        """Compare the gradient norm that the framework has reported since the last step, if `verify` is on.

        Every rank calls it.

        Raises:
            VerifyError: on all ranks: the gradients do not have that norm.
        """
        findings = self.verification.compare_norms(self.mesh)
        if findings:
            raise make_verify_error(findings, self.clock.step)

    def restore(self) -> None:
        """Wait until all ranks call `restore()`, then remove everything from the model. Collective.

        Raises:
            HookError: as for `FlexModel.restore()`; the model is restored nevertheless.
        """
        try:
            self.agreement.barrier("restore()", self._failed)
        except Exception:  # raised again: the model is restored whatever the other ranks do
            self.close(failed=True)
            raise
        norms = self.verification.compare_norms(self.mesh, last=True)
        silent, unverified = self.taps.find_uncalled_hooks(), self.verification.missed
        self._skips.warn_of_skips()
        self.close()
        if norms:
            raise make_verify_error(norms, self.clock.step)
        if silent:
            names = ", ".join(h.describe() + (f" ({why})" if why else "") for h, why in silent)
            raise HookError(
                f"never fired on any rank: {names}; the path did not run (no labels, no backward pass, a "
                "frozen part, a fused kernel): hook another point, or remove the hook before the end"
            )
        if unverified:
            raise HookError("verify() was called and no step ran after it; call it before a step")

    def close(self, failed: bool = False) -> None:
        """Remove everything from the model and its schedule.

        Args:
            failed: whether other ranks may not do the same.
        """
        self.verification.stop()
        self.trace(False)
        self.taps.remove_all()
        note_open(self._name, False)
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._recorder.close()
        self.context_relay.close()
        self.features.close()
        self.registry.clear()
        self.trainable.close()
        self.sinks.close(failed)

    # -- calls from the adapter ------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count all calls of the model inside the context as microbatches of one step, as `FlexModel.step()`
        does.
        """
        self.check_open()
        with StepReport(self, None, microbatches=0):
            yield

    def step_begins(
        self,
        iteration: int | None,
        gradient_factor: Callable[[], float] | None = None,
        microbatches: int = 1,
    ) -> None:
        """Begin a step: the adapter calls this when a schedule starts."""
        if self._in_schedule:
            raise HookError(
                "a schedule is a step of its own, and so is step(); do not run one inside the other"
            )
        self._compare()
        self.parameters.index.called = False
        given = self.clock.given_iteration
        self.clock.begin_step(iteration if given is None else given, gradient_factor)
        self.sinks.begins(StepStart(self.mesh, microbatches), probing=self.probing is not None)
        self.trainable.begins(microbatches or 1)
        self.context_relay.begin()
        if self.features.exchanges:
            self.features.begin()
        self._in_schedule = True
        self._calls.clear()

    def step_ends(self, failed: bool) -> None:
        """End the step: send the captures to the leader, or drop them if the step failed."""
        self._in_schedule = False
        try:
            if self.features.active and not failed:
                self.features.step_ends()
            self._end(failed, self.mesh)
        finally:
            self.context_relay.begin()
            if self.features.active:
                self.features.end()

    def forward_begins(self, microbatch: int, chunk: int) -> None:
        """Note that a microbatch's forward pass through one of this rank's chunks begins."""
        self.clock.begin_forward(microbatch, chunk)
        if self.registry.active:
            self.editing.record_errors_of(FORWARD_PASS, self.context_relay.forward_begins)
            if self.features.active:
                self.features.forward_begins()

    def forward_ends(self, output: Any, tokens: Tensor | None = None) -> None:
        """Note that the forward pass ends."""
        self.clock.remember_output(output)
        if tokens is not None:
            self.clock.add_tokens(tokens)
        if self.registry.active:
            self.editing.record_errors_of(FORWARD_PASS, self.context_relay.forward_ends)
            if self.features.active:
                self.features.forward_ends()
        self._recorder.gather_if_large()

    def backward_begins(self, output: Any) -> None:
        """Note that a microbatch's backward pass begins."""
        self.clock.begin_backward(output)
        if self.registry.active:
            self.editing.record_errors_of(BACKWARD_PASS, self.context_relay.backward_begins)
            if self.features.active:
                self.features.backward_begins()

    def backward_ends(self) -> None:
        """Note that the backward pass ends."""
        if self.registry.active:
            self.editing.record_errors_of(BACKWARD_PASS, self.context_relay.backward_ends)
            if self.features.active:
                self.features.backward_ends()

    def reject_step(self, why: str) -> None:
        """Record why this step cannot be hooked. All ranks raise at its end; now, other stages would wait."""
        self._reject_reason = why

    def pack_begins(self, pack: PackedSequences) -> None:
        """Note the packed sequences of this microbatch: data parallel ranks' cannot be concatenated."""
        self.clock.packs[self.clock.microbatch] = pack
        if self.over_data:
            self.reject_step(PACKED_SEQUENCES)

    def text_continues(self, first: int) -> None:
        """Note how many tokens of the text came in earlier calls of the model."""
        self.clock.first_token = first

    def report_error(self, why: str) -> None:
        """Record that an edit returned something that the schedule cannot use."""
        self.editing.failure = self.editing.failure or StepFailure(why, HookError(why))

    def hooked(self) -> bool:
        return bool(self.registry.active)

    def check_call(self) -> None:
        """Refuse a call outside a step where hooks are active on several pipeline stages.

        Ranks communicate at the end of the call, and later stages wait for the output of the call before they
        begin.

        Raises:
            HookError: on this rank, before it waits for another rank.
        """
        if self._in_schedule or self._in_call or self.mesh["pp"].size == 1:
            return
        if self.registry.adopt():
            self.taps.update_taps()
        if self.registry.active or self.verification.on:
            raise HookError(CALLED_OUTSIDE_STEP.format(size=self.mesh["pp"].size))

    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._in_schedule

    def needs_step(self) -> bool:
        """Whether a dump or statistics cannot record all that they want in a call outside a step."""
        return self.sinks.need_step

    def call_begins(
        self,
        gradient_factor: Callable[[], float] | None = None,
        chunk: int = 0,
        microbatch: int | None = None,
    ) -> None:
        """Begin a call of the model outside a schedule: a step of its own, or a microbatch of `step()`."""
        if self._in_schedule:
            if self.registry.active and running_transform() is not None:
                self._check_transform()
            self.clock.set_gradient_factor(gradient_factor)
            if self.features.active:
                self.features.forget_values()
            self.forward_begins(self._calls[chunk] if microbatch is None else microbatch, chunk)
            self._calls[chunk] += 1
            return
        self.check_call()
        met = self._compare(replicas_independent=True)
        if self.registry.active and running_transform() is not None:
            self._check_transform()
        if met and self._replica() is not self.mesh:  # the replicas may not communicate again in this call
            self.verification.compare_copies(self.mesh)
        self._awaits_backward = False  # left over if a backward pass raised
        self.parameters.index.called = torch.is_grad_enabled() or self.parameters.index.called
        self.clock.begin_step(None, gradient_factor)
        self.sinks.begins(StepStart(self._replica(), 1, called=True))
        self.trainable.begins(None)
        self.context_relay.begin()
        if self.features.exchanges:
            self.features.begin()
        self.editing.scopes.begin()
        self._in_call = True

    def _check_transform(self) -> None:
        active = (entry.hook for entry in self.registry.active)
        check_transform(active, self.mesh, bool(self.trainable.modules))

    def call_ends(self, failed: bool) -> None:
        """End a call of the model outside a schedule; its backward pass may follow."""
        if self._in_schedule:
            if self.registry.active:
                self.editing.record_errors_of(FORWARD_PASS, self.context_relay.forward_ends)
                if self.features.active:
                    self.features.forward_ends()
            self._recorder.gather_if_large()
            return
        self._in_call = False
        try:
            self._end(failed, self._replica(), torch.is_grad_enabled())
        finally:
            if failed or not torch.is_grad_enabled():  # otherwise the backward pass may need the values
                self.context_relay.begin()

    def _compare(self, replicas_independent: bool = False) -> bool:
        """Compare the hooks of all ranks if they may have changed; return whether they were compared.

        Args:
            replicas_independent: whether data parallel replicas may run different numbers of steps, as calls
                outside a schedule do.
        """
        # A selection is valid from the start of a step to the start of the next one, backward pass included.
        if self.registry.adopt():
            self.taps.update_taps()
        compared = self.agreement.compare_hooks(replicas_independent, self.verification.on, self._prepare)
        if compared:
            self.dispatcher.passes.gradients.clear()
        return compared

    def _prepare(self, plan: ContextPlan) -> None:
        """Prepare the next steps, after the ranks have compared their hooks. Collective."""
        self.context_relay.adopt(plan)
        if any(e.hook.save and e.hook.tensor_sink is None for e in self.registry.active):
            self._recorder.prepare()

    def _list_model_ids(self) -> set[int]:
        """The ids of the modules and parameters of the model on this rank."""
        modules = [m for s in self.taps.local_sites.values() if s.tap and (m := s.tap.module) is not None]
        parameters = [p.parameter for sites in self.parameters.index.local_sites.values() for p in sites]
        parameters += [t for m in modules for t in m.parameters(recurse=False)]
        return {
            id(part)
            for part in (*modules, *parameters, *self.trainable.modules.modules())
            if part is not None
        }

    def _replica(self) -> Mesh:
        """The mesh without the data parallel axis, whose replicas may call a model different numbers of
        times.

        The full mesh if samples are gathered over data parallel ranks, or replicas share experts or trainable
        modules: all replicas then make the same calls, and a rank must not wait for captures that another
        dropped.
        """
        if self.mesh["ep"].size > 1 or self.over_data or self.trainable.modules:
            return self.mesh
        return self.mesh.replica()

    def _find_peers(self) -> Mesh:
        """The mesh of the ranks that make the same passes as this one.

        Data parallel replicas do so in a framework's schedule only.
        """
        return self.mesh if self._in_schedule and not self._calls else self._replica()

    def _end(self, failed: bool, mesh: Mesh, called: bool = False) -> None:
        self._failed = failed
        watched = self.verification.on
        findings = [] if failed else self.verification.compare_norms(mesh)
        findings += self.verification.step_ends(failed, mesh) if watched else []
        self._finish(failed, mesh, called)
        if not failed:
            self.trainable.synchronize()
            findings += map(Finding, self.trainable.unequal()) if watched else []
        if findings:
            raise make_verify_error(findings, self.clock.step)

    def _finish(self, failed: bool, mesh: Mesh, called: bool = False) -> None:
        failure, self.editing.failure = self.editing.failure, None
        reject_reason, self._reject_reason = self._reject_reason, ""
        hooks = [e.hook for e in self.registry.active]
        if self.dispatcher.passes.shape_guard.step_ends(failed):
            self.registry.note_change()
        self.dispatcher.passes.gradients.step_ends(mesh)
        if failed or not hooks or reject_reason:
            refused = bool(hooks and reject_reason) and not failed
            self.dispatcher.inference.forget()
            self._recorder.drop(failed or refused)
            self.sinks.ends(failed or refused, mesh, called)
            if refused:
                raise HookError(reject_reason)
            return
        if self.probing is None:  # a probing run may have no labels and no backward pass
            self.taps.expect_calls(
                h for h in hooks if torch.is_grad_enabled() or not (h.tensor_sink and h.backward)
            )
        at = f"{STEP_END}, {self.agreement.now}"
        if differ := self.dispatcher.inference.describe_shapes(at, self.agreement.check_waiting_ranks):
            failure = failure or StepFailure(differ, HookError(differ))
        sends = self.registry.sends_captures
        wrong, failure = self._exchange_flags(hooks, sends, failure, mesh, at)
        self.context_relay.settle()
        if self.features.active:
            self.features.settle()
        self.sinks.ends(bool(wrong), mesh, called)
        if wrong:
            self._recorder.drop()
            raise_on_all_ranks(failure, mesh, hooks)
        self.dispatcher.passes.gradients.confirm()
        if not sends:  # on all ranks alike: nothing to send to the leader
            self._recorder.forget()
            return
        self._recorder.flush()
        if self.delivered is not None:
            self.delivered()

    def _exchange_flags(
        self, hooks: list[HookFunction], sends: bool, failure: StepFailure | None, mesh: Mesh, at: str
    ) -> tuple[int, StepFailure | None]:
        """Whether the step failed on any rank of the mesh, and why, where this rank knows.

        Collective over the mesh if a hook can fail: one exchange, but where tensors pass for the first time.
        """
        inference, watch = self.dispatcher.inference, self.agreement.check_waiting_ranks
        compares = self.registry.must_compare
        if not compares:
            inference.discard()
            if not any(h.can_fail for h in hooks):
                if failure is not None:  # sinks alone have hooks: they report it, and the step goes on
                    self.sinks.fail(failure)
                return 0, None
        flags, lost = [int(failure is not None), int(self._skips.has_news()), inference.pending], ""
        if sends:
            flags, lost = self._recorder.collect(flags, mesh, at)
        else:
            flags = max_over_ranks(flags, mesh, at, watch)
        wrong, news, pending = flags
        self._skips.settle(bool(news), mesh)
        if pending:
            differ = inference.compare()
            wrong = max_over_ranks([int(bool(wrong or differ))], mesh, at, watch)[0]
            if differ:  # tells more than that captures differ
                failure = failure or StepFailure(differ, HookError(differ))
        if lost:
            failure = failure or StepFailure(lost, FlexError(lost))
        return wrong, failure

    def _await_backward(self) -> None:
        """Outside a schedule, send the captures of this backward pass when it ends."""
        if not self._in_schedule and not self._awaits_backward:
            self._awaits_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._awaits_backward = False
        if self.mesh["pp"].size > 1:
            self._recorder.drop()
            raise HookError(LATE_GRADIENT.format(size=self.mesh["pp"].size))
        self.trainable.barrier()
        self._finish(False, self._replica())
        self.trainable.synchronize()
