"""Does something right after a module was imported, without importing it: Megatron's parts are patched
when, and only if, somebody imports them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AfterImportCallback = Callable[[ModuleType], None]


class AfterImportFinder(MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find, and calls `after` on what was loaded."""

    def __init__(self, package: str, after: AfterImportCallback) -> None:
        self._package = package
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders behind this one find for a module of the package, with the call added."""
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
    """A loader around the real one, which takes itself out again as soon as the module is loaded."""

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
