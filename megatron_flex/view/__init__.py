"""View: the model as a tree of places where hooks can be, in words, for a terminal or a program."""

from megatron_flex.view.tree import TreeHook, TreeNode, TreePoint, sites_of_stage, fold_layers, build_tree
from megatron_flex.view.words import describe_layout, describe_numbers, describe_shape

__all__ = [
    "TreeHook",
    "TreeNode",
    "TreePoint",
    "sites_of_stage",
    "fold_layers",
    "describe_layout",
    "describe_numbers",
    "describe_shape",
    "build_tree",
]
