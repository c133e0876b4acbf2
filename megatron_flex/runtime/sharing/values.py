"""What editing functions share: nested values, who wrote them, and what one function sees of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

IMMUTABLE_TYPES = (Tensor, int, float, complex, str, bytes, type(None))


class ValueVersion(NamedTuple):
    """Who gave a name the value that it has, in one microbatch; the same in a replay.

    Attributes:
        place: the virtual stage.
        site: the site.
        call: which pass through it.
        hook: which of the hooks there.
        name: the name.
    """

    place: int
    site: str
    call: int
    hook: int
    name: str


TensorTicket = tuple[ValueVersion, int]  # one of the tensors in a value


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """A value of a microbatch.

    Attributes:
        value: nested dicts, lists and tuples of tensors and of whatever can be pickled.
        version: who wrote it.
        wants: for each tensor, in order, whether a gradient shall go back to where it was made.
        place: the virtual stage whose graph its tensors are part of; None if they have none here.
        led: whether the leader alone ran the function that wrote it.
        holders: the pipeline stages that have the value.
    """

    value: Any
    version: ValueVersion
    wants: tuple[bool, ...] = ()
    place: int | None = None
    led: bool = False
    holders: frozenset[int] = frozenset()


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of the dicts, lists and tuples in a value, with what `leaf` makes of all else."""
    if isinstance(value, dict):
        out = copy.copy(value)
        out.update({key: map_leaves(item, leaf) for key, item in value.items()})
        return out
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, leaf) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, leaf) for item in value)
    return leaf(value)


def list_leaves(value: Any) -> list[Any]:
    """What is in the dicts, lists and tuples of a value, in order."""
    found: list[Any] = []
    map_leaves(value, found.append)
    return found


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    return [item for item in list_leaves(value) if isinstance(item, Tensor)]


def bring_to_device(device: torch.device, bring: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What brings a value, with its tensors on a device; one that is there already is not touched."""

    def to(item: Any) -> Any:
        return item.to(device) if isinstance(item, Tensor) and item.device != device else item

    def brought(value: Any) -> Any:
        found = bring(value)
        return found if all(t.device == device for t in list_tensors(found)) else map_leaves(found, to)

    return brought


def detach_value(value: Any) -> Any:
    """The value with tensors that have no graph."""
    return map_leaves(value, lambda item: item.detach() if isinstance(item, Tensor) else item)


def _fingerprint(value: Any) -> Any:
    """A value in a form that is equal for values of the same containers with the same things in them."""
    if isinstance(value, dict):
        return type(value), [(key, _fingerprint(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_fingerprint(item) for item in value]
    return id(value)


@dataclass(slots=True)
class CallNamespace:
    """What one call of an editing function sees and writes of one set of names.

    Attributes:
        base: the names as they were when it was called.
        bring: makes of what is in `base` what the function gets; called once for each name.
    """

    base: Mapping[str, Any]
    bring: Callable[[Any], Any]
    view: dict[str, Any] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    _read: dict[str, tuple[Any, list[Tensor], list[int]]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.view or (name in self.base and name not in self.removed)

    def names(self) -> list[str]:
        """The names that are there."""
        return [n for n in dict.fromkeys((*self.base, *self.view)) if n in self]

    def get(self, name: str) -> Any:
        """The value of a name that is there."""
        if name not in self.view:
            value = self.view[name] = self.bring(self.base[name])
            found = list_tensors(value)
            self._read[name] = _fingerprint(value), found, [t._version for t in found]
        return self.view[name]

    def set(self, name: str, value: Any) -> None:
        """Give a name a value."""
        self.view[name] = value
        self.written.add(name)
        self.removed.discard(name)

    def remove(self, name: str) -> None:
        """Take a name that is there away."""
        self.view.pop(name, None)
        self.written.discard(name)
        self.removed.add(name)

    def changed_in_place(self) -> list[str]:
        """The names that were read and whose tensors are no longer what they were."""
        return [n for n, (_, found, counts) in self._read.items() if [t._version for t in found] != counts]

    def touched(self) -> dict[str, Any]:
        """What was written, and what was read and may have been changed in place."""
        changed = {*self.written, *self.changed_in_place()}
        for name, (shape, *_) in self._read.items():
            value = self.view.get(name)
            if _fingerprint(value) != shape or not all(isinstance(item, IMMUTABLE_TYPES) for item in list_leaves(value)):
                changed.add(name)
        return {n: self.view[n] for n in self.view if n in changed}
