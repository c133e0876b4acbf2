"""One call of the model with layout propagation, and the uses of a tensor between two hook points."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from megatron_flex.adapters.layout_rules import (
    FULL,
    Rule,
    Spread,
    SpreadOrUnknown,
    UnknownLayout,
    differing_axes,
)
from megatron_flex.adapters.named_inputs import list_head_sizes, name_inputs
from megatron_flex.adapters.propagation.dim_names import (
    HEADS,
    WIDTH,
    Factor,
    NamedDims,
    infer_names,
    keep_where_equal,
    name_dims,
)
from megatron_flex.adapters.propagation.function_call import function_name, iterate_tensors
from megatron_flex.adapters.propagation.function_rules import (
    CHECKPOINT_FUNCTIONS,
    IDENTITY_FUNCTIONS,
    LINEAR_FUNCTIONS,
    PARALLEL_REGIONS,
    infer_spread,
)
from megatron_flex.adapters.propagation.tensor_marks import (
    NO_AXES,
    UNMARKED,
    GradientNode,
    TensorMark,
    TensorMarks,
    is_differentiable,
    normalize_spread,
    placements_of,
    spread_of_dtensor,
    tensor_version,
)
from megatron_flex.adapters.tensor_trees import tensors
from megatron_flex.layout.gradient_layout import GradientEnds

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh


class UseWindow:
    """The uses of a tensor from a hook point to the end of the module whose input it is."""

    def __init__(self, node: GradientNode, module: nn.Module | None, tensor: Tensor) -> None:
        self.node, self.module, self._tensor = node, module, id(tensor)
        self.first = len(node.uses), len(node.ends)
        self.last: tuple[int, int] | None = None

    def close(self, outputs: list[Tensor]) -> None:
        """The module has returned; tensors that it returns unchanged continue to be used."""
        if all(id(t) != self._tensor for t in outputs):
            self.last = len(self.node.uses), len(self.node.ends)

    def find_ends(self) -> GradientEnds:
        """The effect of those uses on its gradient."""
        uses, ends = self.last or (None, None)
        return self.node.among(slice(self.first[0], uses), slice(self.first[1], ends))


DETACHING = frozenset(("detach", "data.get"))


class LayoutTrace(TorchFunctionMode):
    """Marks the results of torch functions, while it is active.

    Args:
        root: the model.
        known: the modules with rules; operations inside them are not traced.
        mesh: the axes of the run.
        spreads: the shardings of parameters, buffers and other tensors of modules, by identity.
        named: the modules whose inputs have dims with known names.

    Attributes:
        marks: the marks of all tensors.
        opaque: the nesting depth of untraced code: modules with rules, custom functions, hooks.
        left: the shardings of the tensors that the call returned.
    """

    def __init__(
        self,
        root: nn.Module,
        known: Mapping[nn.Module, Rule],
        mesh: Mesh,
        spreads: Mapping[int, SpreadOrUnknown],
        named: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self._known, self._mesh, self._held = known, mesh, spreads
        self._named, self._full_heads = named, list_head_sizes(named, 1)
        self._heads = self._full_heads | list_head_sizes(named, mesh["tp"].size)
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

    def run(
        self, entering: list[SpreadOrUnknown], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call the model with tracing; `entering` has the shardings of its first inputs."""
        for index, tensor in enumerate(tensors((args, kwargs))):
            self.enter(tensor, entering[index] if index < len(entering) else FULL)
        entered = module_hooks.register_module_forward_pre_hook(self._before_module)
        naming = [
            m.register_forward_pre_hook(self._name_inputs, with_kwargs=True, prepend=True)
            for m in self._named
        ]
        leaving_hook = module_hooks.register_module_forward_hook(self._leaves)
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
            leaving_hook.remove()
            entered.remove()
            for hook in naming:
                hook.remove()
        for tensor in tensors(output):
            self.mark(tensor).add_final_use(NO_AXES)
            self.left.append(self.mark(tensor).spread)
        return output

    def _name_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._here() and not self.opaque:
            for tensor, names in name_inputs(module, args, kwargs):
                mark = self.mark(tensor)
                mark.names = mark.names or name_dims(tensor.shape, names)

    def names_of(self, tensor: Tensor) -> NamedDims | None:
        """The dims of a tensor; None where nothing is known of them."""
        mark = self.marks.get(tensor)
        return None if mark is None else mark.names

    def heads(self, dims: NamedDims) -> int:
        """The number of heads of the full tensor, in a dim that has them side by side; 0 if not known."""
        parts = self._mesh["tp"].size
        for dim in dims:
            if [f.name for f in dim] == [HEADS, WIDTH]:
                local, width = (f.size for f in dim)
                known = (n for n in (local * parts, local) if self._full_heads.get((n, width)) == HEADS)
                return next(known, local if parts == 1 else 0)
        return 0

    def _mark_local_parts(self) -> Callable[[], None]:
        """Mark the local tensors of DTensors: without autograd, no traced function creates them."""
        placed: Any = sys.modules.get("torch.distributed.tensor")
        if placed is None:
            return lambda: None
        kind, before = placed.DTensor, placed.DTensor.to_local

        def to_local(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            local = before(tensor, *args, **kwargs)
            if self._here() and not self.opaque and not torch.is_grad_enabled():
                mark = self.marks.make(local, spread_of_dtensor(tensor, self._mesh))
                mark.names = _renamed(self.names_of(tensor), local)
            return local

        kind.to_local = to_local

        def undo() -> None:
            kind.to_local = before

        return undo

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def enter(self, tensor: Tensor, spread: SpreadOrUnknown = FULL) -> None:
        """Mark the model's inputs, which all ranks of a sample share unless declared otherwise."""
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
                self.mark(tensor).add_final_use(frozenset(shared))
        self.opaque += 1

    def _leaves(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._here() or module not in self._inside:
            return
        outputs = tensors(output)
        while self._inside:  # also modules inside that raised, for which torch calls no hook
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
        source = next(iterate_tensors(args), None)
        for i, tensor in enumerate(outputs):
            if placements_of(tensor) is not None:
                if not i and not self.opaque:
                    self.mark(tensor).names = self._name_output(module, source, tensor)
                continue
            if i and (tensor in self.marks or id(tensor) in self._held):
                continue  # passed through: it keeps its sharding
            name = f"{self._names.get(module, '')} ({type(module).__name__})"
            spread: SpreadOrUnknown = UnknownLayout(f"{name} returns it, and no rule describes it")
            if i == 0 and rule.outputs is not None:
                spread = normalize_spread(rule.outputs, tensor.ndim)
            names = None if i else self._name_output(module, source, tensor)
            self.marks.make(tensor, spread).names = names

    def _name_output(self, module: nn.Module, source: Tensor | None, output: Tensor) -> NamedDims | None:
        """The dims of the output of a module that is not traced, if it is one of torch's."""
        names = None if source is None else self.names_of(source)
        if names is None:
            return None
        if isinstance(module, nn.Linear):
            return _projected(names, output)
        if isinstance(module, nn.Embedding) and len(names) == output.ndim - 1:
            return _renamed((*names, (Factor("h", output.shape[-1]),)), output)
        return None

    def _normed(self, source: Tensor | None, outputs: list[Tensor], dims: int) -> None:
        """Mark the outputs of a module that works along the last dims, which are therefore not sharded."""
        if source is None or self.opaque or not outputs:
            return
        source_mark = self.mark(source)
        spread = source_mark.spread
        if isinstance(spread, Spread) and (
            spread.partial or any(d >= source.ndim - dims for d, _ in spread.cuts)
        ):
            spread = UnknownLayout("a norm works along dims of which each rank has a part")
        mark = self.marks.make(outputs[0], spread, (source,))
        mark.names = _renamed(source_mark.names, outputs[0])
        _record_use(source_mark, mark)

    # -- marks -----------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> TensorMark:
        """The mark of a tensor."""
        placed = placements_of(tensor)
        if placed is not None:
            known = self.marks.get(tensor)
            return known or self.marks.make(tensor, spread_of_dtensor(tensor, self._mesh))
        mark = self.marks.get(tensor)
        if mark is not None and not isinstance(mark.spread, UnknownLayout):
            return mark
        spread = self._held.get(id(tensor))
        if spread is None and self._holds(tensor):
            spread = FULL
        if spread is not None:
            return self.marks.make(
                tensor, spread if isinstance(spread, UnknownLayout) else normalize_spread(spread, tensor.ndim)
            )
        return mark or self.marks.make(tensor, UNMARKED)

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a running module owns the tensor: parameter storage may replace tensors."""
        return any(
            any(owned is tensor for owned in (*m._parameters.values(), *vars(m).values()))
            for m in self._inside
        )

    def pass_on(self, old: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """A hook has replaced a tensor."""
        if new is old:
            return
        source = self.mark(old)
        spread = spread if isinstance(spread, UnknownLayout) else normalize_spread(spread, new.ndim)
        mark = self.marks.make(new, spread, (old,))
        mark.names = source.names
        source.add_use(mark)

    def window(self, tensor: Tensor, receiver: nn.Module | None) -> UseWindow:
        """The uses of a tensor from now on; only those in one module, if it is that module's input."""
        window = UseWindow(self.mark(tensor).node, receiver, tensor)
        if receiver is not None:
            self._windows.append(window)
        return window

    # -- functions -------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function and mark its results."""
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
        results = (
            got[:1] if name == "setitem" else got if name.startswith("c10d.") else list(iterate_tensors(out))
        )
        if results:
            spread = [(t, m.spread, u) for t, m, u in zip(got, marks, uniform, strict=True)]
            names: list[NamedDims | None] = [None] * len(results)
            if self._named:
                operands = [(t, m.names) for t, m in zip(got, marks, strict=True)]
                names = infer_names(name, args, kwargs, operands, results, self._heads)
            result = infer_spread(name, args, kwargs, spread, results)
            self._made(results, names, got, marks, *result, name in DETACHING)
        return out

    def _made(
        self,
        results: list[Tensor],
        names: list[NamedDims | None],
        got: list[Tensor],
        marks: list[TensorMark],
        spread: SpreadOrUnknown,
        uniform: bool,
        detached: bool,
    ) -> None:
        before = {id(t): m for t, m in zip(got, marks, strict=True)}
        for tensor, dims in zip(results, names, strict=True):
            placed = placements_of(tensor) is not None
            result_spread = spread_of_dtensor(tensor, self._mesh) if placed else spread
            old = before.get(id(tensor))
            if old is not None and result_spread == old.spread and tensor_version(tensor) == old.version:
                continue  # the function returned its argument
            if old is None:
                mark = self.marks.make(tensor, result_spread, got, uniform)
            else:
                mark = self.marks.written(tensor, old, result_spread, uniform)
            mark.names = dims
            if not detached and self._gets_gradient(tensor):
                for source, source_mark in zip(got, marks, strict=True):
                    if self._gets_gradient(source):
                        _record_use(source_mark, mark)

    def _gets_gradient(self, tensor: Tensor) -> bool:
        """Whether gradients flow to a tensor; where nothing is differentiated, whether they could."""
        return is_differentiable(tensor) and (
            tensor.requires_grad or not self._trains or self._recomputed > 0
        )

    def _wrap_apply(self, before: Any) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = before.__get__(None, cls)
            if not self._here() or self.opaque:
                return original(*args, **kwargs)
            if cls.__name__ in CHECKPOINT_FUNCTIONS:
                self._recomputed += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    self._recomputed -= 1
            got = list(iterate_tensors((args, kwargs)))
            marks = [self.mark(t) for t in got]
            self.opaque += 1
            try:
                out = original(*args, **kwargs)
            finally:
                self.opaque -= 1
            self._mark_applied(cls.__name__, marks, list(iterate_tensors(out)))
            return out

        return apply

    def _mark_applied(self, name: str, marks: list[TensorMark], results: list[Tensor]) -> None:
        """Mark the results of a custom function."""
        why = f"it was made by {name}, a custom autograd.Function"
        if name in IDENTITY_FUNCTIONS and len(results) == len(marks):
            for tensor, source_mark in zip(results, marks, strict=True):
                mark = self.marks.make(tensor, source_mark.spread)
                mark.names = source_mark.names
                _record_use(source_mark, mark)
            return
        for tensor in results:
            spread: SpreadOrUnknown = UnknownLayout(why)
            if placements_of(tensor) is not None:
                spread = spread_of_dtensor(tensor, self._mesh)
            elif name == "_ToTorchTensor" and marks:
                spread = marks[0].spread
            elif name in PARALLEL_REGIONS and marks:
                spread = PARALLEL_REGIONS[name](marks[0].spread, tensor.ndim)
                if isinstance(spread, UnknownLayout):  # it may have been made the same on all ranks
                    spread = UnknownLayout(spread.why)
            mark = self.marks.make(tensor, spread)
            if marks and name in (*PARALLEL_REGIONS, "_ToTorchTensor", "_FromTorchTensor"):
                mark.names = _renamed(marks[0].names, tensor)
            elif marks and name in LINEAR_FUNCTIONS:
                mark.names = _projected(marks[0].names, tensor)
            for source_mark in marks:
                if isinstance(spread, UnknownLayout):
                    source_mark.add_final_use(f"it is used by {name}, a custom autograd.Function")
                elif name in PARALLEL_REGIONS or name == "_FromTorchTensor":
                    source_mark.add_final_use(NO_AXES)
                else:
                    _record_use(source_mark, mark)


def _renamed(names: NamedDims | None, tensor: Tensor) -> NamedDims | None:
    """The same dims of a tensor with other lengths: of a shard, or of the full tensor."""
    return None if names is None else keep_where_equal(names, tensor.shape)


def _projected(names: NamedDims | None, output: Tensor) -> NamedDims | None:
    """The dims of the output of a linear, by those of its input."""
    return names and _renamed((*names[:-1], (Factor("", output.shape[-1]),)), output)


def _record_use(source: TensorMark, result: TensorMark) -> None:
    axes = differing_axes(result.spread)
    if axes is not None:
        source.add_use(result, axes - (differing_axes(source.spread) or NO_AXES))
    elif isinstance(result.spread, UnknownLayout):
        source.add_final_use(f"it is used for a tensor of unknown layout: {result.spread.why}")
