"""The marks of tensors while layouts are propagated through a call. DTensors have their own placements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_flex.adapters.dtensor_placements import spread_of_placements
from megatron_flex.adapters.layout_rules import Spread, SpreadOrUnknown, UnknownLayout
from megatron_flex.adapters.propagation.dim_names import NamedDims
from megatron_flex.layout.gradient_layout import GradientEnds

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh


Axes = frozenset[str]
NO_AXES: Axes = frozenset()
UNMARKED = UnknownLayout(
    "it was made by something that is not a torch function, such as a custom autograd.Function or compiled "
    "code, or before the model was called"
)


class GradientNode:
    """The uses that contribute to the gradient of a tensor.

    Each use of a tensor contributes the full gradient on its rank, or, where the tensor is combined with a
    sharded tensor, a gradient that is partial over the axes of the sharding.
    """

    __slots__ = ("_all_ends", "ends", "uses")

    def __init__(self) -> None:
        self.uses: list[tuple[GradientNode, Axes]] = []
        self.ends: list[Axes | str] = []
        self._all_ends: GradientEnds | None = None

    def among(self, uses: slice, ends: slice) -> GradientEnds:
        """The combined effect of some uses: sets of axes over which to sum, and reasons why it is unknown."""
        out = set(self.ends[ends])
        for child, axes in self.uses[uses]:
            out |= {end if isinstance(end, str) else end | axes for end in child.find_ends()}
        return frozenset(out)

    def find_ends(self) -> GradientEnds:
        """The combined effect of all uses. Called when there are no more."""
        waiting = [self]
        while waiting:  # children first, without recursion, since chains of uses are long
            node = waiting[-1]
            more = [] if node._all_ends is not None else [c for c, _ in node.uses if c._all_ends is None]
            if more:
                waiting += more
                continue
            waiting.pop()
            if node._all_ends is None:
                out = set(node.ends)
                for child, axes in node.uses:
                    out |= {e if isinstance(e, str) else e | axes for e in child._all_ends or ()}
                node._all_ends = frozenset(out)
        return self._all_ends or frozenset()


@dataclass(eq=False)
class ViewMemory:
    """The memory that a tensor and its views share.

    Attributes:
        version: the number of writes by traced torch functions.
        spoiled: the versions at which a tensor of another layout was written to a part of it.
    """

    version: int = 0
    spoiled: int = -1


@dataclass(eq=False)
class TensorMark:
    """The mark of one tensor.

    Attributes:
        spread: its sharding, dims counted from the front.
        uniform: whether all entries are equal, so that it could also be a shard of a larger tensor.
        node: the uses that contribute to its gradient.
        line: its memory.
        version: the version of the memory when the mark was made.
        names: its dims; None where nothing is known of them.
    """

    spread: SpreadOrUnknown
    uniform: bool = False
    node: GradientNode = field(default_factory=GradientNode)
    line: ViewMemory = field(default_factory=ViewMemory)
    version: int = 0
    names: NamedDims | None = None

    def add_use(self, result: TensorMark, axes: Axes = NO_AXES) -> None:
        """Note that `result` is computed from the tensor; `axes`: over which its gradient is summed."""
        self.node.uses.append((result.node, axes))

    def add_final_use(self, effect: Axes | str) -> None:
        """Note a use of untraced result: the axes over which its gradient is summed, or why unknown."""
        self.node.ends.append(effect)


class TensorMarks:
    """Marks by tensor."""

    def __init__(self) -> None:
        self._marks = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._marks

    def get(self, tensor: Tensor) -> TensorMark | None:
        """A tensor's mark; an unknown one if untraced code has changed the tensor."""
        mark: TensorMark | None = self._marks.get(tensor)
        if mark is None:
            return None
        if mark.line.spoiled > mark.version:
            why = "a part of its memory, a view, was overwritten by a tensor that is sharded in another way"
            return TensorMark(UnknownLayout(why), node=mark.node, line=mark.line, version=mark.version)
        if tensor_version(tensor) > mark.line.version:
            why = "it was changed in place by something that is not a torch function"
            return TensorMark(UnknownLayout(why), node=mark.node, line=mark.line, version=mark.version)
        return mark

    def make(
        self, tensor: Tensor, spread: SpreadOrUnknown, sources: Iterable[Tensor] = (), uniform: bool = False
    ) -> TensorMark:
        """Mark a new tensor.

        Args:
            tensor: the tensor.
            spread: its sharding.
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
        mark = TensorMark(spread, uniform, line=line, version=tensor_version(tensor))
        self._marks[tensor] = mark
        return mark

    def written(
        self, tensor: Tensor, before: TensorMark, spread: SpreadOrUnknown, uniform: bool
    ) -> TensorMark:
        """Mark a tensor again after a traced function has written to it."""
        now = tensor_version(tensor)
        mark = TensorMark(spread, uniform, line=before.line, version=now)
        before.line.version = max(before.line.version, now)
        if (spread != before.spread or isinstance(spread, UnknownLayout)) and now > before.version:
            before.line.spoiled = now
        self._marks[tensor] = mark
        return mark


def tensor_version(tensor: Tensor) -> int:
    """The number of writes to a tensor's memory; 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def storage_address(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # torch raises either for tensors without a storage
        return None


def normalize_spread(spread: Spread, dims: int) -> Spread:
    """A sharding with its dims counted from the front."""
    if all(d >= 0 for d, _ in spread.cuts):
        return spread
    cuts = tuple(sorted(((d % dims, a) for d, a in spread.cuts), key=lambda c: c[0]))
    return Spread(cuts, spread.partial, spread.shared, spread.uneven)


def is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients can flow to a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()


def placements_of(tensor: Tensor) -> Any:
    """The placements of a DTensor; None for others."""
    return getattr(tensor, "placements", None) if type(tensor).__name__ == "DTensor" else None


def spread_of_dtensor(tensor: Any, mesh: Mesh) -> SpreadOrUnknown:
    """The sharding of a DTensor's local tensors."""
    spread = spread_of_placements(tensor.placements, tensor.device_mesh, mesh, tensor.shape)
    return spread if isinstance(spread, UnknownLayout) else normalize_spread(spread, tensor.ndim)
