"""The hooks of a session, their sites, and which hooks are active."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_flex.adapters import ParameterSite
from megatron_flex.errors import HookError, SiteError
from megatron_flex.gpt_names import own_name
from megatron_flex.runtime.hook_groups import GroupSelection, Switches
from megatron_flex.runtime.hooks import POINT_OF_TYPE, HookFunction
from megatron_flex.sites import Site, SiteTable

HooksAtSite = tuple[list[HookFunction], list[HookFunction]]
NO_HOOKS: HooksAtSite = ([], [])


@dataclass(slots=True)
class HookEntry:
    """A hook with the sites and parameters that it matches, on all ranks."""

    hook: HookFunction
    always: bool = False  # whichever groups are selected
    sites: list[Site] = field(default_factory=list)
    parameters: list[ParameterSite] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of the sites and parameters."""
        return {s.name for s in self.sites} | {p.name for p in self.parameters}


class HookRegistry:
    """The hooks of a session in the order of registration; each change increments `version`.

    Attributes:
        entries: all registered hooks.
        active: the hooks that are active in this step.
        selection: the groups selected by a context; `adopt` applies the selection.
        switches: the groups switched on, in any context; `adopt` applies them.
        revision: changes with what happens at sites, whose plans hold while it stays.
    """

    def __init__(self, sites: SiteTable, parameters: dict[str, ParameterSite], divided: bool) -> None:
        """Make a registry without hooks; `divided`: whether there are several tensor parallel ranks."""
        self._sites, self._parameters, self._divided = sites, parameters, divided
        self.entries: list[HookEntry] = []
        self.active: list[HookEntry] = []
        self.selection = GroupSelection()
        self.switches = Switches()
        self._applied, self._stale = (GroupSelection(), Switches()), False
        self.version = self.revision = 0
        self._selected: list[HookEntry] = []  # the selected hooks, some of which may rest
        self._suspended: set[HookFunction] = set()
        self._at: dict[str, list[HookFunction]] = {}
        self._hooks_at: dict[str, HooksAtSite] = {}
        self._expected: dict[str, tuple[int | None, ...]] = {}

    def add(self, hook: HookFunction, always: bool = False) -> HookEntry:
        """Register a hook at every site that its pattern matches.

        Args:
            hook: the hook.
            always: whether the hook is active whichever groups are selected.

        Raises:
            SiteError: nothing matches, or the configuration hides the site.
            HookError: the hook is registered already, asks for an impossible gradient scale, or expects
                another shape than another hook at the same site of a plain module.
        """
        if any(e.hook is hook for e in self.entries):
            raise HookError(f"this HookFunction on {hook.where!r} is registered already; make another one")
        entry = HookEntry(hook, always)
        name = hook.module_name
        if hook.hook_type == "tensor" and isinstance(name, str):
            name = own_name(name, self._parameters)
        if hook.hook_type == "tensor" and isinstance(name, str) and name in self._parameters:
            described = self._parameters[name]
            if described.hidden:
                raise HookError(
                    f"no hook can be registered at the gradient of {described.name}: {described.hidden}",
                    site=described.name,
                )
            if hook.unpack_idx:
                raise HookError(
                    f"unpack_idx={hook.unpack_idx} on {described.name}: a parameter is one tensor; drop it"
                )
            entry.parameters = [described]
        else:
            matched: Sequence[Site] = self._sites.match(hook.module_name, POINT_OF_TYPE[hook.hook_type])
            changes = hook.backward or hook.editing_function is not None
            if changes and any(not s.read_only_reason for s in matched):
                # A pattern leaves out what can be read only, such as token ids; a name is an error below.
                matched = [s for s in matched if not s.read_only_reason]
            entry.sites = [self._leaf(s, hook.unpack_idx) for s in matched]
            for site in entry.sites:
                if site.hidden:
                    raise HookError(
                        f"no hook can be registered at {site.name}: {site.hidden}", site=site.name
                    )
                if site.read_only_reason and changes:
                    what = "has no gradient" if hook.backward else "can be read and not edited"
                    raise HookError(f"{site.name} {what}: {site.read_only_reason}", site=site.name)
        self._check_scale(entry)
        self._check_capture_names(entry)
        hook.bind_sites([*entry.sites, *(Site(p.name, p.layout, p.shape, p.stage) for p in entry.parameters)])
        self._expected |= self._shapes(entry)
        self.entries = [*self.entries, entry]
        hook.registrations += 1
        self.version += 1
        self.revision += 1
        self._put(entry)
        return entry

    def _leaf(self, site: Site, index: int) -> Site:
        try:
            return site.leaf(index)
        except SiteError as error:
            points = ", ".join(s.name for s in self._sites if s.module == site.module)
            raise SiteError(f"{error}; hook points with names are {points}") from None

    def _shapes(self, entry: HookEntry) -> dict[str, tuple[int | None, ...]]:
        """The shapes expected at the plain modules' sites of a hook, merged with those of earlier hooks."""
        want = entry.hook.expected_shape
        out: dict[str, tuple[int | None, ...]] = {}
        sites: list[Site | ParameterSite] = [*entry.sites, *entry.parameters]
        for site in sites:
            if want is None or not site.inferred:
                continue
            other = self._expected.get(site.name, want)
            pairs = list(zip(other, want, strict=False))
            if len(other) != len(want) or any(None not in p and p[0] != p[1] for p in pairs):
                raise HookError(
                    f"hook ({entry.hook.describe()}) at {site.name} contradicts another one there, which "
                    f"expects {other}; a tensor has one shape: give both the same",
                    site=site.name,
                )
            out[site.name] = tuple(b if a is None else a for a, b in pairs)
        return out

    @property
    def has_expected_shapes(self) -> bool:
        """Whether any hook expects a shape at a plain module's site."""
        return bool(self._expected)

    @property
    def must_compare(self) -> bool:
        """Whether an active hook is at a site where ranks compare their tensors: the layout is inferred or
        unknown.

        Hooks of a sink count only in the sink's first step; afterwards the ranks do not communicate for them.
        """
        asking = (e for e in self.active if e.hook.tensor_sink is None or e.hook.tensor_sink.cycle.first)
        return any(s.propagated or self._assumed(s) for e in asking for s in e.sites) or any(
            self._assumed(p) for e in self.active for p in e.parameters
        )

    def _assumed(self, site: Site | ParameterSite) -> bool:
        """Whether a site's tensors are assumed replicated over tensor parallel ranks, for lack of
        information.
        """
        return self._divided and site.inferred and not site.propagated and site.name not in self._expected

    @property
    def selected(self) -> list[HookEntry]:
        """The hooks that groups and switches select, including those that rest in this step."""
        return self._selected

    @property
    def sends_captures(self) -> bool:
        """Whether an active hook sends captures to the leader; the same on all ranks."""
        return any(e.hook.sends_captures for e in self.active)

    def expected(self, name: str) -> tuple[int | None, ...] | None:
        """The full shape that hooks, active or not, expect at a plain module's site; None for none."""
        return self._expected.get(name)

    def _check_scale(self, entry: HookEntry) -> None:
        scale = entry.hook.gradient_scale
        if entry.hook.tensor_sink is not None:  # a sink divides by the factor itself
            return
        if scale != "raw" and not entry.hook.backward:
            raise HookError(
                f"gradient_scale={scale!r} on {entry.hook.where!r}: a {entry.hook.hook_type} hook sees "
                "no gradient; drop it or choose a backward hook"
            )
        for name in sorted(entry.names) if entry.hook.backward else ():
            others = [h for h in self.at(name) if h.backward and h.tensor_sink is None]
            if any(h.gradient_scale != scale for h in others):
                raise HookError(
                    f"another hook has the gradient at {name} on another scale than {scale!r}; give both the "
                    "same gradient_scale",
                    site=name,
                )

    def _check_capture_names(self, entry: HookEntry) -> None:
        """Refuse two hooks that capture different things at one site under the same name."""
        hook = entry.hook
        for other in self.entries if hook.save else ():
            selection, other_selection = hook.selection, other.hook.selection
            if (
                selection is other_selection
                or not other.hook.save
                or (selection is not None and selection.same(other_selection))
            ):
                continue
            same = (hook.backward, hook.keep_as) == (other.hook.backward, other.hook.keep_as)
            shared = sorted(entry.names & other.names) if same else []
            if shared:
                raise HookError(
                    f"{shared[0]}: hooks ({other.hook.describe()}) and ({hook.describe()}) capture different "
                    "entries under one name; set keep_as= on one of them",
                    site=shared[0],
                )

    def remove(self, hook: HookFunction) -> None:
        """Remove a hook.

        Raises:
            HookError: the hook is not registered.
        """
        remaining = [e for e in self.entries if e.hook is not hook]
        if len(remaining) == len(self.entries):
            raise HookError(
                f"this HookFunction on {hook.where!r} is not registered; nothing to remove",
                site=hook.where,
                hook=hook,
            )
        self._expected = {}
        for entry in remaining:
            self._expected |= self._shapes(entry)
        self._set(remaining)

    def clear(self) -> None:
        self._expected = {}
        self._set([])

    def _set(self, entries: list[HookEntry]) -> None:
        remaining = {id(entry) for entry in entries}
        for entry in self.entries:
            entry.hook.registrations -= id(entry) not in remaining
        self.entries = entries
        self._refresh()

    def _refresh(self) -> None:
        self.version += 1
        self._rebuild()

    def note_change(self) -> None:
        """Note that something else than the hooks has changed what happens at sites."""
        self.revision += 1

    def _rebuild(self) -> None:
        self.revision += 1
        self._selected, self.active, self._at, self._hooks_at = [], [], {}, {}
        for entry in self.entries:
            self._put(entry)

    def _put(self, entry: HookEntry) -> None:
        """Make a hook active, after the active ones, if groups and switches select it."""
        if not (entry.always or self._selects(entry.hook.groups, entry.hook.enabled)):
            return
        self._selected.append(entry)
        if entry.hook in self._suspended:
            return
        self.active.append(entry)
        for name in entry.names:
            forward, backward = self._hooks_at.get(name, NO_HOOKS)
            self._at[name] = [*self._at.get(name, ()), entry.hook]
            if entry.hook.backward:
                backward = [*backward, entry.hook]
            else:
                forward = [*forward, entry.hook]
            self._hooks_at[name] = forward, backward

    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each group, in the order of registration; groups without hooks are omitted."""
        out: dict[str, list[HookFunction]] = {}
        for entry in self.entries:
            for group in sorted(entry.hook.groups):
                out.setdefault(group, []).append(entry.hook)
        return out

    def groups_changed(self) -> None:
        """Note that groups of hooks have changed, which is applied from the next step on."""
        self._stale = True

    def adopt(self) -> bool:
        """Apply the selection and the switches; return whether that changes anything."""
        if self._applied == (self.selection, self.switches) and not self._stale:
            return False
        self._applied, self._stale = (self.selection, self.switches), False
        self._refresh()
        return True

    def selects(self, groups: Iterable[str]) -> bool:
        """Whether a hook in these groups is selected in this step."""
        return self._selects(set(groups))

    def _selects(self, groups: set[str], enabled: bool = True) -> bool:
        selected, switched = self._applied
        return selected.selects(groups) and switched.selects(groups, enabled)

    def suspend(self, hooks: set[HookFunction]) -> bool:
        """Deactivate these hooks for the step that begins, on every rank alike; return whether that is a
        change.

        This is not a change of the hooks that ranks would have to compare.
        """
        if hooks == self._suspended:
            return False
        self._suspended = hooks
        self._rebuild()
        return True

    def at(self, name: str) -> list[HookFunction]:
        """The active hooks at a site or parameter, in the order of registration."""
        return self._at.get(name, [])

    def hooks_at(self, name: str) -> HooksAtSite:
        """The active hooks at a site: those that see the tensor, and those that see its gradient."""
        return self._hooks_at.get(name, NO_HOOKS)

    def describe(self) -> str:
        """Return all selected hooks as text, for comparison between ranks."""
        idle = len(self.entries) - len(self._selected)
        described = [e.hook.describe() for e in self._selected] + ([f"{idle} not active"] if idle else [])
        return ", ".join(described)
