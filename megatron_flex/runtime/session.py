"""A session: one model with hooks. It puts taps in and out and runs what stands at each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from megatron_flex.adapters import Adapter, Undo
from megatron_flex.collectives import (
    Agreement,
    any_rank,
    everyone,
    is_leader,
)
from megatron_flex.errors import HookError
from megatron_flex.knobs import knobs
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Captures
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.firing import Firing
from megatron_flex.runtime.hooks import HookFunction, Registry
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.survey import Survey
from megatron_flex.runtime.verify import Verifier, error_of
from megatron_flex.sites import SiteTable, model_order


class Session:
    """The hooks of one model.

    Making one is collective over the pipeline stages, which tell each other their sites. While no hook is
    registered nothing inside the model is touched; what stands is an entry in front of the schedule.

    An error in a hook does not stop the rank that has it, whose peers would wait for it: the tensor goes on
    unedited, and at the end of the step all ranks raise.
    """

    _count = 0

    def __init__(self, adapter: Adapter) -> None:
        adapter.check()
        self.adapter, self.mesh = adapter, adapter.mesh
        own, parameters = adapter.sites(), adapter.parameters()
        self._own = {s.name: s for s in own}
        self._own_parameters = {p.name: p for p in parameters}
        mine = [s.remote() for s in own], [p.remote() for p in parameters], adapter.without_layout()
        told = everyone(mine, self.mesh, ["pp"])
        self.sites = SiteTable(sorted((s for sites, _, _ in told for s in sites), key=model_order))
        everywhere = [p for _, ps, _ in told for p in ps]
        self.registry = Registry(self.sites, {p.name: p for p in everywhere})
        unknown = {name: kind for _, _, names in told for name, kind in names.items()}
        self.survey = Survey(adapter, parameters, everywhere, unknown)
        self.captures = Captures()
        self.clock = Clock()
        self._recorder = Recorder(self.mesh, self.captures)
        self.firing = Firing(self.registry, self.clock, self._recorder, self.mesh, self._await_backward)
        self._agreement = Agreement(f"session{Session._count}", knobs.agree_seconds)
        Session._count += 1
        self._agreed = -1
        self._taps: dict[str, Undo] = {}
        self._judged: set[HookFunction] = set()
        self._objection = ""
        self._in_schedule = False
        self._awaits_backward = False
        self._verifier: Verifier | None = None
        self._unwatch: Undo | None = adapter.watch(self)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its model replica: of its stage, and that the first."""
        return is_leader(self.mesh) and self.mesh["pp"].coord == 0

    # -- registering -----------------------------------------------------------------------------------

    def add(self, hook: HookFunction) -> None:
        """Register a hook, on every rank alike."""
        self.registry.add(hook)
        self._retap()

    def remove(self, hook: HookFunction) -> None:
        """Take a hook out, on every rank alike; a tap that no hook needs goes with it."""
        self.registry.remove(hook)
        self._retap()

    def _retap(self) -> None:
        """Have taps where active hooks stand, and nowhere else."""
        for name in [n for n in self._taps if not self.registry.at(n)]:
            self._taps.pop(name)()
        for entry in self.registry.active:
            for site in entry.sites:
                own = self._own.get(site.name)
                if own is not None and own.tap is not None and own.name not in self._taps:
                    self._taps[own.name] = own.tap.install(partial(self.firing.fire, own))
            for told in entry.parameters:
                mine = self._own_parameters.get(told.name)
                if mine is not None and mine.parameter is not None and mine.name not in self._taps:
                    react = partial(self.firing.gradient, mine.name, mine.layout.gradient(), None, None)
                    self._taps[mine.name] = mine.parameter.register_hook(react).remove

    def verify(self, steps: int) -> None:
        """Watch all sites for the next steps, on every rank alike."""
        if self._verifier is not None:
            self._verifier.stop()
        self._verifier = Verifier(self._own.values(), self.survey, self.clock, steps)
        self._agreed = -1

    @property
    def unverified(self) -> bool:
        """Whether checking was asked for and no step has been checked."""
        return self._verifier is not None and not self._verifier.checked

    def close(self) -> None:
        """Take everything out of the model and its schedule."""
        if self._verifier is not None:
            self._verifier.stop()
            self._verifier = None
        for undo in self._taps.values():
            undo()
        self._taps.clear()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        self._recorder.drop()
        self.registry.clear()

    def silent(self) -> list[HookFunction]:
        """The hooks that have stood through a whole step and fired on no rank, the same list on every rank.

        Collective over the mesh, if there are such hooks at all.
        """
        judged = [e.hook for e in self.registry.entries if e.hook in self._judged]
        if not judged:
            return []
        fired = any_rank([int(h in self.firing.fired) for h in judged], self.mesh)
        return [h for h, f in zip(judged, fired, strict=True) if not f]

    # -- what the adapter tells ------------------------------------------------------------------------

    def step_begins(self, iteration: int | None, gradient_factor: Callable[[], float] | None = None) -> None:
        """A schedule starts."""
        self._compare()
        self.survey.called = False
        self.clock.begin(iteration, gradient_factor)
        self._in_schedule = True

    def step_ends(self, failed: bool) -> None:
        """It is over: bring what was read to the leader, or forget it."""
        self._in_schedule = False
        self._end(failed, self.mesh)

    def forward_begins(self, microbatch: int) -> None:
        """A microbatch goes forward."""
        self.clock.forward(microbatch)

    def forward_ends(self, output: Any) -> None:
        """It did."""
        self.clock.mark(output)
        self._recorder.gather_if_large()

    def backward_begins(self, output: Any) -> None:
        """A microbatch goes backward."""
        self.clock.backward(output)

    def cannot(self, why: str) -> None:
        """What this step does cannot be hooked. Raising now would leave other stages waiting."""
        self._objection = why

    def call_begins(self) -> None:
        """The model is called outside a schedule; each such call is a step."""
        self._compare()
        self._awaits_backward = False  # of a backward pass that raised
        self.survey.called = torch.is_grad_enabled() or self.survey.called
        self.clock.begin(None)

    def call_ends(self, failed: bool) -> None:
        """That call is over; its backward pass may follow."""
        self._end(failed, self._replica())

    def _compare(self) -> None:
        # A selection counts from the start of a step to that of the next one, the backward pass included.
        if self.registry.adopt():
            self._retap()
        if self.registry.version != self._agreed or self._agreement.wanted():
            watched = self._verifier is not None and self._verifier.left > 0
            self._agreement.compare(self.registry.describe() + (", verify()" if watched else ""))
            self._agreed = self.registry.version

    def _replica(self) -> Mesh:
        """The mesh without data parallelism, whose ranks need not call a model equally often.

        Unless they share experts: then they do, and what one of them drops the others must not wait for.
        """
        if self.mesh["ep"].size > 1:
            return self.mesh
        return Mesh(tuple(a for a in self.mesh if a.name != "dp"), self.mesh.experts)

    def _end(self, failed: bool, mesh: Mesh) -> None:
        watched = self._verifier is not None and self._verifier.left > 0
        found = self._verifier.step_ends(failed, mesh) if self._verifier is not None and watched else []
        self._finish(failed, mesh)
        if found:
            raise error_of(found, self.clock.step)

    def _finish(self, failed: bool, mesh: Mesh) -> None:
        failure, self.firing.failure = self.firing.failure, None
        objection, self._objection = self._objection, ""
        hooks = [e.hook for e in self.registry.active]
        if failed or not hooks:
            self._recorder.drop()
            return
        if objection:
            self._recorder.drop()
            raise HookError(objection)
        self._judged.update(hooks)
        if any(h.can_fail for h in hooks) and any_rank([int(failure is not None)], mesh)[0]:
            self._recorder.drop()
            self._raise_everywhere(failure, mesh)
        self._recorder.flush()

    def _raise_everywhere(self, failure: tuple[str, BaseException] | None, mesh: Mesh) -> NoReturn:
        told = everyone(failure and failure[0], mesh, [a.name for a in mesh])
        messages = list(dict.fromkeys(m for m in told if m))
        count = f" (on {sum(m is not None for m in told)} of {len(told)} ranks)" if len(told) > 1 else ""
        raise HookError("; ".join(messages) + count) from (failure and failure[1])

    def _await_backward(self) -> None:
        """Outside a schedule, send what this backward pass records when it is through."""
        if not self._in_schedule and not self._awaits_backward:
            self._awaits_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._awaits_backward = False
        self._finish(False, self._replica())
