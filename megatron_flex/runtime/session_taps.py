"""The taps on this rank: install, remove, and find hooks that were never called.

Several sites of one module may see the same tensor: the partial sum and the output where there is no
reduction between them, or an output and the tensors that it packs. Such taps run in the order of
installation, which must depend neither on the order in which hooks were registered nor on the layout. The
taps of one module are therefore always installed in the order of the adapter's sites, which is that of the
data flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial

from torch import Tensor, nn

from megatron_flex.adapters import ParameterSite, Undo
from megatron_flex.collectives import gather_distinct, max_over_ranks
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.hook_dispatcher import HookDispatcher, SiteDispatch
from megatron_flex.runtime.hook_registry import HookEntry, HookRegistry
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.sites import Site, TapCallbacks


class SessionTaps:
    """The taps of a session on this rank.

    Attributes:
        local_sites: this rank's sites, by name.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        parameters: Sequence[ParameterSite],
        registry: HookRegistry,
        dispatcher: HookDispatcher,
        mesh: Mesh,
    ) -> None:
        self.registry, self.dispatcher, self.editing, self._mesh = (
            registry,
            dispatcher,
            dispatcher.editing,
            mesh,
        )
        self.local_sites = {s.name: s for s in sites}
        self._local_parameters = {p.name: p for p in parameters}
        self._taps: dict[str, Undo] = {}
        self._named: dict[str, Undo] = {}  # where hooks need the names of dims
        self._tapped: dict[nn.Module, list[Site]] = {}  # for each module, in the order of the data flow
        self._hooks_due: set[HookFunction] = set()
        self._observed: set[str] = set()  # sites without hooks whose tensors are observed

    @cached_property
    def _positions(self) -> dict[str, int]:
        """The place of each site in the order of the data flow."""
        return {name: position for position, name in enumerate(self.local_sites)}

    def update_taps(self) -> None:
        """Install taps where active hooks need them, and remove all others."""
        for name in [n for n in self._taps if not self.registry.at(n) and n not in self._observed]:
            self._taps.pop(name)()
        for name in [n for n in self._named if not any(h.needs_dim_names for h in self.registry.at(n))]:
            self._named.pop(name)()
        self._tapped = {
            module: tapped
            for module, sites in self._tapped.items()
            if (tapped := [s for s in sites if s.name in self._taps])
        }
        for entry in self.registry.active:
            self.tap(entry)
        for name in self._observed:
            if name not in self._taps:
                self._install(self.local_sites[name])

    def observe(self, names: Iterable[str]) -> None:
        """Install taps at these sites too, where the dispatcher's observer sees all tensors; none: remove
        them.
        """
        self._observed = {name for name in names if self.local_sites[name].tap is not None}
        self.update_taps()

    def tap(self, entry: HookEntry) -> None:
        """Install the taps of an active hook."""
        for site in entry.sites:
            first = self.local_sites.get(site.place)
            local_site = first and first.leaf(site.index)
            if local_site is not None and local_site.tap is not None and local_site.name not in self._taps:
                self._install(local_site)
            if local_site is None or local_site.dim_names is None or local_site.name in self._named:
                continue
            if entry.hook.needs_dim_names:
                self._named[local_site.name] = local_site.dim_names.want()
        for reported in entry.parameters:
            parameter = self._local_parameters.get(reported.name)
            if parameter is not None and parameter.parameter is not None and parameter.name not in self._taps:
                self._taps[parameter.name] = self._hooked(parameter, parameter.parameter)

    def _install(self, site: Site) -> None:
        """Install a tap, and reinstall those of the same module that come later in the data flow."""
        module = None if site.tap is None else site.tap.module
        of_module = [site] if module is None else [*self._tapped.get(module, ()), site]
        of_module.sort(key=self._order)
        later = of_module[of_module.index(site) :]
        for other in later[1:]:
            self._taps.pop(other.name)()
        for later_site in later:
            assert later_site.tap is not None
            self._taps[later_site.name] = later_site.tap.install(self._make_callbacks(later_site))
        if module is not None:
            self._tapped[module] = of_module

    def _make_callbacks(self, site: Site) -> TapCallbacks:
        dispatch = SiteDispatch(self.dispatcher, site)
        return TapCallbacks(dispatch, dispatch.absent, dispatch.unknown)

    def _order(self, site: Site) -> tuple[int, bool, int]:
        """The order of a site in the data flow, among the sites of its module.

        Among the tensors of one hook point, those indexed from the start come before those indexed from the
        end, which may be the same tensors.
        """
        return self._positions[site.place], site.index < 0, site.index

    def _hooked(self, site: ParameterSite, parameter: Tensor) -> Undo:
        """Install a hook on a parameter's gradients, and track the calls that determine their layout."""
        undo = parameter.register_hook(partial(self.dispatcher.gradients.dispatch_parameter, site)).remove
        forget = None if site.gradient_layout_source is None else site.gradient_layout_source.want()

        def remove() -> None:
            undo()
            if forget is not None:
                forget()

        return remove

    def remove_all(self) -> None:
        for undo in (*self._taps.values(), *self._named.values()):
            undo()
        self._taps.clear()
        self._named.clear()
        self._tapped.clear()

    def expect_calls(self, hooks: Iterable[HookFunction]) -> None:
        """Note hooks that were active through a complete step and should have been called."""
        self._hooks_due.update(hooks)

    def find_uncalled_hooks(self) -> list[tuple[HookFunction, str]]:
        """The hooks that were active through a complete step and called on no rank, with the reason if known.

        The same list on every rank. Collective over the mesh, if there are such hooks.
        """
        due = [e for e in self.registry.entries if e.hook in self._hooks_due]
        if not due:
            return []
        fired = max_over_ranks([int(e.hook in self.editing.fired) for e in due], self._mesh)
        silent = [e for e, f in zip(due, fired, strict=True) if not f]
        if not silent:
            return []
        reasons = [next((r for n, r in self.editing.reasons.items() if n in e.names), "") for e in silent]
        reported = gather_distinct(reasons, self._mesh)
        known = [next((r for r in row if r), "") for row in zip(*reported, strict=True)]
        return [(e.hook, why) for e, why in zip(silent, known, strict=True)]

    def list_local_uncalled_hooks(self) -> list[HookFunction]:
        """The hooks of this rank's stage that were active through a complete step and never called. Not
        collective.
        """
        quiet = [
            e for e in self.registry.entries if e.hook in self._hooks_due and e.hook not in self.editing.fired
        ]
        return [
            e.hook
            for e in quiet
            if any(n in self.local_sites or n in self._local_parameters for n in e.names)
        ]
