"""Objects flattened to a tree and its leaves, and rebuilt from both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flex.compat.traverse.nodes import InternalNode, LeafNode, node_of
from megatron_flex.errors import FlexError


def flatten(root_obj: Any) -> tuple[Any, list[Any]]:
    """Flatten an object.

    Args:
        root_obj: nested tuples, lists, mappings, named tuples, dataclasses and registered types.

    Returns:
        The tree, with types, shapes and other objects; and the leaves, usually tensors, depth first.
    """
    leaves: list[Any] = []

    def walk(obj: Any) -> Any:
        node = node_of(obj)
        if isinstance(node, LeafNode):
            leaves.append(obj)
        elif isinstance(node, InternalNode):
            node.children = [walk(child) for child in node.flatten(obj)]
        else:
            return obj
        return node

    return walk(root_obj), leaves


def unflatten(root_node: Any, leaves: Sequence[Any]) -> Any:
    """Rebuild an object.

    Args:
        root_node: the tree that `flatten` returned.
        leaves: as many as `flatten` returned, in the same order.

    Raises:
        FlexError: there are more leaves, or fewer.
    """
    left = list(reversed(leaves))

    def walk(node: Any) -> Any:
        if isinstance(node, LeafNode):
            if not left:
                raise FlexError(
                    f"{len(leaves)} leaves are too few for this tree; give all that flatten() gave"
                )
            return left.pop()
        if isinstance(node, InternalNode):
            return node.unflatten([walk(child) for child in node.children])
        return node

    made = walk(root_node)
    if left:
        raise FlexError(
            f"{len(leaves)} leaves are {len(left)} too many for this tree; give those of flatten()"
        )
    return made
