"""Where hooks stand on this rank: taps in and out, and which hooks nothing has passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from megatron_flex.adapters import ParameterSite, Undo
from megatron_flex.collectives import max_over_ranks, gather_objects
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.firing import HookDispatcher, TapCallback
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.hook_registry import HookEntry, HookRegistry
from megatron_flex.sites import Site


class SessionTaps:
    """The taps of a session on this rank.

    Attributes:
        own: this rank's sites, by name.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        parameters: Sequence[ParameterSite],
        registry: HookRegistry,
        firing: HookDispatcher,
        mesh: Mesh,
    ) -> None:
        self.registry, self.firing, self.editing, self._mesh = registry, firing, firing.editing, mesh
        self.own = {s.name: s for s in sites}
        self._own_parameters = {p.name: p for p in parameters}
        self._taps: dict[str, Undo] = {}
        self._hooks_due: set[HookFunction] = set()

    def update_taps(self) -> None:
        """Have taps where active hooks stand, and nowhere else."""
        for name in [n for n in self._taps if not self.registry.at(n)]:
            self._taps.pop(name)()
        for entry in self.registry.active:
            self.tap(entry)

    def tap(self, entry: HookEntry) -> None:
        """Have taps where a hook stands that is active."""
        for site in entry.sites:
            first = self.own.get(site.place)
            own = first and first.leaf(site.index)
            if own is not None and own.tap is not None and own.name not in self._taps:
                self._taps[own.name] = own.tap.install(TapCallback(self.firing, own))
        for reported in entry.parameters:
            mine = self._own_parameters.get(reported.name)
            if mine is not None and mine.parameter is not None and mine.name not in self._taps:
                self._taps[mine.name] = self._hooked(mine, mine.parameter)

    def _hooked(self, site: ParameterSite, parameter: Tensor) -> Undo:
        """Pass a parameter's gradients on, and have the calls followed that tell their layout."""
        undo = parameter.register_hook(partial(self.firing.parameter, site)).remove
        forget = None if site.followed is None else site.followed.want()

        def remove() -> None:
            undo()
            if forget is not None:
                forget()

        return remove

    def take_out(self) -> None:
        """Take all taps out."""
        for undo in self._taps.values():
            undo()
        self._taps.clear()

    def judge(self, hooks: Iterable[HookFunction]) -> None:
        """Hooks have stood through a whole step: something should have passed them."""
        self._hooks_due.update(hooks)

    def silent(self) -> list[tuple[HookFunction, str]]:
        """The hooks that have stood through a whole step and fired on no rank, and why if that is known.

        The same list on every rank. Collective over the mesh, if there are such hooks at all.
        """
        judged = [e for e in self.registry.entries if e.hook in self._hooks_due]
        if not judged:
            return []
        fired = max_over_ranks([int(e.hook in self.editing.fired) for e in judged], self._mesh)
        silent = [e for e, f in zip(judged, fired, strict=True) if not f]
        if not silent:
            return []
        reasons = [next((r for n, r in self.editing.reasons.items() if n in e.names), "") for e in silent]
        reported = gather_objects(reasons, self._mesh, [a.name for a in self._mesh])
        known = [next((r for r in row if r), "") for row in zip(*reported, strict=True)]
        return [(e.hook, why) for e, why in zip(silent, known, strict=True)]

    def list_uncalled_hooks(self) -> list[HookFunction]:
        """The hooks that stood on this rank's stage through a whole step and never fired. Not collective."""
        quiet = [
            e for e in self.registry.entries if e.hook in self._hooks_due and e.hook not in self.editing.fired
        ]
        return [e.hook for e in quiet if any(n in self.own or n in self._own_parameters for n in e.names)]
