"""Flags of megatron_flex for scripts that call Megatron's `pretrain`: a line before they parse arguments."""

from __future__ import annotations

import libcst as cst

from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.lines import Insertion
from megatron_flex_patches.tree import Tree, code_of, in_a_line

PRETRAIN = "pretrain"
MAIN, SWAPPED = "__name__ == '__main__'", "'__main__' == __name__"
PARSING = ("parse_and_validate_args", "parse_args", "initialize_megatron", PRETRAIN)
# Where megatron_flex is not installed the script runs as it was, and its parser refuses our flags.
LINES = (
    "from importlib.util import find_spec as _find_spec",
    'if _find_spec("megatron_flex") is not None:',
    "    import megatron_flex.launch",
    "    megatron_flex.launch.install()",
)


def is_call(node: cst.Call, *names: str) -> bool:
    """Whether a call is of one of some functions, by any path."""
    return code_of(node.func).rpartition(".")[2] in names


def insertions(tree: Tree) -> list[Insertion]:
    """The lines to insert: at the start of the main program, so that importing the script is unchanged.

    Raises:
        PatchError: it does not call `pretrain`.
    """
    found = [c for c in tree.all(cst.Call) if is_call(c, PRETRAIN)]
    if not found:
        raise PatchError("does not call pretrain(), so it is not a launcher")
    for one in tree.module.body:
        if isinstance(one, cst.If) and in_a_line(one.test) in (MAIN, SWAPPED):
            return [_first_in(tree, one.body, "its block of __main__")]
    for node in tree.all(cst.Call):
        if not is_call(node, *PARSING):
            continue
        around = [n for n in tree.parents(node) if isinstance(n, cst.FunctionDef | cst.Lambda)]
        if not around:
            return [tree.before(_outermost(tree, node), *LINES)]
    outer = [n for n in tree.parents(found[0]) if isinstance(n, cst.FunctionDef)]
    if not outer:
        raise PatchError("calls pretrain() nowhere that a statement can be inserted before")
    return [_first_in(tree, outer[-1].body, f"the function {outer[-1].name.value}")]


def _first_in(tree: Tree, body: cst.BaseSuite, what: str) -> Insertion:
    """Before a block's first statement, after its docstring."""
    if not isinstance(body, cst.IndentedBlock):
        raise PatchError(f"has {what} on one line; give it lines of its own")
    first, *others = body.body
    alone = first.body[0] if isinstance(first, cst.SimpleStatementLine) else None
    text = (cst.SimpleString, cst.ConcatenatedString)
    if others and isinstance(alone, cst.Expr) and isinstance(alone.value, text):
        first = others[0]
    return tree.before(first, *LINES)


def _outermost(tree: Tree, node: cst.CSTNode) -> cst.CSTNode:
    """The top-level statement that contains a node."""
    return [node, *tree.parents(node)][-2]
