"""One call of the model in which torch functions are followed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from megatron_flex.adapters.following.call import iterate_tensors
from megatron_flex.adapters.following.distributed import placements_of, spread_of_dtensor
from megatron_flex.adapters.following.functions import IDENTITY_FUNCTIONS, PARALLEL_REGIONS, CHECKPOINT_FUNCTIONS
from megatron_flex.adapters.following.marks import (
    NO_AXES,
    UNMARKED,
    TensorMark,
    TensorMarks,
    differing_axes,
    is_differentiable,
    normalize_spread,
    tensor_version,
)
from megatron_flex.adapters.following.names import function_name
from megatron_flex.adapters.following.rules import infer_spread
from megatron_flex.adapters.following.windows import UseWindow
from megatron_flex.adapters.rules import Rule
from megatron_flex.adapters.spread import WHOLE, Spread, SpreadOrUnknown, Unknown
from megatron_flex.adapters.tensor_trees import tensors

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh

DETACHING = frozenset(("detach", "data.get"))


class LayoutTrace(TorchFunctionMode):
    """Marks what torch functions make, while it is active.

    Args:
        root: the model.
        known: the modules of which rules tell; what happens inside them is their own.
        mesh: the axes of the run.
        spreads: those of parameters, buffers and other tensors that modules hold, by identity.

    Attributes:
        marks: of all tensors.
        opaque: how many things run that are not followed: known modules, custom functions, hooks.
        left: how the tensors that the call returned lie on the ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        known: Mapping[nn.Module, Rule],
        mesh: Mesh,
        spreads: Mapping[int, SpreadOrUnknown],
    ) -> None:
        super().__init__()
        self._known, self._mesh, self._held = known, mesh, spreads
        self._names = {m: n for n, m in root.named_modules()}
        self.marks = TensorMarks()
        self._inside: list[nn.Module] = []
        self._norms: list[Tensor | None] = []
        self._windows: list[UseWindow] = []
        self.opaque = 0
        self.left: list[SpreadOrUnknown] = []
        self._trains, self._recomputed = torch.is_grad_enabled(), 0
        self._thread = threading.get_ident()

    # -- around the call -------------------------------------------------------------------------------

    def run(self, entering: list[SpreadOrUnknown], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, following; `entering` tells of its first tensors."""
        for index, tensor in enumerate(tensors((args, kwargs))):
            self.enter(tensor, entering[index] if index < len(entering) else WHOLE)
        entered = module_hooks.register_module_forward_pre_hook(self._before_module)
        left = module_hooks.register_module_forward_hook(self._leaves)
        functions: Any = torch.autograd.Function
        before = vars(functions)["apply"]
        functions.apply = classmethod(self._wrap_apply(before))
        opened = self._mark_local_parts()
        try:
            with self:
                output = call(*args, **kwargs)
        finally:
            opened()
            functions.apply = before
            left.remove()
            entered.remove()
        for tensor in tensors(output):
            self.mark(tensor).node.ends.append(NO_AXES)
            self.left.append(self.mark(tensor).told)
        return output

    def _mark_local_parts(self) -> Callable[[], None]:
        """Mark the local parts of DTensors, which no function makes where nothing is differentiated."""
        placed: Any = sys.modules.get("torch.distributed.tensor")
        if placed is None:
            return lambda: None
        kind, before = placed.DTensor, placed.DTensor.to_local

        def to_local(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            local = before(tensor, *args, **kwargs)
            if self._here() and not self.opaque and not torch.is_grad_enabled():
                self.marks.make(local, spread_of_dtensor(tensor, self._mesh))
            return local

        kind.to_local = to_local

        def undo() -> None:
            kind.to_local = before

        return undo

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def enter(self, tensor: Tensor, spread: SpreadOrUnknown = WHOLE) -> None:
        """Mark what the model is called with, which all ranks of a sample have alike, if nobody says more."""
        if placements_of(tensor) is None and tensor not in self.marks:
            self.marks.make(tensor, spread)

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._here():
            return
        self._inside.append(module)
        rule = self._known.get(module)
        if rule is None:
            return
        if rule.follows:
            self._norms.append(next(iterate_tensors(args), None))
        elif not self.opaque:
            for i, tensor in enumerate(iterate_tensors(args)):
                shared = rule.inputs.shared if rule.inputs is not None and i == 0 else ()
                self.mark(tensor).node.ends.append(frozenset(shared))
        self.opaque += 1

    def _leaves(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._here() or module not in self._inside:
            return
        outputs = tensors(output)
        while self._inside:
            inner = self._inside.pop()
            self.opaque -= inner in self._known
            closing = [w for w in self._windows if w.module is inner]
            for window in closing:
                window.close(outputs)
                self._windows.remove(window)
            if inner is module:
                break
        rule = self._known.get(module)
        if rule is None:
            return
        if rule.follows:
            self._normed(self._norms.pop(), outputs, rule.follows)
            return
        for i, tensor in enumerate(outputs):
            if placements_of(tensor) is not None:
                continue
            if i and (tensor in self.marks or id(tensor) in self._held):
                continue
            name = f"{self._names.get(module, '')} ({type(module).__name__})"
            spread: SpreadOrUnknown = Unknown(f"{name} returns it, of which no rule tells")
            if i == 0 and rule.outputs is not None:
                spread = normalize_spread(rule.outputs, tensor.ndim)
            self.marks.make(tensor, spread)

    def _normed(self, source: Tensor | None, outputs: list[Tensor], dims: int) -> None:
        """A module has worked along the last dims of a tensor, which are then whole on each rank."""
        if source is None or self.opaque or not outputs:
            return
        theirs = self.mark(source)
        spread = theirs.told
        if isinstance(spread, Spread) and (spread.partial or any(d >= source.ndim - dims for d, _ in spread.cuts)):
            spread = Unknown("a norm works along dims of which each rank has a part")
        mark = self.marks.make(outputs[0], spread, (source,))
        _record_use(theirs, mark)

    # -- marks -----------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> TensorMark:
        """What is known of a tensor."""
        placed = placements_of(tensor)
        if placed is not None:
            known = self.marks.get(tensor)
            return known or self.marks.make(tensor, spread_of_dtensor(tensor, self._mesh))
        found = self.marks.get(tensor)
        if found is not None and not isinstance(found.told, Unknown):
            return found
        spread = self._held.get(id(tensor))
        if spread is None and self._holds(tensor):
            spread = WHOLE
        if spread is not None:
            return self.marks.make(tensor, spread if isinstance(spread, Unknown) else normalize_spread(spread, tensor.ndim))
        return found or self.marks.make(tensor, UNMARKED)

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a module that runs holds it: what keeps parameters may put others in their places."""
        return any(
            any(held is tensor for held in (*m._parameters.values(), *vars(m).values())) for m in self._inside
        )

    def pass_on(self, old: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """A hook has put another tensor in the place of one."""
        if new is old:
            return
        source = self.mark(old)
        spread = spread if isinstance(spread, Unknown) else normalize_spread(spread, new.ndim)
        mark = self.marks.make(new, spread, (old,))
        source.node.uses.append((mark.node, NO_AXES))

    def window(self, tensor: Tensor, gets: nn.Module | None) -> UseWindow:
        """The uses of a tensor from now on; only those in a module, if that gets it."""
        found = UseWindow(self.mark(tensor).node, gets, tensor)
        if gets is not None:
            self._windows.append(found)
        return found

    # -- functions -------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function and mark what it returns."""
        kwargs = kwargs or {}
        if self.opaque:
            return func(*args, **kwargs)
        got = list(iterate_tensors((args, kwargs)))
        marks = [self.mark(t) for t in got]
        uniform = [m.uniform and m.version == tensor_version(t) for t, m in zip(got, marks, strict=True)]
        out = func(*args, **kwargs)
        name = function_name(func)
        if str(getattr(func, "__module__", "")).startswith("torch.distributed."):
            name = f"c10d.{name}"
        made = got[:1] if name == "setitem" else got if name.startswith("c10d.") else list(iterate_tensors(out))
        if made:
            spread = [(t, m.told, u) for t, m, u in zip(got, marks, uniform, strict=True)]
            self._made(made, got, marks, *infer_spread(name, args, kwargs, spread, made), name in DETACHING)
        return out

    def _made(
        self,
        made: list[Tensor],
        got: list[Tensor],
        marks: list[TensorMark],
        spread: SpreadOrUnknown,
        uniform: bool,
        detached: bool,
    ) -> None:
        before = {id(t): m for t, m in zip(got, marks, strict=True)}
        for tensor in made:
            placed = placements_of(tensor) is not None
            mine = spread_of_dtensor(tensor, self._mesh) if placed else spread
            old = before.get(id(tensor))
            if old is not None and mine == old.told and tensor_version(tensor) == old.version:
                continue  # it returned what it got
            if old is None:
                mark = self.marks.make(tensor, mine, got, uniform)
            else:
                mark = self.marks.written(tensor, old, mine, uniform)
            if not detached and self._gets_gradient(tensor):
                for source, theirs in zip(got, marks, strict=True):
                    if self._gets_gradient(source):
                        _record_use(theirs, mark)

    def _gets_gradient(self, tensor: Tensor) -> bool:
        """Whether gradients flow to a tensor; where nothing is differentiated, whether they could."""
        return is_differentiable(tensor) and (tensor.requires_grad or not self._trains or self._recomputed > 0)

    def _wrap_apply(self, before: Any) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = before.__get__(None, cls)
            if not self._here() or self.opaque:
                return own(*args, **kwargs)
            if cls.__name__ in CHECKPOINT_FUNCTIONS:
                self._recomputed += 1
                try:
                    return own(*args, **kwargs)
                finally:
                    self._recomputed -= 1
            got = list(iterate_tensors((args, kwargs)))
            marks = [self.mark(t) for t in got]
            self.opaque += 1
            try:
                out = own(*args, **kwargs)
            finally:
                self.opaque -= 1
            self._mark_applied(cls.__name__, marks, list(iterate_tensors(out)))
            return out

        return apply

    def _mark_applied(self, name: str, marks: list[TensorMark], made: list[Tensor]) -> None:
        """Mark what a custom function made."""
        why = f"it was made by {name}, a custom autograd.Function"
        if name in IDENTITY_FUNCTIONS and len(made) == len(marks):
            for tensor, theirs in zip(made, marks, strict=True):
                _record_use(theirs, self.marks.make(tensor, theirs.told))
            return
        for tensor in made:
            spread: SpreadOrUnknown = Unknown(why)
            if placements_of(tensor) is not None:
                spread = spread_of_dtensor(tensor, self._mesh)
            elif name == "_ToTorchTensor" and marks:
                spread = marks[0].told
            elif name in PARALLEL_REGIONS and marks:
                spread = PARALLEL_REGIONS[name](marks[0].told, tensor.ndim)
            mark = self.marks.make(tensor, spread)
            for theirs in marks:
                if isinstance(spread, Unknown):
                    theirs.node.ends.append(f"it is used by {name}, a custom autograd.Function")
                elif name in PARALLEL_REGIONS or name == "_FromTorchTensor":
                    theirs.node.ends.append(NO_AXES)
                else:
                    _record_use(theirs, mark)


def _record_use(source: TensorMark, made: TensorMark) -> None:
    if isinstance(made.told, Unknown):
        source.node.ends.append(f"it is used for something of which the layout is not known: {made.told.why}")
    else:
        source.node.uses.append((made.node, differing_axes(made.told) - differing_axes(source.told)))
