"""Nested objects with tensors, flattened and unflattened."""

from megatron_flex.compat.gone import refuse_gone
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

__getattr__ = refuse_gone(__name__)
