"""An extension of griffe: a setting of dumps or statistics is shown as the argument that a user passes."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, ExprKeyword, ExprName, ExprSubscript, ExprTuple, Extension


class SettingsExtension(Extension):
    """Replaces `every: Setting[int, int] = Setting(COUNT, 1, ...)` by `every: int = 1`.

    Griffe's own extension for dataclasses runs later, and makes the parameters of `__init__` from the result.
    """

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Read the type of the argument and its default."""
        annotation, value = attr.annotation, attr.value
        if not isinstance(annotation, ExprSubscript) or not _is_setting(annotation.left):
            return
        assert isinstance(annotation.slice, ExprTuple)
        assert isinstance(value, ExprCall)
        attr.annotation, *_ = annotation.slice.elements
        positional = [a for a in value.arguments if not isinstance(a, ExprKeyword)]
        attr.value = positional[1] if len(positional) > 1 else None


def _is_setting(expression: Any) -> bool:
    return isinstance(expression, ExprName) and expression.name == "Setting"
