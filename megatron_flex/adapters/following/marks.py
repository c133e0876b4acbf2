"""What is known of each tensor while a call is followed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_flex.adapters.spread import Spread, SpreadOrUnknown, Unknown

Axes = frozenset[str]
GradientEnds = frozenset[Axes | str]
NO_AXES: Axes = frozenset()
UNMARKED = Unknown(
    "it was made by something that is not a torch function, such as a custom autograd.Function or compiled "
    "code, or before the model was called"
)


class GradientNode:
    """Where the gradient of a tensor comes from.

    Each use of a tensor leaves its rank with the whole gradient from there or, where it is used together
    with what is cut, with a summand of it over the axes that cut.
    """

    __slots__ = ("_found", "ends", "uses")

    def __init__(self) -> None:
        self.uses: list[tuple[GradientNode, Axes]] = []
        self.ends: list[Axes | str] = []
        self._found: GradientEnds | None = None

    def among(self, uses: slice, ends: slice) -> GradientEnds:
        """What some of the uses together make: sets of axes over which to sum, and reasons against it."""
        out = set(self.ends[ends])
        for child, axes in self.uses[uses]:
            out |= {end if isinstance(end, str) else end | axes for end in child.found()}
        return frozenset(out)

    def found(self) -> GradientEnds:
        """What all of them make. Asked when no more come."""
        waiting = [self]
        while waiting:  # children first, without recursion, since chains of uses are long
            node = waiting[-1]
            more = [] if node._found is not None else [c for c, _ in node.uses if c._found is None]
            if more:
                waiting += more
                continue
            waiting.pop()
            if node._found is None:
                out = set(node.ends)
                for child, axes in node.uses:
                    out |= {e if isinstance(e, str) else e | axes for e in child._found or ()}
                node._found = frozenset(out)
        return self._found or frozenset()


@dataclass(eq=False)
class ViewMemory:
    """The memory that a tensor and its views share.

    Attributes:
        version: how often torch functions that were followed have written to it.
        spoiled: at which of these times something of another layout was written into a part of it.
    """

    version: int = 0
    spoiled: int = -1


@dataclass(eq=False)
class TensorMark:
    """One tensor's.

    Attributes:
        told: how it lies on the ranks, its dims counted from the front.
        uniform: whether all entries are equal, so that it can as well be a part of something greater.
        node: where its gradient comes from.
        line: its memory.
        version: of the memory when the mark was made.
    """

    told: SpreadOrUnknown
    uniform: bool = False
    node: GradientNode = field(default_factory=GradientNode)
    line: ViewMemory = field(default_factory=ViewMemory)
    version: int = 0


class TensorMarks:
    """Marks by tensor."""

    def __init__(self) -> None:
        self._marks = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._marks

    def get(self, tensor: Tensor) -> TensorMark | None:
        """A tensor's mark; one that says so if something has changed the tensor unseen."""
        mark: TensorMark | None = self._marks.get(tensor)
        if mark is None:
            return None
        if mark.line.spoiled > mark.version:
            why = "a part of its memory, a view, was overwritten by something cut in another way"
            return TensorMark(Unknown(why), node=mark.node, line=mark.line, version=mark.version)
        if tensor_version(tensor) > mark.line.version:
            why = "it was changed in place by something that is not a torch function"
            return TensorMark(Unknown(why), node=mark.node, line=mark.line, version=mark.version)
        return mark

    def make(self, tensor: Tensor, told: SpreadOrUnknown, sources: Iterable[Tensor] = (), uniform: bool = False) -> TensorMark:
        """Mark a new tensor.

        Args:
            tensor: it.
            told: how it lies on the ranks.
            sources: the tensors of which it may be a view.
            uniform: whether all entries are equal.
        """
        line = None
        address = storage_address(tensor)
        for source in sources:
            known = self._marks.get(source)
            if known is not None and address is not None and storage_address(source) == address:
                line = known.line
        if line is None:
            line = ViewMemory(tensor_version(tensor))
        line.version = max(line.version, tensor_version(tensor))
        mark = TensorMark(told, uniform, line=line, version=tensor_version(tensor))
        self._marks[tensor] = mark
        return mark

    def written(self, tensor: Tensor, before: TensorMark, told: SpreadOrUnknown, uniform: bool) -> TensorMark:
        """Mark a tensor anew that a followed function has written to."""
        now = tensor_version(tensor)
        mark = TensorMark(told, uniform, line=before.line, version=now)
        before.line.version = max(before.line.version, now)
        if (told != before.told or isinstance(told, Unknown)) and now > before.version:
            before.line.spoiled = now
        self._marks[tensor] = mark
        return mark


def tensor_version(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def storage_address(tensor: Tensor) -> int | None:
    """Where a tensor's memory begins; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # torch raises either for tensors without a storage
        return None


def normalize_spread(spread: Spread, dims: int) -> Spread:
    """A spread with its dims counted from the front."""
    if all(d >= 0 for d, _ in spread.cuts):
        return spread
    cuts = tuple(sorted(((d % dims, a) for d, a in spread.cuts), key=lambda c: c[0]))
    return Spread(cuts, spread.partial, spread.shared, spread.uneven)


def differing_axes(told: SpreadOrUnknown) -> Axes:
    """Over which axes local tensors differ."""
    return (
        frozenset() if isinstance(told, Unknown) else frozenset(a for _, a in told.cuts) | set(told.partial)
    )


def is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients can flow to a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()
