"""The tree of a model for terminals and notebooks: a row for each module and hook point."""

from __future__ import annotations

from megatron_flex.document import Branch, Document, Note, Tone, Tree
from megatron_flex.view.model_tree import TreeNode, TreePoint, describe_numbers

OPEN_LEVELS = 2  # levels that a notebook unfolds at first
FREE, FULL, HIDDEN, OFF = "○", "●", "x", "◌"
REST = "flex.report.show() prints all, flex.report.show('PATTERN') some of them"


def describe_tree(root: TreeNode, title: str, head: str) -> Document:
    """A tree below a line.

    Args:
        root: the result of `build_tree`, folded or not; not shown itself.
        title: what it is.
        head: the line.
    """
    several = len(root.stages) > 1
    columns = ("layout", "full shape", *([">stage"] * several))
    branches = [_node_branch(child, root.stages, 0) for child in root.children]
    return Document(title, [Note(head, "strong"), Tree(columns, branches, REST)])


def _node_branch(node: TreeNode, above: frozenset[int], level: int) -> Branch:
    """The row of a module and those below it; its stages are named where they are not those above it."""
    label, inner = _node_label(node), node
    while not inner.points and len(inner.children) == 1:  # `decoder.layers 0-31 x 32` in one row
        inner = inner.children[0]
        label += (" " if inner.label[:1].isdigit() else ".") + _node_label(inner)
    hooks = _count_hooks(inner)
    return Branch(
        label,
        tone="strong",
        cells=() if inner.stages == above else ("", "", describe_numbers(inner.stages)),
        badge=f"{FULL} {hooks}" if hooks else "",
        opened=level < OPEN_LEVELS or bool(hooks),
        children=(
            *map(_point_branch, inner.points),
            *(_node_branch(child, inner.stages, level + 1) for child in inner.children),
        ),
    )


def _node_label(node: TreeNode) -> str:
    return node.label + (f" x {node.count}" if node.count > 1 else "")


def _count_hooks(node: TreeNode) -> int:
    """The number of hooks in it."""
    return sum(len(p.hooks) for p in node.points) + sum(map(_count_hooks, node.children))


def _point_branch(point: TreePoint) -> Branch:
    mark, more = FREE, "can be read only" if point.read_only_reason else ""
    tone: Tone = ""
    reason = point.hidden or point.read_only_reason
    if point.hidden:
        mark, tone, more = HIDDEN, "dim", "no hook"
    elif point.hooks:
        mark, tone = (FULL, "on") if any(hook.active for hook in point.hooks) else (OFF, "off")
        more = "; ".join(hook.describe() for hook in point.hooks)
    label = f":{point.point}" if point.point else "it"
    return Branch(label, mark, tone, (point.layout, point.shape), more, reason)
