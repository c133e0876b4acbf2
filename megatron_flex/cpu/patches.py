"""Reversible patches: an undo list of attributes that were set, and a call after a module was imported.

Every attribute that the CPU runtime sets goes through the list, so that all of it can be removed. What
was there
before is kept as the very object, found in the owner's own dictionary (an attribute a class merely inherits
is removed
again, not copied down). Megatron's parts are patched when, and only if, they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class Patches:
    """Attributes and mapping items that were set, in order, and what they replaced."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[tuple[Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name = value`; remember what `vars(owner)` held, or that it held nothing."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if old is _ABSENT:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, old))
            self._replaced.append((old, value))

    def set_present(self, owner: Any, name: str, value: Any) -> None:
        """Like `set`, but only where the attribute exists: versions differ in what they have."""
        if hasattr(owner, name):
            self.set(owner, name, value)

    def set_item(self, mapping: MutableMapping[str, str], key: str, value: str) -> None:
        """Set `mapping[key] = value` (environment variables)."""
        old = mapping.get(key, _ABSENT)
        mapping[key] = value
        if old is _ABSENT:
            self._undo.append(lambda: _remove_item(mapping, key))
        else:
            self._undo.append(lambda: mapping.__setitem__(key, old))

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Run `undo` when everything is restored (for what is not an attribute)."""
        self._undo.append(undo)

    def rebind(self, modules: Iterable[ModuleType]) -> None:
        """Rebind names that `modules` imported before (`from torch.cuda import _lazy_call`) to ours."""
        _swap_globals(modules, self._replaced)

    def restore(self, packages: Collection[str] = ()) -> None:
        """Undo everything, last first; names bound to a stand-in in modules of `packages` go back too."""
        for undo in reversed(self._undo):
            undo()
        _swap_globals(loaded_modules(packages), [(new, old) for old, new in self._replaced])
        self._undo.clear()
        self._replaced.clear()


def loaded_modules(packages: Collection[str]) -> list[ModuleType]:
    """The imported modules that are one of `packages` or belong to one."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and isinstance(module, ModuleType)
    ]


def _swap_globals(modules: Iterable[ModuleType], pairs: list[tuple[Any, Any]]) -> None:
    # Only functions and classes are identified by identity; `True` or `()` would match everywhere.
    swap = {id(old): new for old, new in pairs if callable(old)}
    for module in modules:
        names = vars(module)
        for name in [name for name, value in names.items() if id(value) in swap]:
            names[name] = swap[id(names[name])]


def _remove_item(mapping: MutableMapping[str, str], key: str) -> None:
    mapping.pop(key, None)


AfterImportCallback = Callable[[ModuleType], None]


class AfterImportFinder(MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find, and calls `after` on the loaded module."""

    def __init__(self, package: str, after: AfterImportCallback) -> None:
        self._package = package
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the later finders find for a module of the package, with the call added."""
        if fullname.partition(".")[0] != self._package:
            return None
        later_finders = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        for finder in later_finders:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallbackLoader(spec.loader, self._after)
                return spec
        return None


class _CallbackLoader(Loader):
    """A loader around the real one, which removes itself as soon as the module is loaded."""

    def __init__(self, loader: Loader, after: AfterImportCallback) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module's own code may look at its loader (for its source, its resources): show the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._after(module)
