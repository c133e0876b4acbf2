"""Hook points for fairscale's parallel layers: `fairscale/nn/model_parallel/layers.py`, 0.4.13."""

from __future__ import annotations

from megatron_flex_patches.lines import Insertion
from megatron_flex_patches.points import declare, importing, output, point
from megatron_flex_patches.tree import Tree, calls

GATHER, REDUCE = "gather_from_model_parallel_region", "reduce_from_model_parallel_region"
LINEAR = "F.linear"
# By class: its points, and the variables at the points before the multiplication and before a collective.
CLASSES = {
    "ColumnParallelLinear": (LINEAR, "local", GATHER),
    "RowParallelLinear": (LINEAR, "partial", REDUCE),
    "ParallelEmbedding": ("", "local", GATHER),
    "VocabParallelEmbedding": ("", "partial", REDUCE),
}


def insertions(tree: Tree) -> list[Insertion]:
    """The lines to insert.

    Raises:
        PatchError: an anchor is not there; the message names it.
    """
    out = [importing(tree)]
    for name, (gemm, part, collective) in CLASSES.items():
        where = f"{name}.forward"
        forward = tree.method(tree.class_of(name), "forward")
        names = ["gemm_input"] if gemm else []
        out.append(declare(tree, forward, *names, part, "output"))
        into = [(c, "gemm_input") for c in calls(tree, forward, where, gemm)] if gemm else []
        into += [(c, part) for c in calls(tree, forward, where, collective)]
        out += [tree.before(c.statement, point(at, c.name(""))) for c, at in into]
        out += output(tree, forward, where)
    return out
