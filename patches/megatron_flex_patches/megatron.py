"""Hook points for Megatron's parallel layers: `megatron/core/tensor_parallel/layers.py`, 0.12 to 0.19."""

from __future__ import annotations

import libcst as cst

from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.lines import Insertion
from megatron_flex_patches.points import declare, importing, output, point
from megatron_flex_patches.tree import Call, Tree, calls, in_a_line

COLUMN, ROW, EMBEDDING = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
GEMM = "self._forward_impl"
COPY, GATHER = "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region"
REDUCTIONS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")
OF_INFERENCE = "inference_reduce_scatter_to_sequence_parallel_region"


def insertions(tree: Tree) -> list[Insertion]:
    """The lines to insert.

    Raises:
        PatchError: an anchor is not there; the message names it.
    """
    return [importing(tree), *_column(tree), *_row(tree), *_embedding(tree)]


def _gemm(tree: Tree, forward: cst.FunctionDef, where: str) -> Call:
    found = calls(tree, forward, where, GEMM)
    if len(found) != 1:
        raise PatchError(f"has {len(found)} calls of {GEMM} in {where}, and the patch needs one")
    return found[0]


def _column(tree: Tree) -> list[Insertion]:
    """Before the GEMM the full input, after it the local shard of the output, and the return value.

    The GEMM gathers its input over the sequence, or reduces its gradient, internally. With a hook
    the same is done outside, with the functions and groups of the file, and disabled in the GEMM.
    """
    where = f"{COLUMN}.forward"
    forward = tree.method(tree.class_of(COLUMN), "forward")
    gemm = _gemm(tree, forward, where)
    copy = calls(tree, forward, where, COPY)[0]
    if not tree.binds(GATHER):
        raise PatchError(f"does not import {GATHER}, which {where} needs before its GEMM")
    whole = gemm.name("input")
    cut, summed = (in_a_line(gemm.value(k)) for k in ("sequence_parallel", "allreduce_dgrad"))
    group, deeper = copy.rest(), tree.module.default_indent
    before = tree.before(
        gemm.statement,
        "flex_module = self",
        'if self.flex_points.stands("gemm_input"):',
        f"{deeper}if ({cut}):",
        f"{deeper * 2}{whole} = {GATHER}({whole}{group})",
        f"{deeper}elif ({summed}):",
        f"{deeper * 2}{whole} = {COPY}({whole}{group})",
        f"{deeper}{point('gemm_input', whole)}",
        f"{deeper}self = _flex.Alone(self)",
    )
    behind = tree.behind(gemm.statement, "self = flex_module", point("local", gemm.target))
    told = "runtime_gather_output"
    said = told if any(p.name.value == told for p in forward.params.params) else ""
    return [
        declare(tree, forward, "gemm_input", "local", "output"),
        before,
        behind,
        *output(tree, forward, where, said),
    ]


def _row(tree: Tree) -> list[Insertion]:
    """Before the GEMM the local shard of the input, after it a partial sum, and the return value."""
    where = f"{ROW}.forward"
    forward = tree.method(tree.class_of(ROW), "forward")
    gemm = _gemm(tree, forward, where)
    calls(tree, forward, where, *REDUCTIONS)  # otherwise the output of the GEMM would not be partial
    return [
        declare(tree, forward, "gemm_input", "partial", "output"),
        tree.before(gemm.statement, point("gemm_input", gemm.name("input"))),
        tree.behind(gemm.statement, point("partial", gemm.target)),
        *output(tree, forward, where),
    ]


def _embedding(tree: Tree) -> list[Insertion]:
    """Before each reduction, the rank's partial sum; and the return value."""
    where = f"{EMBEDDING}.forward"
    forward = tree.method(tree.class_of(EMBEDDING), "forward")
    reductions = calls(tree, forward, where, *REDUCTIONS, OF_INFERENCE)
    return [
        declare(tree, forward, "partial", "output"),
        *(tree.before(c.statement, point("partial", c.name(""))) for c in reductions),
        *output(tree, forward, where),
    ]
