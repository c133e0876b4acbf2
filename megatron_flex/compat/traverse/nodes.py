"""The types of objects that `flatten` and hooks find tensors in, and those that are leaves of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from megatron_flex.adapters import tensor_trees
from megatron_flex.compat.gone import refuse_gone


class InternalNode:
    """How a container is flattened and rebuilt. Subclasses define both."""

    def __init__(self, children: Iterable[Any] | None = None) -> None:
        self.children = list(children or ())

    def flatten(self, instance: Any) -> tuple[Any, ...]:
        """The contents of an instance."""
        raise NotImplementedError(f"{type(self).__name__} must implement flatten(instance)")

    def unflatten(self, children: Iterable[Any]) -> Any:
        """Build an instance from its contents."""
        raise NotImplementedError(f"{type(self).__name__} must implement unflatten(children)")


class LeafNode:
    """The place of a leaf in a tree.

    Attributes:
        val: a property of the leaf: a tensor's shape.
    """

    def __init__(self, val: Any = None) -> None:
        self.val = val

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafNode) and (type(self), self.val) == (type(other), other.val)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.val})"


Internal = TypeVar("Internal", bound=type[InternalNode])
Leaf = TypeVar("Leaf", bound=type[LeafNode])
leaf_types: dict[type, type[LeafNode]] = {Tensor: LeafNode}


def register_internal_node_type(kind: type) -> Callable[[Internal], Internal]:
    """A decorator: this InternalNode is for objects of exactly that type. Hooks find their tensors, too."""

    def register(node: Internal) -> Internal:
        tensor_trees.register_type(kind, partial(_open, node))
        return node

    return register


def register_leaf_node_type(kind: type) -> Callable[[Leaf], Leaf]:
    """A decorator: this LeafNode is for objects of that type, or of a derived type."""

    def register(node: Leaf) -> Leaf:
        leaf_types[kind] = node
        return node

    return register


def _open(node_type: type[InternalNode], instance: Any) -> tensor_trees.TreeContents:
    node = node_type()
    return node.flatten(instance), node.unflatten


class BaseModelOutputWithPastNode(InternalNode):
    """The fields of a `BaseModelOutputWithPast` of Transformers."""

    def flatten(self, instance: Any) -> tuple[Any, ...]:
        """The values of the fields, in their order."""
        self._kind = type(instance)
        return tuple(getattr(instance, field.name) for field in fields(instance))

    def unflatten(self, children: Iterable[Any]) -> Any:
        """An instance with these values."""
        return self._kind(*children)


__getattr__ = refuse_gone(__name__)
