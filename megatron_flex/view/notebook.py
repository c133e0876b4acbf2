"""The tree in a notebook: modules fold, a row for each point."""

from __future__ import annotations

from megatron_flex.markup import WARN, Markup, details, fragment, line, text
from megatron_flex.view.tree import Node, Place
from megatron_flex.view.words import numbers_in_words

MOST = 600  # modules and points in all
OPEN = 2  # levels that are unfolded at first
FREE, FULL, HIDDEN, OFF = "○", "●", "×", "◌"
GREEN, YELLOW = "#2a9d4a", "#c08a00"  # seen on white and on black


class _Room:
    """How many rows may still be shown, and how many could not be."""

    def __init__(self, left: int) -> None:
        self.left, self.out = left, 0

    def take(self) -> bool:
        """Whether there is room for one more."""
        if self.left == 0:
            self.out += 1
            return False
        self.left -= 1
        return True


def in_html(root: Node, head: str, *notes: Markup) -> Markup:
    """A tree below a line that says what it is of.

    Args:
        root: what `tree` gave, folded or not; it is not shown itself.
        head: the line.
        notes: what stands below the line.
    """
    room = _Room(MOST)
    body = [_node(child, root.stages, room, 0) for child in root.children]
    if room.out:
        body.append(
            line(
                f"and {room.out:,} more rows; flex.show() prints all, flex.show('PATTERN') some of them", WARN
            )
        )
    return fragment(head, *notes, *body)


def _node(node: Node, above: frozenset[int], room: _Room, level: int) -> Markup:
    label, inner = _label(node), node
    while not inner.places and len(inner.children) == 1:  # `decoder.layers 0-31 x 32` in one row
        inner = inner.children[0]
        label += (" " if inner.label[:1].isdigit() else ".") + _label(inner)
    if not room.take():
        room.out += _rows(inner)
        return Markup("")
    stands = _hooks(inner)
    stage = "" if inner.stages == above else f" · stage {numbers_in_words(inner.stages)}"
    told = Markup(
        f"<b>{text(label)}</b>{text(stage)}"
        + (f' <span style="color:{GREEN}">{FULL} {stands}</span>' if stands else "")
    )
    parts = [_place(p) for p in inner.places if room.take()]
    parts += [_node(child, inner.stages, room, level + 1) for child in inner.children]
    return details(told, *parts, opened=level < OPEN or bool(stands))


def _label(node: Node) -> str:
    return node.label + (f" x {node.count}" if node.count > 1 else "")


def _rows(node: Node) -> int:
    """How many rows are in it."""
    return len(node.places) + sum(1 + _rows(child) for child in node.children)


def _hooks(node: Node) -> int:
    """How many hooks stand in it."""
    return sum(len(p.hooks) for p in node.places) + sum(map(_hooks, node.children))


def _place(place: Place) -> Markup:
    mark, style, more = FREE, "", f"can be read only: {place.fixed}" if place.fixed else ""
    if place.hidden:
        mark, style, more = HIDDEN, "opacity:.6", f"no hook: {place.hidden}"
    elif place.hooks:
        on = any(h.active for h in place.hooks)
        mark, style = (FULL, f"color:{GREEN}") if on else (OFF, f"color:{YELLOW}")
        more = "; ".join(h.describe() for h in place.hooks)
    name = f":{place.point}" if place.point else "it"
    about = " · ".join(w for w in (place.layout, place.shape) if w)
    return Markup(
        f'<div style="white-space:pre-wrap;{style}">{mark} <b>{text(name)}</b>  {text(about)}'
        + (f"  <i>{text(more)}</i>" if more else "")
        + "</div>"
    )
