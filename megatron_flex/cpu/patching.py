"""An undo list: every attribute the CPU runtime sets goes through it, so that all of it can be taken out.

Nothing is remembered by name only: what was there before is kept as the very object, found in the owner's
own dictionary (an attribute a class merely inherits is removed again, not copied down).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
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

    def rebind(self, module: ModuleType) -> None:
        """Point names that `module` bound by import before (`from torch.cuda import _lazy_call`) at ours."""
        _swap_globals(module, self._replaced)

    def restore(self, packages: tuple[str, ...] = ()) -> None:
        """Undo everything, last first; names bound to a stand-in in modules of `packages` go back too."""
        for undo in reversed(self._undo):
            undo()
        back = [(new, old) for old, new in self._replaced]
        for module in loaded_modules(packages):
            _swap_globals(module, back)
        self._undo.clear()
        self._replaced.clear()


def loaded_modules(packages: tuple[str, ...]) -> list[ModuleType]:
    """The imported modules that are one of `packages` or lie inside it."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and isinstance(module, ModuleType)
    ]


def _swap_globals(module: ModuleType, pairs: list[tuple[Any, Any]]) -> None:
    swap = {id(old): new for old, new in pairs if _is_code(old)}
    names = vars(module)
    for name in [name for name, value in names.items() if id(value) in swap]:
        names[name] = swap[id(names[name])]


def _is_code(value: Any) -> bool:
    # Only functions and classes are identified by identity; `True` or `()` would match everywhere.
    return callable(value)


def _remove_item(mapping: MutableMapping[str, str], key: str) -> None:
    mapping.pop(key, None)
