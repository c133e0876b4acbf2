"""`save_ctx`, the object that editing functions receive, and that users read outside of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_flex.errors import suggest_nearest
from megatron_flex.runtime.context.context_scopes import ContextScopes

OWN_NAMES = ("run", "keep", "kept")


class RunContext(Namespace):
    """Values that persist on this stage until they are deleted, or the model is restored."""

    def __init__(self, scopes: ContextScopes) -> None:
        object.__setattr__(self, "_scopes", scopes)

    def _all(self) -> dict[str, Any]:
        scopes: ContextScopes = object.__getattribute__(self, "_scopes")
        layer = scopes.call_run
        return {n: layer.get(n) for n in layer.names()} if layer else dict(scopes.run)

    def __getattr__(self, name: str) -> Any:
        scopes: ContextScopes = object.__getattribute__(self, "_scopes")
        layer = scopes.call_run
        if name in (layer or scopes.run):
            return layer.get(name) if layer else scopes.run[name]
        known = layer.names() if layer else list(scopes.run)
        raise AttributeError(f"save_ctx.run has no {name!r}; {_suggest_names(name, known)}")

    def __setattr__(self, name: str, value: Any) -> None:
        layer = self._scopes.call_run
        if layer is None:
            self._scopes.run[name] = value
        else:
            layer.set(name, value)

    def __delattr__(self, name: str) -> None:
        getattr(self, name)  # raises AttributeError without such a value
        layer = self._scopes.call_run
        if layer is None:
            del self._scopes.run[name]
        else:
            layer.remove(name)

    def __contains__(self, name: str) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    # typeshed declares an attribute, and this is a property
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """A copy of all names with their values, for `vars`."""
        return self._all()

    def __eq__(self, other: object) -> bool:
        return self is other

    # `Namespace` is not hashable, and typeshed types its `__hash__` as None
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RunContext({_format_values(self._all())})"


class Context(Namespace):
    """The values that editing functions share: those of a microbatch first, then those of the run.

    Inside an editing function, attributes belong to its microbatch, on any pipeline stage; they are deleted
    when the microbatch ends. `run` holds the values that persist on this stage. Outside of editing functions,
    attributes are the persistent values and the kept ones: for each name the last.
    """

    def __init__(self, scopes: ContextScopes) -> None:
        object.__setattr__(self, "_scopes", scopes)
        object.__setattr__(self, "_run", RunContext(scopes))

    @property
    def run(self) -> RunContext:
        """The values that persist on this stage."""
        found: RunContext = object.__getattribute__(self, "_run")
        return found

    @property
    def kept(self) -> dict[str, dict[int, Any]]:
        """The values kept on this rank, by name and microbatch."""
        scopes: ContextScopes = object.__getattribute__(self, "_scopes")
        return {name: dict(found) for name, found in scopes.kept.items()}

    def keep(self, *names: str) -> None:
        """Keep current values of this microbatch beyond its end; the next step's values replace them.

        Raises:
            AttributeError: this microbatch has no such value.
        """
        for name in names:
            if name not in (self._scopes.call_values or ()):
                raise AttributeError(self._missing(name))
            self._scopes.keep(name)

    def _names(self) -> list[str]:
        values = self._scopes.call_values
        own = list(self._scopes.kept) if values is None else values.names()
        return list(dict.fromkeys((*own, *self.run)))

    def _all(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names()}

    def _missing(self, name: str) -> str:
        scopes, known = self._scopes, self._names()
        if scopes.frame is None:
            hint = "a microbatch's values end with it: save_ctx.keep(name) or save_ctx.run keeps them"
            return (
                f"save_ctx has no {name!r} outside of editing functions; {_suggest_names(name, known)}; "
                f"{hint}"
            )
        key = scopes.frame.key
        when = f"microbatch {key.microbatch} of iteration {key.iteration}"
        return f"save_ctx has no {name!r} in {when}; {_suggest_names(name, known)}"

    def __getattr__(self, name: str) -> Any:
        scopes: ContextScopes = object.__getattribute__(self, "_scopes")
        values = scopes.call_values
        if values is not None and name in values:
            return values.get(name)
        if name in self.run:
            return getattr(self.run, name)
        if values is None and scopes.kept.get(name):
            return list(scopes.kept[name].values())[-1]
        raise AttributeError(self._missing(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_NAMES:
            raise AttributeError(f"save_ctx.{name} is its own; choose another name")
        values = self._scopes.call_values
        if values is None:
            setattr(self.run, name, value)
        else:
            values.set(name, value)

    def __delattr__(self, name: str) -> None:
        scopes, values = self._scopes, self._scopes.call_values
        if values is not None and name in values:
            values.remove(name)
        elif name in self.run:
            delattr(self.run, name)
        elif values is None and name in scopes.kept:
            del scopes.kept[name]
        else:
            raise AttributeError(self._missing(name))

    def __contains__(self, name: str) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names()]

    # typeshed declares an attribute, and this is a property
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """A copy of all names with their values, for `vars`."""
        return self._all()

    def __eq__(self, other: object) -> bool:
        return self is other

    # `Namespace` is not hashable, and typeshed types its `__hash__` as None
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Context({_format_values(self._all())})"


def _suggest_names(name: str, known: list[str]) -> str:
    return f"it has {', '.join(sorted(known)) or 'nothing'}{suggest_nearest(name, known)}"


def _format_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
