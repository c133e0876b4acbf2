"""The hooks of a session, where each stands, and which are active."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_flex.adapters import ParameterSite
from megatron_flex.errors import HookError, SiteError
from megatron_flex.runtime.hook_groups import GroupSelection, Switches
from megatron_flex.runtime.hooks import POINT_OF_TYPE, HookFunction
from megatron_flex.sites import Site, SiteTable

SiteHooks = tuple[list[HookFunction], list[HookFunction]]
NO_HOOKS: SiteHooks = ([], [])


@dataclass(slots=True)
class HookEntry:
    """A hook with the places it stands at, on whichever rank they are."""

    hook: HookFunction
    always: bool = False  # whatever groups are selected
    sites: list[Site] = field(default_factory=list)
    parameters: list[ParameterSite] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of the places."""
        return {s.name for s in self.sites} | {p.name for p in self.parameters}


class HookRegistry:
    """The hooks of a session in the order of registration; `version` changes whenever they do.

    Attributes:
        entries: all that are registered.
        active: those among them that stand in this step.
        selection: which groups are wanted in a scope; `adopt` makes it count.
        switches: which are on, in whatever scope; likewise.
    """

    def __init__(self, sites: SiteTable, parameters: dict[str, ParameterSite]) -> None:
        self._sites, self._parameters = sites, parameters
        self.entries: list[HookEntry] = []
        self.active: list[HookEntry] = []
        self.selection = GroupSelection()
        self.switches = Switches()
        self._adopted, self._stale = (GroupSelection(), Switches()), False
        self.version = 0
        self._wanted: list[HookEntry] = []  # of those selected, some of which may rest
        self._resting: set[HookFunction] = set()
        self._at: dict[str, list[HookFunction]] = {}
        self._standing: dict[str, SiteHooks] = {}
        self._expected: dict[str, tuple[int | None, ...]] = {}

    def add(self, hook: HookFunction, always: bool = False) -> HookEntry:
        """Register a hook everywhere its pattern matches; `always`: active whatever is selected.

        Raises:
            SiteError: nothing matches, or the configuration hides the place.
            HookError: the hook is registered already, wants a gradient on a scale that cannot be, or expects
                another shape than one at the same place of a plain module.
        """
        if any(e.hook is hook for e in self.entries):
            raise HookError(f"this HookFunction on {hook.where!r} is registered already; make another one")
        entry = HookEntry(hook, always)
        name = hook.module_name
        if hook.hook_type == "tensor" and isinstance(name, str) and name in self._parameters:
            described = self._parameters[name]
            if described.hidden:
                raise HookError(f"no hook can stand at the gradient of {described.name}: {described.hidden}")
            if hook.unpack_idx:
                raise HookError(
                    f"unpack_idx={hook.unpack_idx} on {described.name}: a parameter is one tensor; drop it"
                )
            entry.parameters = [described]
        else:
            found = self._sites.match(hook.module_name, POINT_OF_TYPE[hook.hook_type])
            entry.sites = [self._leaf(s, hook.unpack_idx) for s in found]
            for site in entry.sites:
                if site.hidden:
                    raise HookError(f"no hook can stand at {site.name}: {site.hidden}")
                if site.fixed and (hook.backward or hook.editing_function is not None):
                    what = "has no gradient to be had" if hook.backward else "can be read and not edited"
                    raise HookError(f"{site.name} {what}: {site.fixed}")
        self._check_scale(entry)
        self._check_kept(entry)
        hook.stand([*entry.sites, *(Site(p.name, p.layout, p.shape, p.stage) for p in entry.parameters)])
        self._expected |= self._shapes(entry)
        self.entries = [*self.entries, entry]
        self.version += 1
        self._put(entry)
        return entry

    def _leaf(self, site: Site, index: int) -> Site:
        try:
            return site.leaf(index)
        except SiteError as error:
            points = ", ".join(s.name for s in self._sites if s.module == site.module)
            raise SiteError(f"{error}; places with names are {points}") from None

    def _shapes(self, entry: HookEntry) -> dict[str, tuple[int | None, ...]]:
        """What is expected at the plain modules' places of a hook, of this one and those before it."""
        want = entry.hook.expected_shape
        out: dict[str, tuple[int | None, ...]] = {}
        places: list[Site | ParameterSite] = [*entry.sites, *entry.parameters]
        for place in places:
            if want is None or not place.inferred:
                continue
            other = self._expected.get(place.name, want)
            pairs = list(zip(other, want, strict=False))
            if len(other) != len(want) or any(None not in p and p[0] != p[1] for p in pairs):
                raise HookError(
                    f"hook ({entry.hook.describe()}) at {place.name} contradicts another one there, which "
                    f"expects {other}; a tensor has one shape: give both the same"
                )
            out[place.name] = tuple(b if a is None else a for a, b in pairs)
        return out

    @property
    def expects(self) -> bool:
        """Whether some hook expects a shape at a plain module's place."""
        return bool(self._expected)

    @property
    def follows(self) -> bool:
        """Whether a hook stands where layouts are followed, and may turn out not to be known.

        Of a taker that counts in the first step that it takes, behind which ranks do not meet.
        """
        asking = (e for e in self.active if e.hook.tensor_sink is None or e.hook.tensor_sink.first)
        return any(s.followed for e in asking for s in e.sites)

    @property
    def selected(self) -> list[HookEntry]:
        """The hooks that groups and switches let stand, those too that rest in this step."""
        return self._wanted

    @property
    def brings(self) -> bool:
        """Whether an active hook keeps something that is brought to the leader; the same on all ranks."""
        return any(e.hook.brings for e in self.active)

    def expected(self, name: str) -> tuple[int | None, ...] | None:
        """The whole's shape that hooks, active or not, expect at a plain module's place; None for nothing."""
        return self._expected.get(name)

    def _check_scale(self, entry: HookEntry) -> None:
        scale = entry.hook.gradient_scale
        if entry.hook.tensor_sink is not None:  # which takes the factor out by itself
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
                    "same gradient_scale"
                )

    def _check_kept(self, entry: HookEntry) -> None:
        """Two hooks that keep different things of one place must keep them under different names."""
        hook = entry.hook
        for other in self.entries if hook.save else ():
            one, two = hook.wanted, other.hook.wanted
            if one is two or not other.hook.save or (one is not None and one.same(two)):
                continue
            same = (hook.backward, hook.keep_as) == (other.hook.backward, other.hook.keep_as)
            shared = sorted(entry.names & other.names) if same else []
            if shared:
                raise HookError(
                    f"hook ({hook.describe()}) would keep what hook ({other.hook.describe()}) keeps under "
                    f"the name of {shared[0]}; give one of them a name by keep_as="
                )

    def remove(self, hook: HookFunction) -> None:
        """Take a hook out again.

        Raises:
            HookError: it is not registered.
        """
        kept = [e for e in self.entries if e.hook is not hook]
        if len(kept) == len(self.entries):
            raise HookError(f"this HookFunction on {hook.where!r} is not registered; nothing to remove")
        self._expected = {}
        for entry in kept:
            self._expected |= self._shapes(entry)
        self._set(kept)

    def clear(self) -> None:
        """Take all hooks out."""
        self._expected = {}
        self._set([])

    def _set(self, entries: list[HookEntry]) -> None:
        self.entries = entries
        self._refresh()

    def _refresh(self) -> None:
        self.version += 1
        self._stand()

    def _stand(self) -> None:
        self._wanted, self.active, self._at, self._standing = [], [], {}, {}
        for entry in self.entries:
            self._put(entry)

    def _put(self, entry: HookEntry) -> None:
        """Let a hook stand behind those that do, if groups and switches let it."""
        if not (entry.always or self._takes(entry.hook.tags, entry.hook.enabled)):
            return
        self._wanted.append(entry)
        if entry.hook in self._resting:
            return
        self.active.append(entry)
        for name in entry.names:
            forward, backward = self._standing.get(name, NO_HOOKS)
            self._at[name] = [*self._at.get(name, ()), entry.hook]
            if entry.hook.backward:
                backward = [*backward, entry.hook]
            else:
                forward = [*forward, entry.hook]
            self._standing[name] = forward, backward

    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each group, in the order of registration; a group without any does not exist."""
        out: dict[str, list[HookFunction]] = {}
        for entry in self.entries:
            for tag in sorted(entry.hook.tags):
                out.setdefault(tag, []).append(entry.hook)
        return out

    def retagged(self) -> None:
        """Tags of hooks have changed, which counts from the next step on."""
        self._stale = True

    def adopt(self) -> bool:
        """Make the wanted selection count; whether that changes anything."""
        if self._adopted == (self.selection, self.switches) and not self._stale:
            return False
        self._adopted, self._stale = (self.selection, self.switches), False
        self._refresh()
        return True

    def takes(self, tags: Iterable[str]) -> bool:
        """Whether a hook with these tags is selected in this step."""
        return self._takes(set(tags))

    def _takes(self, tags: set[str], enabled: bool = True) -> bool:
        selected, switched = self._adopted
        return selected.takes(tags) and switched.takes(tags, enabled)

    def rest(self, hooks: set[HookFunction]) -> bool:
        """Let these hooks rest in the step that begins, on every rank alike; whether that changes anything.

        It is no change of the hooks that ranks would have to compare.
        """
        if hooks == self._resting:
            return False
        self._resting = hooks
        self._stand()
        return True

    def at(self, name: str) -> list[HookFunction]:
        """The active hooks at a site or parameter, in the order of registration."""
        return self._at.get(name, [])

    def standing(self, name: str) -> SiteHooks:
        """Those of them that see the tensor, and those that see its gradient."""
        return self._standing.get(name, NO_HOOKS)

    def describe(self) -> str:
        """Return all hooks in words, for comparing ranks."""
        idle = len(self.entries) - len(self._wanted)
        described = [e.hook.describe() for e in self._wanted] + ([f"{idle} not active"] if idle else [])
        return ", ".join(described)
