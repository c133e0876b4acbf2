"""One call of a torch function on tensors of which some are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.adapters.spread import Spread

CutPairs = tuple[tuple[int, str], ...]  # dims, counted from the front, and the axes that cut them


def split_words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


class LayoutUnknown(Exception):
    """Why the layout of a result is not known."""


class FunctionCall:
    """What a rule sees of a call.

    Attributes:
        name: the function's.
        args: as they were given.
        kwargs: likewise.
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
        """The tensor that the function is mainly about."""
        found = self.arg(0, ("input", "self", "x", "query", "tensor"))
        if not isinstance(found, Tensor):
            raise LayoutUnknown(f"{self.name} was called in a way that is not followed")
        return found

    def cuts(self, tensor: Tensor) -> dict[int, tuple[str, ...]]:
        """The dims of a tensor that are cut, and by what, the outermost axis first."""
        out: dict[int, tuple[str, ...]] = {}
        for dim, axis in self._spreads[id(tensor)].cuts:
            out[dim] = (*out.get(dim, ()), axis)
        return out

    def spread(self, tensor: Tensor) -> Spread:
        """How a tensor lies on the ranks."""
        return self._spreads[id(tensor)]

    def uniform(self, tensor: Tensor) -> bool:
        """Whether all of its entries are equal."""
        return id(tensor) in self._uniform

    def operands(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list(iterate_tensors((self.args, tuple(self.kwargs.values()))))

    def where(self, dims: Mapping[int, tuple[str, ...]]) -> str:
        """Cut dims in words."""
        return ", ".join(f"dim {d} over {' and '.join(a)}" for d, a in sorted(dims.items()))

    def result(self, cuts: Mapping[int, tuple[str, ...]], partial: Sequence[str] = ()) -> Spread:
        """A spread of what is returned.

        Raises:
            Refusal: an axis would cut it twice.
        """
        pairs = tuple((d, a) for d in sorted(cuts) for a in cuts[d])
        names = [a for _, a in pairs] + list(partial)
        if len(set(names)) != len(names):
            raise LayoutUnknown(f"{self.name} puts tensors together that {names[0]} cuts along different dims")
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


def normalize_dims(given: Any, count: int) -> tuple[int, ...] | None:
    """Dims counted from the front; None for all."""
    if given is None or (isinstance(given, (tuple, list)) and not given):
        return None
    many = given if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(d, int) for d in many):
        raise LayoutUnknown("a dim is given by name")
    return tuple(d % count if count else 0 for d in many)
