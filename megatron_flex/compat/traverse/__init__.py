"""Objects with tensors in them, taken apart and put together again."""

from megatron_flex.compat.traverse import nodes
from megatron_flex.compat.traverse.nodes import (
    InternalNode,
    LeafNode,
    register_internal_node_type,
    register_leaf_node_type,
)
from megatron_flex.compat.traverse.ops import flatten, unflatten

__all__ = [
    "InternalNode",
    "LeafNode",
    "flatten",
    "nodes",
    "register_internal_node_type",
    "register_leaf_node_type",
    "unflatten",
]
