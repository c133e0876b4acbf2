"""Text that describes what a registered hook does at each of its hook points, with the last measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_flex.collectives import PlannedCollective, plan_full_gather, plan_read, plan_result_broadcast
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout
from megatron_flex.layout.gradient_layout import conjugate_layout, layout_in_pass
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.debug.hook_trace import describe_moves
from megatron_flex.runtime.hooks import describe_edit
from megatron_flex.runtime.local_edits import explain_gather
from megatron_flex.sites import GRADIENT_SUFFIX, Site


class HookExplanation:
    """Explains the hooks of a session. Communicates nothing.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def explain(self, hook: HookFunction) -> str:
        """Describe a registered hook, with one line for each action at each hook point.

        Raises:
            HookError: the hook is not registered.
        """
        entry = next((e for e in self._session.registry.entries if e.hook is hook), None)
        if entry is None:
            raise HookError(f"this HookFunction on {hook.where!r} is not registered; nothing to explain")
        lines = [f"hook: {hook.describe()}"]
        sites = [*entry.sites, *(Site(p.name, p.layout, p.shape, p.stage) for p in entry.parameters)]
        for site in sites:
            lines += [
                f"{site.name}{GRADIENT_SUFFIX if hook.backward else ''}",
                *(f"  {t}" for t in self._plan(hook, site)),
            ]
        return "\n".join(lines)

    def _plan(self, hook: HookFunction, site: Site) -> Iterator[str]:
        session, mesh = self._session, self._session.mesh
        if len(site.shape) != len(site.dims) or not site.dims:
            yield f"layout found when a tensor passes, stage {site.stage}"
            yield from self._measured(site, hook)
            return
        layout = layout_in_pass(site.layout, hook.backward)
        lengths = session.hooks.trials.lengths
        shape = [lengths.get(n, n) if isinstance(n, str) else n for n in site.shape]
        full = ", ".join(
            f"{d}={n}" if d and d != n else str(n) for d, n in zip(site.dims, shape, strict=True)
        )
        yield f"layout {layout.describe(mesh.sizes)}, full shape [{full}], stage {site.stage}"
        if "experts" in site.module.split("."):
            yield "rows of experts: first home to their tokens along ep and etp, as many as the router sends"
        size = session.hooks.trials.dtype.itemsize
        if hook.editing_function is None:
            steps = [f"{s.op} along {s.axis}" for s in plan_read(layout, mesh)]
            if hook.selection is not None:
                selected = hook.selection.describe()
                yield f"selected on the shard: {selected}; no more than that is kept and sent"
            yield f"read: kept, and sent to the receiving rank when the step is over: {_join_steps(steps)}"
        elif not (why := self._why_gathered(hook, site, layout, shape)):
            yield f"edit: {describe_edit(hook.editing_function)}, on the shard of each rank, nothing sent"
            if not hook.backward:
                yield "backward: nothing sent"
        else:
            once = hook.run == "once"
            if not once:
                yield f"the full tensor is needed: {why}"
            yield f"gather: {_describe_collectives(plan_full_gather(layout, shape, size, mesh))}"
            broadcasts = plan_result_broadcast(layout, shape, size, mesh)
            who = (
                f"one rank: {_describe_collectives(broadcasts)}"
                if once
                else "every rank that holds a part of it"
            )
            yield f"edit: {describe_edit(hook.editing_function)}, run by {who}"
            yield "scatter: nothing sent"
            if not hook.backward:
                back = plan_full_gather(conjugate_layout(layout), shape, size, mesh) + (
                    broadcasts if once else []
                )
                yield f"backward: {_describe_collectives(back)}"
        yield from self._measured(site, hook)

    def _why_gathered(
        self, hook: HookFunction, site: Site, layout: Layout, shape: Sequence[int | str]
    ) -> str:
        """Return why an edit cannot run on each rank's shard; empty if the edit can."""
        session = self._session
        if "experts" in site.module.split("."):
            return "rows of experts go home to their tokens first"
        edits = {
            h: e
            for h in session.registry.at(site.name) or [hook]
            if h.backward == hook.backward and (e := h.editing_of(site.name)) is not None
        }
        return explain_gather(edits, layout, shape, session.mesh, bool(session.editing.modules))

    def _measured(self, site: Site, hook: HookFunction) -> Iterator[str]:
        tracer = self._session.tracer
        call = (
            None
            if tracer is None
            else tracer.last.get(site.name + (GRADIENT_SUFFIX if hook.backward else ""))
        )
        if tracer is None:
            yield "measured: nothing; call flex.debug() or set FLEX_DEBUG=1 before the step"
        elif call is None:
            yield "measured: nothing on this rank yet"
        else:
            yield f"measured: {call.describe()}"
            if (call.full_size is not None or call.here) and not hook.backward:
                yield f"measured backward: {'; '.join(describe_moves(call.back))}"


def _describe_collectives(plan: list[PlannedCollective]) -> str:
    return _join_steps([p.describe() for p in plan])


def _join_steps(items: list[str]) -> str:
    return "; ".join(items) or "nothing sent"
