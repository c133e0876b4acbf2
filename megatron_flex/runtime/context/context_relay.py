"""Sends the values of a microbatch to the next virtual stage whose functions use them, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_flex.adapters import ParameterSite
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
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.sites import Site


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
    def from_hooks(active: Sequence[HookEntry], stages: int) -> ContextPlan:
        users = [e for e in active if (edit := e.hook.editing_function) is not None and uses_context(edit)]
        places: list[tuple[HookFunction, int]] = []
        for entry in users:
            sites: tuple[Site | ParameterSite, ...] = (*entry.sites, *entry.parameters)
            places += [(entry.hook, site.chunk * stages + site.stage) for site in sites]
        return ContextPlan(
            hooks=frozenset(entry.hook for entry in users),
            chain=tuple(sorted({stage for _, stage in places})),
            backward=frozenset(stage for hook, stage in places if hook.backward),
            once=frozenset(stage % stages for hook, stage in places if hook.run == "once"),
            replicated=frozenset(stage % stages for hook, stage in places if hook.run != "once"),
            stages=stages,
        )

    @property
    def links(self) -> bool:
        """Whether anything is sent between stages."""
        return len({virtual_stage % self.stages for virtual_stage in self.chain}) > 1

    def neighbour(self, virtual_stage: int, step: int) -> int | None:
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
        of_stage = [p for p in self.chain if p % self.stages == virtual_stage % self.stages]
        return not of_stage or virtual_stage == (min(of_stage) if backward else max(of_stage))

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

    def settle(self) -> None:
        """Note that all ranks have completed the step, so that everything sent has been received."""
        self._relay.settle(self.clock.step)

    def forward_begins(self) -> None:
        """Begin a microbatch's forward pass through a virtual stage."""
        if self.plan.chain:
            self.scopes.begin()
            self._due = self.plan.neighbour(self.scopes.virtual_stage, -1)

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
        target = self.plan.neighbour(virtual_stage, 1)
        if target is not None:
            self._send(target, backward=False)
        if not self.scopes.begin().training and self.plan.leaves_stage(virtual_stage, backward=False):
            self.scopes.drop(self.clock.microbatch)

    def backward_begins(self) -> None:
        """Begin the backward pass through a virtual stage."""
        virtual_stage = self.scopes.virtual_stage
        source = self.plan.neighbour(virtual_stage, 1)
        if source is not None and self.scopes.begin().training:
            self._receive(source, backward=True)
            self._relay.release(self._message(source, backward=False))

    def backward_ends(self) -> None:
        """End the backward pass through the virtual stage."""
        if not self.plan.chain:
            return
        virtual_stage = self.scopes.virtual_stage
        target = self.plan.neighbour(virtual_stage, -1)
        if target is not None and self.scopes.begin().training:
            self._send(target, backward=True)
        if self.plan.leaves_stage(virtual_stage, backward=True):
            self.scopes.drop(self.clock.microbatch)

    # -- packages --------------------------------------------------------------------------------------

    def _message(self, virtual_stage: int, backward: bool) -> StageMessage:
        return StageMessage(self.clock.step, self.clock.microbatch, virtual_stage, backward)

    def _send(self, target: int, backward: bool) -> None:
        micro, stages = self.scopes.begin(), self.plan.stages
        items: dict[Any, Any] = {}
        if backward:
            others = [t for t in micro.gradients if t[0].virtual_stage % stages != self.scopes.stage]
            items = {("grad", tensor_id): micro.gradients.pop(tensor_id) for tensor_id in others}
        if self._carries_values(target, backward):
            state = micro.state.items()
            items |= {("value", name): replace(entry, virtual_stage=None) for name, entry in state}
        if self._leads:
            package = pack_values(items, self._refused)
            self._relay.send(package, target % stages, self._message(target, backward))

    def _carries_values(self, target: int, backward: bool) -> bool:
        """Whether a package to a virtual stage has the values of the microbatch, besides gradients."""
        return not backward or self.plan.needs_values_backward(target)

    def _receive(self, source: int, backward: bool) -> None:
        package: Tensor | None = None
        virtual_stage = self.scopes.virtual_stage
        if self._leads:
            package = self._relay.receive(source % self.plan.stages, self._message(virtual_stage, backward))
        if self.scopes.shared:
            package = broadcast_package(package, self._holders)
        if package is None:
            return
        micro, items = self.scopes.begin(), unpack_values(package)
        for (kind, tensor_id), grad in items.items():
            if kind == "grad":
                micro.add_gradient(tensor_id, grad)
        if self._carries_values(virtual_stage, backward):
            micro.state = {name: entry for (kind, name), entry in items.items() if kind == "value"}

    def _refused(self, key: Any, error: Exception) -> None:
        self._note(
            f"save_ctx.{key[1]} cannot be sent to the next pipeline stage ({describe_error(error)}), "
            f"iteration {self.clock.iteration}, microbatch {self.clock.microbatch}; save tensors, numbers, "
            "strings or what can be pickled",
            error,
        )
