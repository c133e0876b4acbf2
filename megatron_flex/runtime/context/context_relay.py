"""Passing a microbatch's values on, from one virtual stage whose functions use them to the next and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_flex.collectives import StageMessage, PipelineRelay, is_leader, pack_values, replica_mesh, broadcast_package, unpack_values
from megatron_flex.errors import described
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.sharing.functions import uses_context
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.sharing.values import ContextEntry


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What is passed on in a step; known from the hooks alone, and so the same on every rank.

    Attributes:
        hooks: those whose functions use the context.
        chain: the virtual stages where they stand, in the order of the forward pass.
        backward: those of them with hooks on gradients.
        led: the pipeline stages where the leader runs such a function for all.
        replicated: the pipeline stages where all ranks run one.
        stages: the number of pipeline stages.
    """

    hooks: frozenset[HookFunction] = frozenset()
    chain: tuple[int, ...] = ()
    backward: frozenset[int] = frozenset()
    led: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    stages: int = 1

    @staticmethod
    def of(active: Sequence[HookEntry], stages: int) -> ContextPlan:
        """The plan for the hooks that are active."""
        hooks: set[HookFunction] = set()
        chain: set[int] = set()
        backward: set[int] = set()
        led: set[int] = set()
        replicated: set[int] = set()
        for entry in active:
            hook = entry.hook
            if hook.editing_function is None or not uses_context(hook.editing_function):
                continue
            places = {at.chunk * stages + at.stage for at in entry.sites}
            places |= {at.chunk * stages + at.stage for at in entry.parameters}
            hooks.add(hook)
            chain |= places
            backward |= places if hook.backward else set()
            (led if hook.run == "leader" else replicated).update(p % stages for p in places)
        return ContextPlan(
            frozenset(hooks),
            tuple(sorted(chain)),
            frozenset(backward),
            frozenset(led),
            frozenset(replicated),
            stages,
        )

    @property
    def links(self) -> bool:
        """Whether anything goes from one stage to another."""
        return len({place % self.stages for place in self.chain}) > 1

    def beside(self, place: int, step: int) -> int | None:
        """The next place in the chain, or with `step` -1 the one before, if it is on another stage."""
        index = self.chain.index(place) + step if place in self.chain else -1
        if not 0 <= index < len(self.chain) or self.chain[index] % self.stages == place % self.stages:
            return None
        return self.chain[index]

    def needs_values_backward(self, place: int) -> bool:
        """Whether a hook on gradients, here or further on in the backward pass, may read values."""
        return any(p <= place for p in self.backward)

    def leaves_stage(self, place: int, backward: bool) -> bool:
        """Whether a microbatch comes to this stage no more after this place."""
        mine = [p for p in self.chain if p % self.stages == place % self.stages]
        return not mine or place == (min(mine) if backward else max(mine))

    def describe(self) -> str:
        """Return it in words, for comparing ranks."""
        return f", save_ctx on virtual stages {list(self.chain)}" if self.chain else ""


class ContextRelay:
    """Follows the schedule and passes on what the plan says.

    A package leaves when a microbatch's forward (backward) pass through a virtual stage is over, on every
    such occasion and whatever has happened, and is waited for before the first function of the next one
    that uses the context (before the backward pass there): the pipeline's own order has it sent by then.
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

    def adopt(self, plan: ContextPlan) -> None:
        """Make a plan count. Collective over the leaders of the stages, the first time that it has links."""
        self.plan = plan
        stage = self.scopes.stage
        self.scopes.led, self.scopes.shared = stage in plan.led, stage in plan.replicated
        if plan.links and self._leads:
            self._relay.open()

    def close(self) -> None:
        """Forget everything, and take the group down. Waits for nobody."""
        self.begin()
        self.scopes.run.clear()
        self.scopes.kept.clear()
        self._relay.close()

    # -- what the session tells ------------------------------------------------------------------------

    def begin(self) -> None:
        """A step starts, or one is over: nothing is left of microbatches before it."""
        self.scopes.drop(*self.scopes.micros)
        self._due = None
        self._relay.abandon()

    def settle(self) -> None:
        """All ranks have come through the step: what was sent has been received."""
        self._relay.settle()

    def forward_begins(self) -> None:
        """A microbatch enters a virtual stage."""
        if self.plan.chain:
            self.scopes.begin()
            self._due = self.plan.beside(self.scopes.place, -1)

    def arrive(self) -> None:
        """Have what was sent to this virtual stage for the running microbatch. Every rank calls it."""
        source, self._due = self._due, None
        if source is not None:
            self._receive(source, backward=False)

    def forward_ends(self) -> None:
        """It leaves the virtual stage."""
        if not self.plan.chain:
            return
        self.arrive()
        place = self.scopes.place
        target = self.plan.beside(place, 1)
        if target is not None:
            self._send(target, backward=False)
        if not self.scopes.begin().training and self.plan.leaves_stage(place, backward=False):
            self.scopes.drop(self.clock.microbatch)

    def backward_begins(self) -> None:
        """A microbatch comes back to a virtual stage."""
        place = self.scopes.place
        source = self.plan.beside(place, 1)
        if source is not None and self.scopes.begin().training:
            self._receive(source, backward=True)
            self._relay.settle(self._message(source, backward=False))

    def backward_ends(self) -> None:
        """It leaves the virtual stage for the last time."""
        if not self.plan.chain:
            return
        place = self.scopes.place
        target = self.plan.beside(place, -1)
        if target is not None and self.scopes.begin().training:
            self._send(target, backward=True)
        if self.plan.leaves_stage(place, backward=True):
            self.scopes.drop(self.clock.microbatch)

    # -- packages --------------------------------------------------------------------------------------

    def _message(self, place: int, backward: bool) -> StageMessage:
        return StageMessage(self.clock.step, self.clock.microbatch, place, backward)

    def _send(self, target: int, backward: bool) -> None:
        micro, stage = self.scopes.begin(), target % self.plan.stages
        items: dict[Any, Any] = {}
        if backward:
            away = [t for t in micro.account if t[0].place % self.plan.stages != self.scopes.stage]
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
            items["entry", name] = replace(entry, value=None if known else entry.value, place=None), known
        return items

    def _receive(self, source: int, backward: bool) -> None:
        package: Tensor | None = None
        if self._leads:
            stage = source % self.plan.stages
            package = self._relay.receive(stage, self._message(self.scopes.place, backward))
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
            f"save_ctx.{key[1]} cannot be sent to the next pipeline stage ({described(error)}), "
            f"iteration {self.clock.iteration}, microbatch {self.clock.microbatch}; save tensors, numbers, "
            "strings or what can be pickled",
            error,
        )
