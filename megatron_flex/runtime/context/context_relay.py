"""Sends the values of a microbatch to the next virtual stage whose functions use them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_flex.collectives import (
    PipelineRelay,
    StageMessage,
    broadcast_package,
    is_leader,
    pack_values,
    replica_mesh,
    unpack_values,
)
from megatron_flex.errors import describe_error
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.context.context_values import ContextEntry
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.hooks import HookFunction


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The transfers of a step; the plan follows from the hooks alone, so it is the same on every rank.

    Attributes:
        hooks: the hooks whose functions use the context.
        chain: the virtual stages of their hook points, in the order of the forward pass.
        backward: those of these virtual stages that have hooks on gradients.
        once: the pipeline stages where one rank runs such a function for all.
        replicated: the pipeline stages where all ranks run one.
        stages: the number of pipeline stages.
    """

    hooks: frozenset[HookFunction] = frozenset()
    chain: tuple[int, ...] = ()
    backward: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    stages: int = 1

    @staticmethod
    def of(active: Sequence[HookEntry], stages: int) -> ContextPlan:
        """The plan for the active hooks."""
        hooks: set[HookFunction] = set()
        chain: set[int] = set()
        backward: set[int] = set()
        once: set[int] = set()
        replicated: set[int] = set()
        for entry in active:
            hook = entry.hook
            if hook.editing_function is None or not uses_context(hook.editing_function):
                continue
            virtual_stages = {at.chunk * stages + at.stage for at in entry.sites}
            virtual_stages |= {at.chunk * stages + at.stage for at in entry.parameters}
            hooks.add(hook)
            chain |= virtual_stages
            backward |= virtual_stages if hook.backward else set()
            (once if hook.run == "once" else replicated).update(p % stages for p in virtual_stages)
        return ContextPlan(
            frozenset(hooks),
            tuple(sorted(chain)),
            frozenset(backward),
            frozenset(once),
            frozenset(replicated),
            stages,
        )

    @property
    def links(self) -> bool:
        """Whether anything is sent between stages."""
        return len({virtual_stage % self.stages for virtual_stage in self.chain}) > 1

    def beside(self, virtual_stage: int, step: int) -> int | None:
        """The next virtual stage in the chain, with `step` -1 the previous one, if on another stage."""
        index = self.chain.index(virtual_stage) + step if virtual_stage in self.chain else -1
        if not 0 <= index < len(self.chain) or self.chain[index] % self.stages == virtual_stage % self.stages:
            return None
        return self.chain[index]

    def needs_values_backward(self, virtual_stage: int) -> bool:
        """Whether a hook on gradients, here or later in the backward pass, may read values."""
        return any(p <= virtual_stage for p in self.backward)

    def leaves_stage(self, virtual_stage: int, backward: bool) -> bool:
        """Whether a microbatch does not return to this stage after this virtual stage."""
        mine = [p for p in self.chain if p % self.stages == virtual_stage % self.stages]
        return not mine or virtual_stage == (min(mine) if backward else max(mine))

    def describe(self) -> str:
        """The plan as text, for comparison between ranks."""
        return f", save_ctx on virtual stages {list(self.chain)}" if self.chain else ""


class ContextRelay:
    """Follows the schedule and sends the values that the plan names.

    A package is sent at the end of every forward (backward) pass of a microbatch through a virtual stage,
    even after an error. The receiver waits for the package before the first function of the next virtual
    stage that uses the context (in the backward pass, before that pass): the pipeline's own order ensures
    that it was sent.
    """

    def __init__(
        self,
        mesh: Mesh,
        clock: Clock,
        scopes: ContextScopes,
        note: Callable[[str, BaseException], None],
        name: str,
    ) -> None:
        self.mesh, self.clock, self.scopes = mesh, clock, scopes
        self.plan = ContextPlan()
        self._note = note
        self._relay = PipelineRelay(mesh, name)
        self._leads, self._holders = is_leader(mesh), replica_mesh(Layout(()), mesh)
        self._due: int | None = None

    @property
    def joins_stages(self) -> bool:
        """Whether functions on several virtual stages share values."""
        return len(self.plan.chain) > 1

    def adopt(self, plan: ContextPlan) -> None:
        """Apply a plan. Collective over the leaders of the stages, the first time that the plan has links."""
        self.plan = plan
        stage = self.scopes.stage
        self.scopes.once, self.scopes.shared = stage in plan.once, stage in plan.replicated
        if plan.links and self._leads:
            self._relay.open()

    def close(self) -> None:
        """Discard all values, and release the process group. Does not wait for any rank."""
        self.begin()
        self.scopes.run.clear()
        self.scopes.kept.clear()
        self._relay.close()

    # -- called by the session --------------------------------------------------------------------------

    def begin(self) -> None:
        """Discard the microbatches of earlier steps; called at the beginning and at the end of a step."""
        self.scopes.drop(*self.scopes.micros)
        self._due = None
        self._relay.abandon()

    def settle(self) -> None:
        """Note that all ranks have completed the step, so that everything sent has been received."""
        self._relay.settle()

    def forward_begins(self) -> None:
        """Begin a microbatch's forward pass through a virtual stage."""
        if self.plan.chain:
            self.scopes.begin()
            self._due = self.plan.beside(self.scopes.virtual_stage, -1)

    def arrive(self) -> None:
        """Receive the values sent to this virtual stage for the running microbatch. Every rank makes the
        call.
        """
        source, self._due = self._due, None
        if source is not None:
            self._receive(source, backward=False)

    def forward_ends(self) -> None:
        """End the forward pass through the virtual stage."""
        if not self.plan.chain:
            return
        self.arrive()
        virtual_stage = self.scopes.virtual_stage
        target = self.plan.beside(virtual_stage, 1)
        if target is not None:
            self._send(target, backward=False)
        if not self.scopes.begin().training and self.plan.leaves_stage(virtual_stage, backward=False):
            self.scopes.drop(self.clock.microbatch)

    def backward_begins(self) -> None:
        """Begin the backward pass through a virtual stage."""
        virtual_stage = self.scopes.virtual_stage
        source = self.plan.beside(virtual_stage, 1)
        if source is not None and self.scopes.begin().training:
            self._receive(source, backward=True)
            self._relay.settle(self._message(source, backward=False))

    def backward_ends(self) -> None:
        """End the backward pass through the virtual stage."""
        if not self.plan.chain:
            return
        virtual_stage = self.scopes.virtual_stage
        target = self.plan.beside(virtual_stage, -1)
        if target is not None and self.scopes.begin().training:
            self._send(target, backward=True)
        if self.plan.leaves_stage(virtual_stage, backward=True):
            self.scopes.drop(self.clock.microbatch)

    # -- packages --------------------------------------------------------------------------------------

    def _message(self, virtual_stage: int, backward: bool) -> StageMessage:
        return StageMessage(self.clock.step, self.clock.microbatch, virtual_stage, backward)

    def _send(self, target: int, backward: bool) -> None:
        micro, stage = self.scopes.begin(), target % self.plan.stages
        items: dict[Any, Any] = {}
        if backward:
            away = [t for t in micro.account if t[0].virtual_stage % self.plan.stages != self.scopes.stage]
            items = {("grad", ticket): micro.account.pop(ticket) for ticket in away}
        if not backward or self.plan.needs_values_backward(target):
            items |= self._values(stage)
        if self._leads:
            self._relay.send(pack_values(items, self._refused), stage, self._message(target, backward))

    def _values(self, stage: int) -> dict[Any, Any]:
        """The values of the running microbatch, those that a stage already has without what is in them."""
        micro = self.scopes.begin()
        items: dict[Any, Any] = {("names", ""): list(micro.state)}
        for name, entry in micro.state.items():
            known = stage in entry.holders
            entry = micro.state[name] = replace(entry, holders=entry.holders | {stage})
            micro.held[entry.version] = entry
            sent = None if known else entry.value
            items["entry", name] = replace(entry, value=sent, virtual_stage=None), known
        return items

    def _receive(self, source: int, backward: bool) -> None:
        package: Tensor | None = None
        if self._leads:
            stage = source % self.plan.stages
            package = self._relay.receive(stage, self._message(self.scopes.virtual_stage, backward))
        if self.scopes.shared:
            package = broadcast_package(package, self._holders)
        if package is None:
            return
        micro, items = self.scopes.begin(), unpack_values(package)
        for (kind, what), item in items.items():
            if kind == "grad":
                micro.credit(what, item)
        if ("names", "") in items:
            state = {}
            for name in items["names", ""]:
                entry, known = items.get(("entry", name), (None, False))
                held: ContextEntry | None = micro.held.get(entry.version) if known else entry
                if entry is not None and held is not None:
                    state[name] = replace(held, holders=entry.holders)
                    micro.held[entry.version] = state[name]
            micro.state = state

    def _refused(self, key: Any, error: Exception) -> None:
        self._note(
            f"save_ctx.{key[1]} cannot be sent to the next pipeline stage ({describe_error(error)}), "
            f"iteration {self.clock.iteration}, microbatch {self.clock.microbatch}; save tensors, numbers, "
            "strings or what can be pickled",
            error,
        )
