"""save_ctx under recomputation: a replayed editing function finds what it found at first."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any


class SaveContextReplay:
    """Remembers, during a step, what save_ctx held before each call of an editing function.

    What a replay writes is not kept, except for later calls of the same replay: they get it instead of what
    the first pass wrote, so that gradients flow through it. Lists, dicts and sets are copied one level deep.
    """

    def __init__(self, context: Namespace) -> None:
        self.context = context
        self._step = -1
        self._before: dict[Hashable, dict[str, Any]] = {}
        self._wrote: dict[Hashable, dict[str, Any]] = {}
        self._instead: dict[int, tuple[Any, Any]] = {}  # by id: what the first pass wrote, and the replay

    @contextmanager
    def first(self, step: int, key: Hashable) -> Iterator[None]:
        """A first pass through a place."""
        if step != self._step:
            self._step = step
            self._before.clear()
            self._wrote.clear()
            self._instead.clear()
        before = _copy_containers(vars(self.context))
        self._before[key] = before
        yield
        now = vars(self.context)
        self._wrote[key] = {n: v for n, v in now.items() if n not in before or before[n] is not v}

    @contextmanager
    def replay(self, key: Hashable) -> Iterator[None]:
        """The same place, passed again in recomputation."""
        if key not in self._before:
            yield
            return
        live = vars(self.context).copy()
        found = {n: self._now(v) for n, v in _copy_containers(self._before[key]).items()}
        self._set(found)
        try:
            yield
            for name, old in self._wrote.get(key, {}).items():
                if hasattr(self.context, name):
                    self._instead[id(old)] = (old, getattr(self.context, name))
        finally:
            self._set(live)

    def _now(self, value: Any) -> Any:
        old, new = self._instead.get(id(value), (None, None))
        return new if old is value and old is not None else value

    def _set(self, values: dict[str, Any]) -> None:
        vars(self.context).clear()
        vars(self.context).update(values)


def _copy_containers(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.copy() if isinstance(v, (list, dict, set)) else v for n, v in values.items()}
