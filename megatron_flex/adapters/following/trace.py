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

from megatron_flex.adapters.following.call import flat
from megatron_flex.adapters.following.distributed import placements, spread_of_dtensor
from megatron_flex.adapters.following.functions import HANDED_ON, REGIONS, TRANSPARENT
from megatron_flex.adapters.following.marks import (
    NONE,
    UNMARKED,
    Mark,
    Marks,
    axes_of,
    floating,
    normal,
    version,
)
from megatron_flex.adapters.following.names import name_of
from megatron_flex.adapters.following.rules import follow
from megatron_flex.adapters.following.windows import Window
from megatron_flex.adapters.rules import Rule
from megatron_flex.adapters.spread import WHOLE, Spread, Told, Unknown
from megatron_flex.adapters.trees import tensors

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh

DETACHING = frozenset(("detach", "data.get"))


class Trace(TorchFunctionMode):
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
        spreads: Mapping[int, Told],
    ) -> None:
        super().__init__()
        self._known, self._mesh, self._held = known, mesh, spreads
        self._names = {m: n for n, m in root.named_modules()}
        self.marks = Marks()
        self._inside: list[nn.Module] = []
        self._norms: list[Tensor | None] = []
        self._windows: list[Window] = []
        self.opaque = 0
        self.left: list[Told] = []
        self._trains, self._recomputed = torch.is_grad_enabled(), 0
        self._thread = threading.get_ident()

    # -- around the call -------------------------------------------------------------------------------

    def run(self, entering: list[Told], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, following; `entering` tells of its first tensors."""
        for index, tensor in enumerate(tensors((args, kwargs))):
            self.enter(tensor, entering[index] if index < len(entering) else WHOLE)
        entered = module_hooks.register_module_forward_pre_hook(self._enters)
        left = module_hooks.register_module_forward_hook(self._leaves)
        functions: Any = torch.autograd.Function
        before = vars(functions)["apply"]
        functions.apply = classmethod(self._applying(before))
        opened = self._mark_opened()
        try:
            with self:
                output = call(*args, **kwargs)
        finally:
            opened()
            functions.apply = before
            left.remove()
            entered.remove()
        for tensor in tensors(output):
            self.mark(tensor).node.ends.append(NONE)
            self.left.append(self.mark(tensor).told)
        return output

    def _mark_opened(self) -> Callable[[], None]:
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

    def enter(self, tensor: Tensor, told: Told = WHOLE) -> None:
        """Mark what the model is called with, which all ranks of a sample have alike, if nobody says more."""
        if placements(tensor) is None and tensor not in self.marks:
            self.marks.make(tensor, told)

    def _enters(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._here():
            return
        self._inside.append(module)
        rule = self._known.get(module)
        if rule is None:
            return
        if rule.follows:
            self._norms.append(next(flat(args), None))
        elif not self.opaque:
            for i, tensor in enumerate(flat(args)):
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
            if placements(tensor) is not None:
                continue
            if i and (tensor in self.marks or id(tensor) in self._held):
                continue
            name = f"{self._names.get(module, '')} ({type(module).__name__})"
            told: Told = Unknown(f"{name} returns it, of which no rule tells")
            if i == 0 and rule.outputs is not None:
                told = normal(rule.outputs, tensor.ndim)
            self.marks.make(tensor, told)

    def _normed(self, source: Tensor | None, outputs: list[Tensor], dims: int) -> None:
        """A module has worked along the last dims of a tensor, which are then whole on each rank."""
        if source is None or self.opaque or not outputs:
            return
        theirs = self.mark(source)
        told = theirs.told
        if isinstance(told, Spread) and (told.partial or any(d >= source.ndim - dims for d, _ in told.cuts)):
            told = Unknown("a norm works along dims of which each rank has a part")
        mark = self.marks.make(outputs[0], told, (source,))
        _use(theirs, mark)

    # -- marks -----------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> Mark:
        """What is known of a tensor."""
        placed = placements(tensor)
        if placed is not None:
            known = self.marks.get(tensor)
            return known or self.marks.make(tensor, spread_of_dtensor(tensor, self._mesh))
        found = self.marks.get(tensor)
        if found is not None and not isinstance(found.told, Unknown):
            return found
        told = self._held.get(id(tensor))
        if told is None and self._holds(tensor):
            told = WHOLE
        if told is not None:
            return self.marks.make(tensor, told if isinstance(told, Unknown) else normal(told, tensor.ndim))
        return found or self.marks.make(tensor, UNMARKED)

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a module that runs holds it: what keeps parameters may put others in their places."""
        return any(
            any(held is tensor for held in (*m._parameters.values(), *vars(m).values())) for m in self._inside
        )

    def pass_on(self, old: Tensor, new: Tensor, told: Told) -> None:
        """A hook has put another tensor in the place of one."""
        if new is old:
            return
        source = self.mark(old)
        told = told if isinstance(told, Unknown) else normal(told, new.ndim)
        mark = self.marks.make(new, told, (old,))
        source.node.uses.append((mark.node, NONE))

    def window(self, tensor: Tensor, gets: nn.Module | None) -> Window:
        """The uses of a tensor from now on; only those in a module, if that gets it."""
        found = Window(self.mark(tensor).node, gets, tensor)
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
        got = list(flat((args, kwargs)))
        marks = [self.mark(t) for t in got]
        uniform = [m.uniform and m.version == version(t) for t, m in zip(got, marks, strict=True)]
        out = func(*args, **kwargs)
        name = name_of(func)
        if str(getattr(func, "__module__", "")).startswith("torch.distributed."):
            name = f"c10d.{name}"
        made = got[:1] if name == "setitem" else got if name.startswith("c10d.") else list(flat(out))
        if made:
            told = [(t, m.told, u) for t, m, u in zip(got, marks, uniform, strict=True)]
            self._made(made, got, marks, *follow(name, args, kwargs, told, made), name in DETACHING)
        return out

    def _made(
        self,
        made: list[Tensor],
        got: list[Tensor],
        marks: list[Mark],
        told: Told,
        uniform: bool,
        detached: bool,
    ) -> None:
        before = {id(t): m for t, m in zip(got, marks, strict=True)}
        for tensor in made:
            placed = placements(tensor) is not None
            mine = spread_of_dtensor(tensor, self._mesh) if placed else told
            old = before.get(id(tensor))
            if old is not None and mine == old.told and version(tensor) == old.version:
                continue  # it returned what it got
            if old is None:
                mark = self.marks.make(tensor, mine, got, uniform)
            else:
                mark = self.marks.written(tensor, old, mine, uniform)
            if not detached and self._grows(tensor):
                for source, theirs in zip(got, marks, strict=True):
                    if self._grows(source):
                        _use(theirs, mark)

    def _grows(self, tensor: Tensor) -> bool:
        """Whether gradients flow to a tensor; where nothing is differentiated, whether they could."""
        return floating(tensor) and (tensor.requires_grad or not self._trains or self._recomputed > 0)

    def _applying(self, before: Any) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = before.__get__(None, cls)
            if not self._here() or self.opaque:
                return own(*args, **kwargs)
            if cls.__name__ in TRANSPARENT:
                self._recomputed += 1
                try:
                    return own(*args, **kwargs)
                finally:
                    self._recomputed -= 1
            got = list(flat((args, kwargs)))
            marks = [self.mark(t) for t in got]
            self.opaque += 1
            try:
                out = own(*args, **kwargs)
            finally:
                self.opaque -= 1
            self._applied(cls.__name__, marks, list(flat(out)))
            return out

        return apply

    def _applied(self, name: str, marks: list[Mark], made: list[Tensor]) -> None:
        """Mark what a custom function made."""
        why = f"it was made by {name}, a custom autograd.Function"
        if name in HANDED_ON and len(made) == len(marks):
            for tensor, theirs in zip(made, marks, strict=True):
                _use(theirs, self.marks.make(tensor, theirs.told))
            return
        for tensor in made:
            told: Told = Unknown(why)
            if placements(tensor) is not None:
                told = spread_of_dtensor(tensor, self._mesh)
            elif name == "_ToTorchTensor" and marks:
                told = marks[0].told
            elif name in REGIONS and marks:
                told = REGIONS[name](marks[0].told, tensor.ndim)
            mark = self.marks.make(tensor, told)
            for theirs in marks:
                if isinstance(told, Unknown):
                    theirs.node.ends.append(f"it is used by {name}, a custom autograd.Function")
                elif name in REGIONS or name == "_FromTorchTensor":
                    theirs.node.ends.append(NONE)
                else:
                    _use(theirs, mark)


def _use(source: Mark, made: Mark) -> None:
    if isinstance(made.told, Unknown):
        source.node.ends.append(f"it is used for something of which the layout is not known: {made.told.why}")
    else:
        source.node.uses.append((made.node, axes_of(made.told) - axes_of(source.told)))
