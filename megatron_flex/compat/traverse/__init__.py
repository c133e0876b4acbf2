"""Nested objects with tensors, flattened and unflattened."""

from megatron_flex.compat.traverse import nodes
from megatron_flex.compat.traverse.nodes import (
    InternalNode,
    InternalObject,
    LeafNode,
    LeafObject,
    ScalarNode,
    ScalarObject,
    register_internal_node_type,
    register_leaf_node_type,
)
from megatron_flex.compat.traverse.ops import flatten, unflatten

__all__ = [
    "InternalNode",
    "InternalObject",
    "LeafNode",
    "LeafObject",
    "ScalarNode",
    "ScalarObject",
    "flatten",
    "nodes",
    "register_internal_node_type",
    "register_leaf_node_type",
    "unflatten",
]
