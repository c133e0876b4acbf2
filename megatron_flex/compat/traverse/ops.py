"""Objects flattened to a tree and its leaves, and rebuilt from both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flex.adapters.tensor_trees import map_children
from megatron_flex.compat.traverse.nodes import LeafNode, leaf_types
from megatron_flex.errors import FlexError


def flatten(root_obj: Any) -> tuple[Any, list[Any]]:
    """Flatten nested tuples, lists, mappings, named tuples, dataclasses and registered types.

    Returns:
        The tree, which is the object with a LeafNode at the place of each leaf; and the leaves, usually
        tensors, depth first.
    """
    leaves: list[Any] = []

    def walk(obj: Any) -> Any:
        for kind, node in leaf_types.items():
            if isinstance(obj, kind):
                leaves.append(obj)
                return node(getattr(obj, "shape", None))
        return map_children(obj, walk)

    return walk(root_obj), leaves


def unflatten(root_node: Any, leaves: Sequence[Any]) -> Any:
    """Rebuild an object.

    Args:
        root_node: the tree that `flatten` returned.
        leaves: as many as `flatten` returned, in the same order.

    Raises:
        FlexError: there are more leaves, or fewer.
    """
    remaining = list(reversed(leaves))

    def walk(node: Any) -> Any:
        if not isinstance(node, LeafNode):
            return map_children(node, walk)
        if not remaining:
            raise FlexError(f"{len(leaves)} leaves are too few for this tree; give all that flatten() gave")
        return remaining.pop()

    rebuilt = walk(root_node)
    if remaining:
        raise FlexError(
            f"{len(leaves)} leaves are {len(remaining)} too many for this tree; give those of flatten()"
        )
    return rebuilt
