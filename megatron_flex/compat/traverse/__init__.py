"""Nested objects with tensors, flattened and unflattened."""

from megatron_flex.compat.traverse import nodes
from megatron_flex.compat.traverse.nodes import (
    InternalNode,
    LeafNode,
    flatten,
    register_internal_node_type,
    register_leaf_node_type,
    unflatten,
)

__all__ = [
    "InternalNode",
    "LeafNode",
    "flatten",
    "nodes",
    "register_internal_node_type",
    "register_leaf_node_type",
    "unflatten",
]
