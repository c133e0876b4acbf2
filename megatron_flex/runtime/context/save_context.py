"""`save_ctx`, the object that editing functions receive, and that users read outside of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, MutableMapping
from typing import Any

from megatron_flex.errors import suggest_nearest
from megatron_flex.runtime.context.context_scopes import ContextScopes

OWN_NAMES = ("run", "keep", "kept")


class _SharedNamespace(Namespace, ABC):
    """Attributes that are the values of mappings: read from the first that has the name, set in the first.

    Args:
        scopes: where the values are.
    """

    def __init__(self, scopes: ContextScopes) -> None:
        object.__setattr__(self, "_scopes", scopes)

    @abstractmethod
    def _mappings(self) -> list[MutableMapping[str, Any]]:
        """The mappings, in the order in which they are read."""

    @abstractmethod
    def _missing(self, name: str) -> str:
        """The message of the AttributeError for a name without a value."""

    def __getattr__(self, name: str) -> Any:
        object.__getattribute__(self, "_scopes")  # a copy made without it would recurse endlessly
        for values in self._mappings():
            if name in values:
                return values[name]
        raise AttributeError(self._missing(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._mappings()[0][name] = value

    def __delattr__(self, name: str) -> None:
        for values in self._mappings():
            if name in values:
                del values[name]
                return
        raise AttributeError(self._missing(name))

    def __contains__(self, name: str) -> bool:  # inherited, it would read the values
        return any(name in values for values in self._mappings())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for values in self._mappings() for name in values))

    # typeshed declares an attribute, and this is a property
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """A copy of all names with their values, for `vars`."""
        return {name: getattr(self, name) for name in self}

    def __eq__(self, other: object) -> bool:
        return self is other

    # `Namespace` is not hashable, and typeshed types its `__hash__` as None
    __hash__ = object.__hash__  # type: ignore[assignment]


class RunContext(_SharedNamespace):
    """Values that persist on this stage until they are deleted, or the model is restored."""

    def _mappings(self) -> list[MutableMapping[str, Any]]:
        frame = self._scopes.frame
        return [self._scopes.run if frame is None else frame.run]

    def _missing(self, name: str) -> str:
        return f"save_ctx.run has no {name!r}; {_suggest_names(name, list(self))}"


class Context(_SharedNamespace):
    """The values that editing functions share: those of a microbatch first, then those of the run.

    Inside an editing function, attributes belong to its microbatch, on any pipeline stage; they are deleted
    when the microbatch ends. `run` holds the values that persist on this stage. Outside of editing functions,
    attributes are the persistent values and the kept ones: for each name the last.
    """

    def __init__(self, scopes: ContextScopes) -> None:
        super().__init__(scopes)
        object.__setattr__(self, "_run", RunContext(scopes))

    def _mappings(self) -> list[MutableMapping[str, Any]]:
        scopes = self._scopes
        if scopes.frame is not None:
            return [scopes.frame.values, scopes.frame.run]
        return [scopes.run, {name: list(values.values())[-1] for name, values in scopes.kept.items()}]

    @property
    def run(self) -> RunContext:
        """The values that persist on this stage."""
        run: RunContext = object.__getattribute__(self, "_run")
        return run

    @property
    def kept(self) -> dict[str, dict[int, Any]]:
        """The values kept on this rank, by name and microbatch."""
        return {name: dict(kept) for name, kept in self._scopes.kept.items()}

    def keep(self, *names: str) -> None:
        """Keep current values of this microbatch beyond its end; the next step's values replace them.

        Raises:
            AttributeError: this microbatch has no such value.
        """
        frame = self._scopes.frame
        for name in names:
            if frame is None or name not in frame.values:
                raise AttributeError(self._missing(name))
            self._scopes.keep(name)

    def _missing(self, name: str) -> str:
        suggestion, frame = _suggest_names(name, list(self)), self._scopes.frame
        if frame is None:
            hint = "a microbatch's values end with it: save_ctx.keep(name) or save_ctx.run keeps them"
            return f"save_ctx has no {name!r} outside of editing functions; {suggestion}; {hint}"
        when = f"microbatch {frame.key.microbatch} of iteration {frame.key.iteration}"
        return f"save_ctx has no {name!r} in {when}; {suggestion}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_NAMES:
            raise AttributeError(f"save_ctx.{name} is its own; choose another name")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        is_kept = self._scopes.frame is None and name not in self._scopes.run
        super().__delattr__(name)
        if is_kept:
            del self._scopes.kept[name]


def _suggest_names(name: str, known: list[str]) -> str:
    return f"it has {', '.join(sorted(known)) or 'nothing'}{suggest_nearest(name, known)}"
