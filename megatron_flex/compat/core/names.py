"""The names that a person uses, with or without wrappers' prefixes, and the global ones behind them."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_flex.collectives import gather_objects
from megatron_flex.errors import HookError
from megatron_flex.runtime import Session
from megatron_flex.runtime.hooks import POINT_OF_TYPE, HookType

# What wrappers call the module inside them, wherever in a path they stand.
WRAPPER_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class ModuleNames:
    """The names of one model's modules and parameters, over all pipeline stages.

    Making one is collective over the stages.

    Attributes:
        modules: as the given model has them, with layers counted over the whole model.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._prefix = session, session.adapter.prefix
        names_of_stages = gather_objects(session.adapter.module_names(), session.mesh, ["pp"])
        inside = list(dict.fromkeys(name for names in names_of_stages for name in names))
        parts = self._prefix.rstrip(".").split(".") if self._prefix else []
        wrappers = [".".join(parts[:n]) for n in range(len(parts))]
        self.modules = [*wrappers, *(self._outside(name) for name in inside)]
        self._known = {*inside, *session.survey.sites, *(s.name for s in session.sites)}

    def _outside(self, name: str) -> str:
        return f"{self._prefix}{name}" if name else self._prefix.rstrip(".")

    def resolve(self, name: str) -> str:
        """The global name of what a person calls `name`; without prefixes if there is no such thing."""
        bare = ".".join(p for p in name.split(".") if p not in WRAPPER_ATTRIBUTES)
        for candidate in (name, name.removeprefix(self._prefix), *_strip_module_prefixes(name), bare, *_strip_module_prefixes(bare)):
            if candidate in self._known:
                return candidate
        return (_strip_module_prefixes(bare) or [bare])[-1]

    def matching(self, text: str, kind: HookType, edits: bool) -> list[str]:
        """The modules (for `tensor` parameters) with a text in their names that can have such a hook.

        Raises:
            HookError: one of them can be read only, and the hook edits.
        """
        if kind == "tensor":
            names: Iterable[str] = (
                n for n, sites in self._session.survey.sites.items() if not sites[0].hidden
            )
        else:
            sites = [s for s in self._session.sites if s.point == POINT_OF_TYPE[kind] and not s.hidden]
            names = dict.fromkeys(s.module for s in sites)
            fixed = next((s for s in sites if s.fixed and text in self._outside(s.module)), None)
            if fixed is not None and (edits or kind.startswith("full_backward")):
                raise HookError(
                    f"{fixed.name} has {text!r} in its name and cannot have such a hook: {fixed.fixed}"
                )
        return [outside for n in names if text in (outside := self._outside(n))]


def _strip_module_prefixes(name: str) -> list[str]:
    """The name with one `module.` less in front, with two less, and so on."""
    out = []
    while name.startswith("module."):
        name = name.removeprefix("module.")
        out.append(name)
    return out
