"""The tree in a notebook: modules fold, a row for each point."""

from __future__ import annotations

from megatron_flex.notebook_html import WARN_COLOUR, Markup, html_details, html_fragment, html_line, html_text
from megatron_flex.view.model_tree import TreeNode, TreePoint, describe_numbers

MAX_TREE_ROWS = 600  # modules and points in total
OPEN_LEVELS = 2  # levels that are unfolded at first
FREE, FULL, HIDDEN, OFF = "○", "●", "×", "◌"
GREEN, YELLOW = "#2a9d4a", "#c08a00"  # seen on white and on black


class _RowBudget:
    """How many rows may still be shown, and how many were left out."""

    def __init__(self, left: int) -> None:
        self.left, self.out = left, 0

    def take(self) -> bool:
        """Whether there is room for one more."""
        if self.left == 0:
            self.out += 1
            return False
        self.left -= 1
        return True


def tree_html(root: TreeNode, head: str, *notes: Markup) -> Markup:
    """A tree below a title line.

    Args:
        root: the result of `tree`, folded or not; not shown itself.
        head: the title line.
        notes: lines below the title.
    """
    room = _RowBudget(MAX_TREE_ROWS)
    body = [_node_html(child, root.stages, room, 0) for child in root.children]
    if room.out:
        body.append(
            html_line(
                f"and {room.out:,} more rows; flex.report.show() prints all, "
                "flex.report.show('PATTERN') some of them",
                WARN_COLOUR,
            )
        )
    return html_fragment(head, *notes, *body)


def _node_html(node: TreeNode, above: frozenset[int], room: _RowBudget, level: int) -> Markup:
    label, inner = _label_text(node), node
    while not inner.points and len(inner.children) == 1:  # `decoder.layers 0-31 x 32` in one row
        inner = inner.children[0]
        label += (" " if inner.label[:1].isdigit() else ".") + _label_text(inner)
    if not room.take():
        room.out += _count_rows(inner)
        return Markup("")
    hook_count = _count_hooks(inner)
    stage = "" if inner.stages == above else f" · stage {describe_numbers(inner.stages)}"
    summary = Markup(
        f"<b>{html_text(label)}</b>{html_text(stage)}"
        + (f' <span style="color:{GREEN}">{FULL} {hook_count}</span>' if hook_count else "")
    )
    parts = [_point_html(p) for p in inner.points if room.take()]
    parts += [_node_html(child, inner.stages, room, level + 1) for child in inner.children]
    return html_details(summary, *parts, opened=level < OPEN_LEVELS or bool(hook_count))


def _label_text(node: TreeNode) -> str:
    return node.label + (f" x {node.count}" if node.count > 1 else "")


def _count_rows(node: TreeNode) -> int:
    """The number of rows in it."""
    return len(node.points) + sum(1 + _count_rows(child) for child in node.children)


def _count_hooks(node: TreeNode) -> int:
    """The number of hooks in it."""
    return sum(len(p.hooks) for p in node.points) + sum(map(_count_hooks, node.children))


def _point_html(place: TreePoint) -> Markup:
    mark, style, more = (
        FREE,
        "",
        f"can be read only: {place.read_only_reason}" if place.read_only_reason else "",
    )
    if place.hidden:
        mark, style, more = HIDDEN, "opacity:.6", f"no hook: {place.hidden}"
    elif place.hooks:
        on = any(h.active for h in place.hooks)
        mark, style = (FULL, f"color:{GREEN}") if on else (OFF, f"color:{YELLOW}")
        more = "; ".join(h.describe() for h in place.hooks)
    name = f":{place.point}" if place.point else "it"
    about = " · ".join(w for w in (place.layout, place.shape) if w)
    return Markup(
        f'<div style="white-space:pre-wrap;{style}">{mark} <b>{html_text(name)}</b>  {html_text(about)}'
        + (f"  <i>{html_text(more)}</i>" if more else "")
        + "</div>"
    )
