"""Names of torch functions: one for a function, the method of that name and its in-place variant."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

OPERATOR_NAMES = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add",
    "__sub__": "sub",
    "__rsub__": "sub",
    "__isub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul",
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__itruediv__": "div",
    "__div__": "div",
    "__rdiv__": "div",
    "__idiv__": "div",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__ifloordiv__": "floor_divide",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__ipow__": "pow",
    "__mod__": "remainder",
    "__rmod__": "remainder",
    "__imod__": "remainder",
    "__and__": "logical_and",
    "__rand__": "logical_and",
    "__iand__": "logical_and",
    "__or__": "logical_or",
    "__ror__": "logical_or",
    "__ior__": "logical_or",
    "__xor__": "logical_xor",
    "__rxor__": "logical_xor",
    "__ixor__": "logical_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__invert__": "logical_not",
    "__neg__": "neg",
    "__pos__": "positive",
    "__abs__": "abs",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__matmul__": "matmul",
    "__rmatmul__": "rmatmul",
    "__imatmul__": "matmul",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
}


@cache
def function_name(function: Callable[..., Any]) -> str:
    """What a torch function is called: `softmax` for `Tensor.softmax`, `F.softmax` and `torch.softmax`.

    An attribute's is in front of a dot, `T.get`; collectives' are behind one, `c10d.all_reduce`.
    """
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(function, '__self__', None).__name__}.{name.strip('_')}"  # type: ignore[union-attr]
    if type(function).__name__ in ("OpOverload", "OpOverloadPacket"):
        space, _, rest = str(function).partition(".")
        plain = rest.partition(".")[0]
        if "c10d" in space:
            return f"c10d.{plain}"
        return plain.rstrip("_") if space == "aten" else f"{space}.{plain}"
    if name in OPERATOR_NAMES:
        return OPERATOR_NAMES[name]
    if name.endswith("_") and not name.endswith("__"):
        return name.rstrip("_")
    return name
