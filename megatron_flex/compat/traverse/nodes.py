"""Objects as trees of nodes: containers and leaves; other objects are kept unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from megatron_flex.adapters import tensor_trees
from megatron_flex.errors import FlexError

# What an object or a node of a tree may be, for annotations: a container, a leaf, anything else.
InternalObject = LeafObject = ScalarObject = ScalarNode = Any


class InternalNode:
    """A container. Subclasses define how it is flattened and rebuilt.

    Attributes:
        children: the nodes of its content; other objects are stored directly.
    """

    def __init__(self, children: Iterable[Any] | None = None) -> None:
        self.children = list(children or ())

    def flatten(self, instance: Any) -> tuple[Any, ...]:
        """The content of an instance."""
        raise NotImplementedError(f"{type(self).__name__} must implement flatten(instance)")

    def unflatten(self, children: Iterable[Any]) -> Any:
        """Build an instance from its content."""
        raise NotImplementedError(f"{type(self).__name__} must implement unflatten(children)")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.children})"


class LeafNode:
    """A leaf, usually a tensor.

    Attributes:
        val: a stored property of it: a tensor's shape.
    """

    def __init__(self, val: Any = None) -> None:
        self.val = val

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.val == getattr(other, "val", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.val})"


Internal = TypeVar("Internal", bound=type[InternalNode])
Leaf = TypeVar("Leaf", bound=type[LeafNode])
_internal_types: dict[type, type[InternalNode]] = {}
_leaf_types: dict[type, type[LeafNode]] = {}


def register_internal_node_type(kind: type) -> Callable[[Internal], Internal]:
    """A decorator: this InternalNode is for objects of exactly that type, for hooks, too.

    Args:
        kind: the type.
    """

    def register(node: Internal) -> Internal:
        _internal_types[kind] = node
        if kind not in (tuple, list):  # hooks handle these anyway
            tensor_trees.register_type(kind, partial(_open_node, node))
        return node

    return register


def register_leaf_node_type(kind: type) -> Callable[[Leaf], Leaf]:
    """A decorator: this LeafNode is for objects of that type, or of a derived type.

    Args:
        kind: the type.
    """

    def register(node: Leaf) -> Leaf:
        _leaf_types[kind] = node
        return node

    return register


def _open_node(node: type[InternalNode], obj: Any) -> tensor_trees.TreeContents:
    made = node()
    return made.flatten(obj), made.unflatten


@register_leaf_node_type(Tensor)
class TensorNode(LeafNode):
    """A tensor."""


@register_internal_node_type(tuple)
class TupleNode(InternalNode):
    """A tuple."""

    def flatten(self, instance: tuple[Any, ...]) -> tuple[Any, ...]:
        """Its items."""
        return instance

    def unflatten(self, children: Iterable[Any]) -> tuple[Any, ...]:
        """A tuple of them."""
        return tuple(children)


@register_internal_node_type(list)
class ListNode(InternalNode):
    """A list."""

    def flatten(self, instance: list[Any]) -> tuple[Any, ...]:
        """Its items."""
        return tuple(instance)

    def unflatten(self, children: Iterable[Any]) -> list[Any]:
        """A list of them."""
        return list(children)


class RecordNode(InternalNode):
    """A mapping, a named tuple or a dataclass of any type.

    Attributes:
        kind: its type.
        keys: those of the mapping, or the names of its fields.
    """

    def __init__(self, children: Iterable[Any] | None = None) -> None:
        super().__init__(children)
        self.kind: type = dict
        self.keys: tuple[Any, ...] = ()
        self._shell: list[Any] = []

    def flatten(self, instance: Any) -> tuple[Any, ...]:
        """Its values, in its own order."""
        self.kind = type(instance)
        if isinstance(instance, Mapping):
            self.keys = tuple(instance)
            self._shell = [_copy_without_values(instance)]
            return tuple(instance.values())
        names = getattr(instance, "_fields", None) or [f.name for f in fields(instance)]
        self.keys = tuple(n for n in names if hasattr(instance, n))
        self._shell = [] if isinstance(instance, tuple) else [_copy_without_values(instance)]
        return tuple(getattr(instance, n) for n in self.keys)

    def unflatten(self, children: Iterable[Any]) -> Any:
        """One of the same type with these values."""
        if not self._shell:
            return self.kind(*children)
        made = copy.copy(self._shell[0])
        for key, value in zip(self.keys, children, strict=True):
            if isinstance(made, Mapping):
                made[key] = value  # type: ignore[index]
            else:
                object.__setattr__(made, key, value)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordNode) and (self.kind, self.keys, self.children) == (
            other.kind,
            other.keys,
            other.children,
        )


class BaseModelOutputWithPastNode(RecordNode):
    """A `BaseModelOutputWithPast` of Transformers, by its fields; any other dataclass is handled alike."""


def _copy_without_values(instance: Any) -> Any:
    """A copy without references to tensors."""
    shell = copy.copy(instance)
    if isinstance(instance, Mapping):
        for key in instance:
            shell[key] = None
    else:
        for field in fields(instance):
            object.__setattr__(shell, field.name, None)
    return shell


def node_of(obj: Any) -> InternalNode | LeafNode | None:
    """A new node for an object; None if it is neither a leaf nor a container."""
    exact = _internal_types.get(type(obj))
    if exact is not None:
        return exact()
    for kind, leaf in _leaf_types.items():
        if isinstance(obj, kind):
            return leaf(getattr(obj, "shape", None))
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return RecordNode()
    if isinstance(obj, dict) or (is_dataclass(obj) and not isinstance(obj, type)):
        return RecordNode()
    return None


def get_internal_node(internal_obj: Any) -> type[InternalNode]:
    """The node class for a container.

    Raises:
        FlexError: the object is not a container.
    """
    node = node_of(internal_obj)
    if not isinstance(node, InternalNode):
        raise FlexError(
            f"{type(internal_obj).__name__} is not a container; register_internal_node_type makes a type one"
        )
    return type(node)


def get_leaf_node(leaf_obj: Any) -> type[LeafNode]:
    """The node class for a leaf.

    Raises:
        FlexError: the object is not a leaf.
    """
    node = node_of(leaf_obj)
    if not isinstance(node, LeafNode):
        raise FlexError(f"{type(leaf_obj).__name__} is not a leaf; register_leaf_node_type makes a type one")
    return type(node)


def is_leaf_obj(obj: Any) -> bool:
    """Whether an object is a leaf, such as a tensor."""
    return isinstance(node_of(obj), LeafNode)


def is_internal_obj(obj: Any) -> bool:
    """Whether an object is a container."""
    return isinstance(node_of(obj), InternalNode)


def is_leaf_node(node: Any) -> bool:
    """Whether a node of a tree is a leaf."""
    return isinstance(node, LeafNode)


def is_internal_node(node: Any) -> bool:
    """Whether a node of a tree is a container."""
    return isinstance(node, InternalNode)
