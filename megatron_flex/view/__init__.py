"""View: the model as a tree of hook points, as text, for a terminal or a program."""

from megatron_flex.view.model_tree import (
    TreeHook,
    TreeNode,
    TreePoint,
    build_tree,
    describe_layout,
    describe_numbers,
    describe_shape,
    fold_layers,
    sites_of_stage,
)

__all__ = [
    "TreeHook",
    "TreeNode",
    "TreePoint",
    "build_tree",
    "describe_layout",
    "describe_numbers",
    "describe_shape",
    "fold_layers",
    "sites_of_stage",
]
