"""Tensors in the inputs and outputs of modules: nested tuples, lists, mappings and dataclasses.

Tensors are counted depth first, in the order of the mapping's keys and the dataclass's fields. Other values
(None, numbers, other objects) are not counted and remain unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

TreeContents = tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]
_registered_types: dict[type, Callable[[Any], TreeContents]] = {}


def register_type(kind: type, opened: Callable[[Any], TreeContents]) -> None:
    """Also find tensors in objects of exactly this type (subclasses excluded).

    Args:
        kind: the type.
        opened: from an object to its contents, and a function that builds an object with other contents.
    """
    _registered_types[kind] = opened


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, depth first."""
    if isinstance(tree, Tensor):
        return [tree]
    return [t for _, child in _children(tree) for t in tensors(child)]


def resolve_index(index: int, count: int) -> int | None:
    """A non-negative index among `count` tensors; None if the index is out of range."""
    return index % count if -count <= index < count else None


def with_tensor(tree: Any, position: int, new: Tensor) -> Any:
    """A tree of the same types with one tensor replaced; the given tree is not modified.

    Args:
        tree: the tree that contains the tensor.
        position: its index in `tensors(tree)`.
        new: the replacement.
    """
    if isinstance(tree, Tensor):
        return new
    for key, child in _children(tree):
        count = len(tensors(child))
        if position < count:
            return _with_child(tree, key, with_tensor(child, position, new))
        position -= count
    raise IndexError(f"a {type(tree).__name__} has no tensor {position} more")


def map_children(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same type with the results of `function` for its contents; anything else unchanged.

    The given container is not modified.
    """
    for key, child in list(_children(tree)):
        replacement = function(child)
        if replacement is not child:
            tree = _with_child(tree, key, replacement)
    return tree


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    if type(tree) in _registered_types:
        yield from enumerate(_registered_types[type(tree)](tree)[0])
    elif isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, (tuple, list)):
        yield from enumerate(tree)
    elif _is_dataclass_object(tree):
        yield from ((f.name, getattr(tree, f.name)) for f in fields(tree) if hasattr(tree, f.name))


def _with_child(tree: Any, key: Any, child: Any) -> Any:
    if type(tree) in _registered_types:
        children, make = _registered_types[type(tree)](tree)
        return make([child if i == key else item for i, item in enumerate(children)])
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)({**tree, key: child})  # type: ignore[call-arg]
    if isinstance(tree, (MutableMapping, list)):
        out: Any = copy.copy(tree)
        out[key] = child
        return out
    if hasattr(tree, "_replace"):  # a NamedTuple
        return tree._replace(**{tree._fields[key]: child})
    if isinstance(tree, tuple):
        items = [child if i == key else item for i, item in enumerate(tree)]
        return type(tree)(items)
    out = copy.copy(tree)
    object.__setattr__(out, key, child)  # the only way to set a field of a frozen dataclass
    return out


def _is_dataclass_object(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)
