"""View: the model as a tree of places where hooks can be, in words, for a terminal or a program."""

from megatron_flex.view.tree import Hooked, Node, Place, chosen, folded, tree
from megatron_flex.view.words import layout_in_words, numbers_in_words, shape_in_words

__all__ = [
    "Hooked",
    "Node",
    "Place",
    "chosen",
    "folded",
    "layout_in_words",
    "numbers_in_words",
    "shape_in_words",
    "tree",
]
