"""PyTorch's own tensor parallelism: layouts follow from DTensors' placements and parallel styles.

A DTensor at a hook point has its own layout; hooks get its local tensor, and their result continues as a
DTensor of the same placements. A local tensor that leaves a module with a parallel style of
`parallelize_module` is sharded as the style's hooks declare. Between such modules, layouts are propagated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.adapters import huggingface
from megatron_flex.adapters.adapter_base import Adapter, FrameworkMatch, Undo
from megatron_flex.adapters.dtensor_placements import spread_of_placements
from megatron_flex.adapters.layout_rules import FULL, Point, Rule, Spread, UnknownLayout
from megatron_flex.adapters.mesh_axes import (
    AXIS_NAMES,
    mesh_of_device_meshes,
    mesh_uses_in,
)
from megatron_flex.adapters.module_adapter import compose
from megatron_flex.adapters.module_names import named_modules, unwrap
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.taps import add_hook, any_input
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Tap, TapCallbacks


@dataclass(frozen=True)
class ParallelStyle:
    """The arguments of a parallel style's hooks on a module.

    Attributes:
        name: the style's class.
        device_mesh: the mesh of its tensors.
        inputs: the placement of the module's first input as a local tensor; None if that is a DTensor, or
            unchanged.
        outputs: likewise of the output.
        known: whether it is one of torch's own.
        passes: whether it only prepares the input or the output.
    """

    name: str
    device_mesh: Any
    inputs: Any = None
    outputs: Any = None
    known: bool = True
    passes: bool = False


def parallel_styles_of(module: nn.Module) -> Iterator[ParallelStyle]:
    """The arguments of the hooks of `parallelize_module`'s styles, or of `distribute_module`, on a module."""
    sequence = None
    for before, hook in _hooks_with_closures(module):
        closure = dict(
            zip(hook.__code__.co_freevars, (c.cell_contents for c in hook.__closure__), strict=True)
        )
        device_mesh = closure.get("device_mesh")
        if device_mesh is None:
            continue
        style, function = closure.get("self"), closure.get("input_fn" if before else "output_fn")
        if style is not None:  # PrepareModuleInput and PrepareModuleOutput are stored as objects
            name = type(style).__name__
            from_torch = type(style).__module__.startswith("torch.distributed.")
            layouts: Any = getattr(
                style, "desired_input_layouts" if before else "desired_output_layouts", None
            )
            local = bool(layouts) and bool(style.use_local_output)
            placement = layouts[0] if local and from_torch else None
            yield ParallelStyle(
                name,
                device_mesh,
                **{"inputs" if before else "outputs": placement},
                known=from_torch,
                passes=True,
            )
        elif isinstance(function, partial) and function.func.__module__.startswith("torch.distributed."):
            name = function.func.__qualname__.partition(".")[0]
            args = function.args
            if before:
                sequence = args[0][0] if name == "SequenceParallel" else None
                yield ParallelStyle(name, device_mesh)
            elif args[-1]:  # the output is a local tensor
                yield ParallelStyle(name, device_mesh, outputs=args[0][0] if len(args) > 1 else sequence)
            else:
                yield ParallelStyle(name, device_mesh)
        elif function is not None:
            name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
            yield ParallelStyle(name, device_mesh, known=False)


def _hooks_with_closures(module: nn.Module) -> Iterator[tuple[bool, Any]]:
    for before, hooks in ((True, module._forward_pre_hooks), (False, module._forward_hooks)):
        for hook in hooks.values():
            if getattr(hook, "__closure__", None) and hasattr(hook, "__code__"):
                yield before, hook


NAME = "PyTorch tensor parallel"


# -- taps ----------------------------------------------------------------------------------------------


def local_tensors(
    module: Any, callbacks: TapCallbacks, tap: Tap, mesh: Mesh, opened: list[bool], leaf: int = 0
) -> Undo:
    """A tap whose hooks get the local tensor of a DTensor.

    Args:
        module: the module of the tap.
        callbacks: runs the hooks.
        tap: the wrapped tap.
        mesh: the axes of the run.
        opened: not empty while hooks run on the local tensor of a DTensor.
    """
    from torch.distributed.tensor import DTensor

    def open_tensor(tensor: Any, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the hooks on the local tensor of a DTensor; return a DTensor of their result."""
        local = _wait_for(tensor.to_local())
        opened.append(True)
        try:
            return _rebuild_dtensor(tensor, local, run(local))
        finally:
            opened.pop()

    def run_unknown(tensor: Any, why: str) -> Tensor:
        """Run the hooks on a local tensor, or on a DTensor whose placements have no rule."""
        unknown = callbacks.unknown
        if unknown is None:
            return cast(Tensor, tensor)
        style = None if module is None else next((s for s in parallel_styles_of(module) if not s.known), None)
        if style is not None:
            why = f"the parallel style {style.name} of its module has no rule, and {why}"
        if not hasattr(tensor, "placements"):
            return cast(Tensor, unknown(tensor, why))
        return open_tensor(tensor, lambda local: cast(Tensor, unknown(local, why)))

    def run(tensor: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        if not isinstance(tensor, DTensor):
            local = _wait_for(tensor)
            new: Tensor = callbacks.run(local, layout, route)
            return tensor if new is local else new
        spread = spread_of_placements(tensor.placements, tensor.device_mesh, mesh, tensor.shape)
        if isinstance(spread, UnknownLayout):
            return run_unknown(tensor, spread.why)
        layout = spread.layout(tensor.ndim)
        return open_tensor(tensor, lambda local: cast(Tensor, callbacks.run(local, layout, route)))

    def unknown_to_propagation(tensor: Tensor, why: str) -> Tensor:
        return run(tensor) if isinstance(tensor, DTensor) else run_unknown(tensor, why)

    return tap.leaf(leaf).install(TapCallbacks(run, callbacks.absent, unknown_to_propagation))


def open_dtensors(tap: Tap, mesh: Mesh) -> Tap:
    """The tap whose hooks get the local tensors of DTensors, whose layout decides that of the gradient."""
    opened: list[bool] = []
    inner = tap.uses
    around = tap.around(local_tensors, mesh, opened)
    around.uses = None if inner is None else lambda index: None if opened else inner(index)
    return around


def _wait_for(local: Tensor) -> Tensor:
    """The plain tensor, once its asynchronous collective has finished."""
    wait = getattr(local, "trigger_wait", None)
    # The wait is not part of the autograd graph; there, the next function waits by itself.
    return local if wait is None or local.requires_grad else cast(Tensor, wait())


def _rebuild_dtensor(tensor: Any, local: Tensor, new: Tensor) -> Tensor:
    """The hooks' result for the local tensor, as a DTensor; the original DTensor if it is unchanged."""
    from torch.distributed.tensor import DTensor

    if new is local:
        full: Tensor = tensor
        return full
    rebuilt: Tensor = DTensor.from_local(
        new,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return rebuilt


def forward_output(module: nn.Module, callbacks: TapCallbacks) -> Undo:
    """The result of a module's forward, before the hooks of its parallel style convert it."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        new = callbacks.run(output)
        return None if new is output else new

    return add_hook(module, hook, prepend=True)


# -- rules -------------------------------------------------------------------------------------------


class StyleRules:
    """The rules of one model's parallel styles. DTensor parameters have their own layouts."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        """The layouts that a module's styles declare."""
        hf_style = huggingface.transformers_style_of(module)
        if hf_style is not None:
            layout_of = partial(self._local, hf_style[1])
            return huggingface.transformers_rule_of(module, layout_of)
        styles = list(parallel_styles_of(module))
        if all(s.passes or not s.known for s in styles):
            return None  # layouts are propagated inside it
        inputs = next((s for s in styles if s.inputs is not None), None)
        outputs = [s for s in styles if s.outputs is not None]
        rule = Rule(points=tuple(self._points(module, styles)))
        if inputs is not None:
            rule = replace(rule, inputs=self._local(inputs.device_mesh, inputs.inputs))
        if outputs:
            last = outputs[-1]
            rule = replace(rule, outputs=self._local(last.device_mesh, last.outputs, _feature_width(module)))
        return rule

    def sums_gradients(self, module: nn.Module) -> bool:
        """Whether the gradients of its parameters are summed over the ranks after the backward pass."""
        return huggingface.sums_gradients(module)

    def opened(self, tap: Tap) -> Tap:
        """A tap that unwraps DTensors."""
        return open_dtensors(tap, self.mesh)

    def _local(self, device_mesh: Any, placement: Any, width: int | None = None) -> Spread | None:
        spread = spread_of_placements([placement], device_mesh, self.mesh)
        if isinstance(spread, UnknownLayout):
            return None
        ends = width is not None and any(d == -1 and width % self.mesh[a].size for d, a in spread.cuts)
        return replace(spread, uneven=ends)

    def _points(self, module: nn.Module, styles: list[ParallelStyle]) -> Iterator[Point]:
        names = {s.name for s in styles if s.known}
        if not isinstance(module, nn.Linear) or not names & {"ColwiseParallel", "RowwiseParallel"}:
            return
        rows = "RowwiseParallel" in names
        gets = Spread(((-1, "tp"),)) if rows else FULL
        yield Point("gemm_input", gets, Tap(any_input, module))
        if rows:
            yield Point("partial", Spread(partial=("tp",)), Tap(forward_output, module))


def _feature_width(module: nn.Module) -> int | None:
    """The number of output features of a module, where it is a linear or an embedding."""
    width = getattr(module, "out_features", getattr(module, "embedding_dim", None))
    return width if isinstance(width, int) else None


def _dtensor_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own DTensor parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        if hasattr(parameter, "placements"):
            yield name, parameter


# -- detection -----------------------------------------------------------------------------------------


def find_dtensor(
    chunks: list[nn.Module], axis_sizes: Mapping[str, int | None], process_group: Any
) -> FrameworkMatch | None:
    """Claim a module with parallel styles, or with DTensor parameters that are not only sharded by FSDP2."""
    if len(chunks) != 1:
        return None
    root = unwrap(chunks[0])
    why = _why_tensor_parallel(root)
    if not why:
        return None

    def make() -> Adapter:
        mesh = mesh_of_device_meshes(mesh_uses_in(root), axis_sizes, process_group)
        return compose(chunks[0], mesh, StyleRules(mesh), NAME)

    return FrameworkMatch(NAME, why, make)


def _why_tensor_parallel(root: nn.Module) -> str:
    """The evidence that a model is tensor parallel; empty if there is none."""
    walk = walk_modules(root)
    unusual = walk.hooked or walk.with_own_forward
    for path, module in named_modules(root) if unusual else ():
        hf_style = huggingface.transformers_style_of(module)
        if hf_style is not None:
            return (
                f"{path or 'the module'} has the parallel style {type(hf_style[0]).__name__} of transformers"
            )
        style = next(parallel_styles_of(module), None)
        if style is not None:
            return f"{path or 'the module'} has the parallel style {style.name}"
    if not any(hasattr(parameter, "placements") for parameter in walk.parameters):
        return ""
    over_data = any(axis == "dp" for _, axis in mesh_uses_in(root))
    for path, module in named_modules(root):
        for name, parameter in _dtensor_parameters(module):
            names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
            for axis, size in zip(names, parameter.device_mesh.shape, strict=True):
                meaning = AXIS_NAMES.get(axis.lower(), "" if over_data else "tp")
                if size > 1 and meaning in ("tp", "cp"):
                    return f"{path}.{name} is a DTensor over {axis or 'a mesh'} of {size} ranks".lstrip(".")
    return ""
