"""Agreement between the ranks of a session: they compare hooks before a step, and meet outside of steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from megatron_flex.collectives import Agreement, agreement_seconds
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_relay import ContextPlan
from megatron_flex.runtime.function_agreement import FunctionAgreement
from megatron_flex.runtime.hook_registry import HookRegistry

STEP_END = "the end of a step"
UNFINISHED = "then restart the job: a collective of this step stays unfinished, and later ones would meet it"


class StepAgreement:
    """Compares the hooks of a session on all ranks, and has ranks wait for each other outside of steps.

    Ranks compare when their hooks may have changed, and not before every step.

    Args:
        name: the session's name, the same on all ranks.
        registry: the hooks of the session.
        clock: the current step and iteration.
        mesh: the axes of the run.
        model_ids: returns the ids of the modules and parameters of the model on this rank.
    """

    def __init__(
        self,
        name: str,
        registry: HookRegistry,
        clock: Clock,
        mesh: Mesh,
        model_ids: Callable[[], AbstractSet[int]],
    ) -> None:
        self._registry, self._clock, self._mesh = registry, clock, mesh
        self._exchange = Agreement(name, agreement_seconds(), mesh.ranks)
        self._functions = FunctionAgreement(self._exchange, model_ids)
        self._compared = -1  # the version of the registry that the ranks have compared
        self._replicas_independent = False

    @property
    def now(self) -> str:
        """The current step as text, for errors."""
        return f"in step {self._clock.step}, iteration {self._clock.iteration}"

    def compare(self, text: str) -> None:
        """Compare a text on all ranks. Collective.

        Raises:
            HookError: on all ranks, if the texts differ or some rank does not arrive.
        """
        self._exchange.compare(text)

    def compare_again(self) -> None:
        """Have the ranks compare their hooks before the next step, whether or not hooks have changed."""
        self._compared = -1

    def compare_hooks(
        self, replicas_independent: bool, verifying: bool, adopt: Callable[[ContextPlan], None]
    ) -> bool:
        """Compare the hooks of all ranks if they may have changed; return whether they were compared.

        Args:
            replicas_independent: whether data parallel replicas may run different numbers of steps, as calls
                outside a schedule do.
            verifying: whether `verify()` covers the next step.
            adopt: called after the comparison with the order in which the hooks of the next steps use the
                context.

        Raises:
            HookError: on all ranks, if hooks differ or some rank does not arrive.
        """
        registry, following, exchange = self._registry, self._clock.step + 1, self._exchange
        self._replicas_independent = replicas_independent
        due = registry.version != self._compared
        if not due and exchange.looks_due():  # a rank whose hooks changed may wait
            due = exchange.is_awaited(following, self._replica())
        if due:
            plan = ContextPlan.from_hooks(registry.active, self._mesh["pp"].size)
            more = plan.describe() + (", verify()" if verifying else "")
            selected = [e.hook for e in registry.selected]
            self._functions.compare(registry.describe() + more, selected, f"step {following}")
            adopt(plan)
            self._compared = registry.version
        return due

    def barrier(self, place: str, failed: bool = False) -> None:
        """Wait, if hooks are registered, until all ranks reach a point that every rank has to reach.

        This precedes any other collective: a rank still inside a step would match that collective with a
        different one.

        Args:
            place: a description of the point.
            failed: whether the last step raised an error on this rank.

        Raises:
            HookError: some ranks are elsewhere; raised on all ranks that do not wait in the framework's
                collectives.
        """
        if self._registry.entries and self._compared >= 0:
            # Without a schedule, data parallel replicas may call the model different numbers of times.
            same_action = self._mesh["dp"].size == 1
            last_step = self._clock.step, self._mesh["dp"].coord
            self._exchange.barrier(place, f"after step {self._clock.step}", last_step, same_action, failed)

    def check_waiting_ranks(self) -> None:
        """Raise, while this rank waits at the end of a step, if another rank waits elsewhere.

        Raises:
            HookError: on all ranks that wait.
        """
        self._exchange.check_ended()
        if self._exchange.is_awaited(self._clock.step, self._replica()):
            try:
                self._exchange.barrier(STEP_END, self.now)
            except HookError as error:
                raise HookError(f"{error}; {UNFINISHED}") from error

    def _replica(self) -> int | None:
        """The data parallel coordinate, if only ranks of this replica run the same number of steps."""
        return self._mesh["dp"].coord if self._replicas_independent else None
