"""The values that editing functions share: nested values with their versions, the values of a microbatch, and
the view of one call.

A tensor that is read in another graph is read detached; an anchor propagates the gradient back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import HookFunction

IMMUTABLE_TYPES = (Tensor, int, float, complex, str, bytes, type(None))


class ValueVersion(NamedTuple):
    """Identifies the write of a value in one microbatch; the same in a replay.

    Attributes:
        virtual_stage: the virtual stage.
        site: the site.
        call: the pass through the site.
        hook: the index of the hook at the site.
        name: the name.
    """

    virtual_stage: int
    site: str
    call: int
    hook: int
    name: str


TensorId = tuple[ValueVersion, int]  # index of a tensor in a value


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """A value of a microbatch.

    Attributes:
        value: nested dicts, lists and tuples of tensors and picklable objects.
        version: the write that made the value.
        wants: for each tensor, in order, whether a gradient is propagated back to its origin.
        virtual_stage: the virtual stage whose graph contains the tensors; None if no graph of this rank does.
        once: whether only one rank ran the function that wrote the value.
    """

    value: Any
    version: ValueVersion
    wants: tuple[bool, ...] = ()
    virtual_stage: int | None = None
    once: bool = False


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy the dicts, lists and tuples in a value, and apply `leaf` to everything else."""
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
    """The contents of the dicts, lists and tuples of a value, in order."""
    leaves: list[Any] = []
    map_leaves(value, leaves.append)
    return leaves


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    return [item for item in list_leaves(value) if isinstance(item, Tensor)]


def bring_to_device(device: torch.device, bring: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `bring` followed by a move of its tensors to a device; tensors already there are not copied."""

    def to(item: Any) -> Any:
        return item.to(device) if isinstance(item, Tensor) and item.device != device else item

    def brought(value: Any) -> Any:
        brought_value = bring(value)
        return (
            brought_value
            if all(t.device == device for t in list_tensors(brought_value))
            else map_leaves(brought_value, to)
        )

    return brought


def detach_value(value: Any) -> Any:
    return map_leaves(value, lambda item: item.detach() if isinstance(item, Tensor) else item)


def _fingerprint(value: Any) -> Any:
    """A form of the value that is equal for equal containers with the same objects."""
    if isinstance(value, dict):
        return type(value), [(key, _fingerprint(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_fingerprint(item) for item in value]
    return id(value)


@dataclass(slots=True, eq=False)
class CallNamespace(MutableMapping[str, Any]):
    """The names that one call of an editing function reads and writes.

    Attributes:
        base: the names and values at the beginning of the call.
        bring: converts a value of `base` for the function; called once for each name.
    """

    base: Mapping[str, Any]
    bring: Callable[[Any], Any]
    view: dict[str, Any] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    _read: dict[str, tuple[Any, list[Tensor], list[int]]] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.view or (name in self.base and name not in self.removed)

    def __iter__(self) -> Iterator[str]:
        return (name for name in dict.fromkeys((*self.base, *self.view)) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name not in self.view:
            value = self.view[name] = self.bring(self.base[name])
            tensors = list_tensors(value)
            self._read[name] = _fingerprint(value), tensors, [t._version for t in tensors]
        return self.view[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.view[name] = value
        self.written.add(name)
        self.removed.discard(name)

    def __delitem__(self, name: str) -> None:
        self.view.pop(name, None)
        self.written.discard(name)
        self.removed.add(name)

    def changed_in_place(self) -> list[str]:
        """The names that were read and whose tensors have changed in place."""
        return [n for n, (_, read, counts) in self._read.items() if [t._version for t in read] != counts]

    def touched(self) -> dict[str, Any]:
        """The values that were written, and those that were read and may have changed in place."""
        changed = {*self.written, *self.changed_in_place()}
        for name, (shape, *_) in self._read.items():
            value = self.view.get(name)
            if _fingerprint(value) != shape or not all(
                isinstance(item, IMMUTABLE_TYPES) for item in list_leaves(value)
            ):
                changed.add(name)
        return {n: self.view[n] for n in self.view if n in changed}


@dataclass(slots=True)
class MicrobatchValues:
    """The values of a microbatch on this rank.

    Attributes:
        training: whether its forward pass began with gradients enabled.
        state: the current values, by name.
        gradients: of tensors that other graphs have read, summed over the readers.
        snapshots: values, of the microbatch and of the run, before a call in a first pass.
    """

    training: bool = True
    state: dict[str, ContextEntry] = field(default_factory=dict)
    gradients: dict[TensorId, Tensor] = field(default_factory=dict)
    snapshots: dict[tuple[str, int, int], tuple[dict[str, ContextEntry], dict[str, Any]]] = field(
        default_factory=dict
    )

    def clear(self) -> None:
        """Release everything."""
        self.state, self.gradients, self.snapshots = {}, {}, {}

    def add_gradient(self, tensor_id: TensorId, grad: Tensor) -> None:
        """Add the gradient of one reader of a tensor."""
        known = self.gradients.get(tensor_id)
        self.gradients[tensor_id] = grad if known is None else known + grad


class DetachedRead(torch.autograd.Function):
    """Detaches a tensor and passes its gradient to a function.

    Apply to a token that requires a gradient, the tensor in a list, and the function.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, read: list[Tensor], add_gradient: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.add_gradient = add_gradient
        return read[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.add_gradient(grad)
        return None, None, None


class GradientAnchor(torch.autograd.Function):
    """Returns its tensor; the backward pass also propagates gradients to other tensors saved before it.

    Apply to the tensor, a function that returns a gradient or None for each other tensor, and these tensors.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, take: Callable[[], list[Tensor | None]], *saved: Tensor) -> Tensor:
        ctx.take = take
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.take()


class CallMode(Enum):
    """The kind of pass that a call of an editing function belongs to."""

    PLAIN = auto()  # a differentiated forward pass
    FIRST = auto()  # the first pass of a region with activation recomputation
    REPLAY = auto()  # its recomputation
    NO_GRAPH = auto()  # no graph: evaluation, and hooks on gradients


@dataclass(slots=True)
class CallFrame:
    """One call of an editing function."""

    hook: HookFunction
    index: int
    key: Key
    mode: CallMode
    micro: MicrobatchValues
    values: CallNamespace
    run: CallNamespace


@dataclass(slots=True)
class Changes:
    """What one call changes in the values of the microbatch, or of the run."""

    written: dict[str, Any] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def apply(self, values: dict[str, Any]) -> None:
        for name in self.removed:
            values.pop(name, None)
        values.update(self.written)
