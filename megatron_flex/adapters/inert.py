"""Hooks of torch that a copy of their module does not have.

A module is copied and pickled with its hooks. Those of a session belong to the module that it was attached
to: in a copy, and in what is loaded from a pickle, a function that does nothing takes their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_flex.adapters.base import Undo


def nothing(*_: Any, **__: Any) -> None:
    """What a copied module calls in place of a hook."""


class _Hook:
    """A hook that is copied and pickled as `nothing`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, ()


def _found() -> Callable[..., None]:
    return nothing


def before(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Undo:
    """Register a hook before a module's forward.

    Args:
        module: the module.
        hook: what `register_forward_pre_hook` takes.
        options: of that.
    """
    return module.register_forward_pre_hook(_Hook(hook), **options).remove


def behind(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Undo:
    """Register a hook behind a module's forward.

    Args:
        module: the module.
        hook: what `register_forward_hook` takes.
        options: of that.
    """
    return module.register_forward_hook(_Hook(hook), **options).remove
