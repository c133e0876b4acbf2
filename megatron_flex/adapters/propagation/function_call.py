"""One call of a torch function on tensors, some of them sharded, and the name of the function's rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from megatron_flex.adapters.layout_rules import Spread


def split_words(text: str) -> list[str]:
    return text.split()


class LayoutUnknown(Exception):
    """The layout of a result is unknown; the message gives the reason."""


class FunctionCall:
    """A call of a torch function, the argument of a rule.

    Attributes:
        name: the function's name.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: the first tensor that it returned.
    """

    def __init__(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        spreads: Mapping[int, Spread],
        uniform: frozenset[int],
        out: Any,
    ) -> None:
        self.name, self.args, self.kwargs, self.out = name, args, kwargs, out
        self._spreads, self._uniform = spreads, uniform

    def arg(self, position: int, names: str | Sequence[str] = (), default: Any = None) -> Any:
        """An argument by its position or one of its names."""
        for name in [names] if isinstance(names, str) else names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    @property
    def first(self) -> Tensor:
        """The function's main operand."""
        operand = self.arg(0, ("input", "self", "x", "query", "tensor"))
        if not isinstance(operand, Tensor):
            raise LayoutUnknown(f"{self.name} was called in a way that is not followed")
        return operand

    def cuts(self, tensor: Tensor) -> dict[int, tuple[str, ...]]:
        """The sharded dims of a tensor, with their axes, the outermost axis first."""
        out: dict[int, tuple[str, ...]] = {}
        for dim, axis in self._spreads[id(tensor)].cuts:
            out[dim] = (*out.get(dim, ()), axis)
        return out

    def spread(self, tensor: Tensor) -> Spread:
        return self._spreads[id(tensor)]

    def uniform(self, tensor: Tensor) -> bool:
        """Whether all of its entries are equal."""
        return id(tensor) in self._uniform

    def operands(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list(iterate_tensors((self.args, tuple(self.kwargs.values()))))

    def where(self, dims: Mapping[int, tuple[str, ...]]) -> str:
        """A description of sharded dims, for messages."""
        return ", ".join(f"dim {d} over {' and '.join(a)}" for d, a in sorted(dims.items()))

    def result(self, cuts: Mapping[int, tuple[str, ...]], partial: Sequence[str] = ()) -> Spread:
        """The sharding of the result.

        Raises:
            LayoutUnknown: an axis would shard it twice.
        """
        pairs = tuple((d, a) for d in sorted(cuts) for a in cuts[d])
        names = [a for _, a in pairs] + list(partial)
        if len(set(names)) != len(names):
            raise LayoutUnknown(f"{self.name} combines tensors that {names[0]} shards along different dims")
        uneven = any(self._spreads[id(t)].uneven for t in self.operands())
        return Spread(pairs, tuple(partial), uneven=uneven and bool(pairs))


SpreadRule = Callable[[FunctionCall], Spread]


def iterate_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iterate_tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from iterate_tensors(item)


def unpack_sequence(given: Sequence[Any]) -> Sequence[Any]:
    """The entries of a sequence that a function takes as one argument, or each as an argument."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def normalize_dims(given: Any, count: int) -> tuple[int, ...] | None:
    """Dims counted from the front; None for all."""
    if given is None or (isinstance(given, (tuple, list)) and not given):
        return None
    many = given if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(d, int) for d in many):
        raise LayoutUnknown("a dim is given by name")
    return tuple(d % count if count else 0 for d in many)


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
    """The name of a torch function: `softmax` for `Tensor.softmax`, `F.softmax` and `torch.softmax`.

    An attribute's getter is `T.get`; collectives have a prefix, `c10d.all_reduce`.
    """
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__", "__delete__"):
        # a slot of a C type's method always has `__self__`
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
