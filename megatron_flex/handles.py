"""The handle that a registration returns; like torch's handle, it removes what was registered."""

from __future__ import annotations

from collections.abc import Callable


class Handle:
    """Removes a registration, once; also at the end of a `with` block.

    Args:
        remove: called by the first `remove()`.
        name: describes what was registered.
        is_there: returns whether the registration still exists; if not, `remove()` does nothing.

    Examples:
        >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.3"))
        >>> handle
        <Handle of <HookFunction forward on decoder.layers.3>>
        >>> handle.remove()
        >>> handle
        <Handle of <HookFunction forward on decoder.layers.3>, removed>
    """

    def __init__(
        self, remove: Callable[[], object], name: str, is_there: Callable[[], bool] = lambda: True
    ) -> None:
        self._remove: Callable[[], object] | None = remove
        self._name, self._is_there = name, is_there

    def remove(self) -> None:
        """Remove the registration; a second call does nothing. Every rank that registered calls it.

        Examples:
            >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.3"))
            >>> handle.remove()
            >>> handle.remove()  # does nothing
        """
        remove, self._remove = self._remove, None
        if remove is not None and self._is_there():
            remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Handle of {self._name}{'' if self._remove else ', removed'}>"
