"""The source code at a hook point, for every framework's layer."""

from __future__ import annotations

import libcst as cst

from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.lines import Insertion
from megatron_flex_patches.tree import Tree

# Where megatron_flex is not installed the layers run as they were: no hook is ever registered at a point.
IMPORT = (
    "try:",
    "    from megatron_flex import points as _flex",
    "except ModuleNotFoundError as _absent:",
    '    if _absent.name != "megatron_flex":',
    "        raise",
    "    class _flex:",
    "        class Points:",
    "            def __init__(self, *names): pass",
    "            def stands(self, name): return False",
    "            def __call__(self, name, local, **said): return local",
)


def importing(tree: Tree) -> Insertion:
    """The one import that patched layers need."""
    return tree.before(tree.first_import(), *IMPORT)


def declare(tree: Tree, forward: cst.FunctionDef, *names: str) -> Insertion:
    """The attribute of a patched class, before its forward."""
    told = ", ".join(f'"{n}"' for n in names)
    return tree.before(forward, f"flex_points = _flex.Points({told})")


def point(name: str, variable: str, said: str = "") -> str:
    """The line at a point: passes a variable of the forward through it.

    Args:
        name: the point.
        variable: the variable with its tensor.
        said: another variable, which determines the layout.
    """
    more = f", {said}={said}" if said else ""
    return f'{variable} = self.flex_points("{name}", {variable}{more})'


def output(tree: Tree, forward: cst.FunctionDef, where: str, said: str = "") -> list[Insertion]:
    """The point `output` before every return: for the return value, or its first element.

    Raises:
        PatchError: nothing is returned, or no plain name.
    """
    out = []
    for node in tree.all(cst.Return, forward):
        value = node.value
        if isinstance(value, cst.Tuple) and value.elements:
            value = value.elements[0].value
        if not isinstance(value, cst.Name):
            code = tree.module.code_for_node(node).strip()
            raise PatchError(f"has `{code:.80}` in {where}, whose first value is not a plain name")
        out.append(
            tree.before(tree.statement(node, f"a return of {where}"), point("output", value.value, said))
        )
    if not out:
        raise PatchError(f"has no return in {where}")
    return out
