"""PyTorch's own tensor parallelism: layouts are what DTensors' placements and parallel styles say.

A DTensor that passes a hook tells its layout itself; hooks get its local part, and what they make of it goes
on as a DTensor of the same placements. A local tensor that leaves a module with a parallel style lies as the
style says. What lies between such modules is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.adapters import transformers_tp
from megatron_flex.adapters.base import Adapter, Undo
from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.device_mesh import AXIS_NAMES, axes_of_device_mesh, mesh_of_device_meshes, mesh_uses_in
from megatron_flex.adapters.inert import behind
from megatron_flex.adapters.leaves import AnyInput
from megatron_flex.adapters.module_names import named_modules, unwrap
from megatron_flex.adapters.adapter_registry import Found
from megatron_flex.adapters.rules import Point, Rule
from megatron_flex.adapters.spread import WHOLE, Spread, SpreadOrUnknown, Unknown
from megatron_flex.adapters.styles import ParallelStyle, parallel_styles_of
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import TapCallback, Tap

NAME = "PyTorch tensor parallel"


# -- placements ----------------------------------------------------------------------------------------


def spread_of_placements(
    placements: Sequence[Any],
    device_mesh: Any,
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Any] | None = None,
) -> SpreadOrUnknown:
    """How the local part of a DTensor lies on the ranks of one sample.

    Args:
        placements: the DTensor's.
        device_mesh: likewise.
        mesh: the axes of the run.
        shape: the DTensor's, where it is known: parts of a dim that does not divide differ in length.
        grad_placements: what `to_local` was told of the gradient.

    Raises:
        FlexError: the DeviceMesh has a dim that is no axis of the run.
    """
    cuts: list[tuple[int, str]] = []
    partial_: list[str] = []
    shared: list[str] = []
    uneven = False
    back = grad_placements or (None,) * len(placements)
    for axis, placement, grad in zip(axes_of_device_mesh(device_mesh, mesh), placements, back, strict=True):
        if not axis:
            continue
        why = _why_no_layout(axis, placement)
        if why:
            return Unknown(f"it is a DTensor with {placement!r} over {axis}, {why}")
        if placement.is_partial():
            partial_.append(axis)
        elif placement.is_shard() and axis != "dp":
            cuts.append((placement.dim, axis))
            uneven = uneven or (shape is not None and shape[placement.dim] % mesh[axis].size != 0)
        elif axis != "dp" and grad is not None and grad.is_partial():
            shared.append(axis)
    return Spread(tuple(cuts), tuple(partial_), tuple(shared), uneven)


def _why_no_layout(axis: str, placement: Any) -> str:
    """Why a placement over an axis has no layout, if so."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return ""
    if isinstance(placement, _StridedShard):
        return "whose parts are cut in several pieces each, which no rule tells; redistribute it to a Shard"
    if isinstance(placement, Shard):
        if axis == "pp" or (axis == "dp" and placement.dim != 0):
            return "which is no way to lay the tensors of one sample"
        return ""
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "" if axis != "dp" else "a sum over replicas, not one replica's own tensor; redistribute it"
    if isinstance(placement, Partial):
        return "which becomes a tensor of its own only when it is reduced; redistribute it first"
    return f"a {type(placement).__name__} without a rule"


# -- taps ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class DTensorTap:
    """Another tap; of a DTensor that passes it hooks see the local part.

    Attributes:
        tap: the other tap.
        mesh: the axes of the run.
        opened: whether what passes now is the local part of a DTensor.
    """

    tap: Any
    mesh: Mesh
    opened: bool = False

    @property
    def module(self) -> nn.Module | None:
        """The module that the other tap stands at."""
        return getattr(self.tap, "module", None)

    def leaf(self, index: int) -> DTensorTap:
        """The tap at another tensor of the same call."""
        return replace(self, tap=self.tap.leaf(index))

    def gradient(self, layout: Layout) -> Callable[[], Layout | str]:
        """What tells the gradient's layout: a DTensor's is placed like it, and whole where it is a sum."""
        tell: Callable[[Layout], Callable[[], Layout | str]] | None = getattr(self.tap, "gradient", None)
        return layout.gradient if tell is None or self.opened else tell(layout)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        undo: Undo = self.tap.install(_DTensorFire(fire, self))
        return undo

    def open(self, tensor: Any, pass_on: Callable[[Tensor], Tensor]) -> Tensor:
        """Pass on the local part of a DTensor; a DTensor of what comes of that."""
        local, before = _wait_for(tensor.to_local()), self.opened
        self.opened = True
        try:
            return _rebuild_dtensor(tensor, local, pass_on(local))
        finally:
            self.opened = before


class _DTensorFire:
    """What the other tap calls."""

    def __init__(self, fire: TapCallback, tap: DTensorTap) -> None:
        self.fire, self.tap = fire, tap
        self.absent = getattr(fire, "absent", None)

    def __call__(self, tensor: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Pass a tensor on, the local part of a DTensor."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            here = _wait_for(tensor)
            new = self.fire(here, layout, route)
            return tensor if new is here else new
        spread = spread_of_placements(tensor.placements, tensor.device_mesh, self.tap.mesh, tensor.shape)
        if isinstance(spread, Unknown):
            return self._unknown(tensor, spread.why)
        layout = spread.layout(tensor.ndim)
        return self.tap.open(tensor, lambda local: self.fire(local, layout, route))

    def unknown(self, tensor: Tensor, why: str) -> Tensor:
        """Pass a tensor on of which following does not tell how it lies on the ranks."""
        from torch.distributed.tensor import DTensor

        return self(tensor) if isinstance(tensor, DTensor) else self._unknown(tensor, why)

    def _unknown(self, tensor: Any, why: str) -> Tensor:
        """Pass on a local tensor, or a DTensor whose placements have no rule."""
        unknown: Callable[[Tensor, str], Tensor] | None = getattr(self.fire, "unknown", None)
        if unknown is None:
            return cast(Tensor, tensor)
        module = self.tap.module
        style = None if module is None else next((s for s in parallel_styles_of(module) if not s.known), None)
        if style is not None:
            why = f"the parallel style {style.name} of its module has no rule, and {why}"
        if not hasattr(tensor, "placements"):
            return unknown(tensor, why)
        return self.tap.open(tensor, lambda local: unknown(local, why))


def _wait_for(local: Tensor) -> Tensor:
    """A tensor itself, once the collective is over that makes it."""
    wait = getattr(local, "trigger_wait", None)
    # What is waited for has no part in the graph of gradients; there, the next function waits by itself.
    return local if wait is None or local.requires_grad else cast(Tensor, wait())


def _rebuild_dtensor(tensor: Any, local: Tensor, new: Tensor) -> Tensor:
    """What hooks made of the local part of a DTensor, as a DTensor; itself if they left it as it is."""
    from torch.distributed.tensor import DTensor

    if new is local:
        whole: Tensor = tensor
        return whole
    made: Tensor = DTensor.from_local(
        new,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """What a module itself computes, before the hooks that already stand there turn it into its output.

    Attributes:
        module: the module.
    """

    module: nn.Module

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` right behind the module's forward."""

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            new = fire(output)
            return None if new is output else new

        return behind(self.module, hook, prepend=True)


# -- rules -------------------------------------------------------------------------------------------


class StyleRules:
    """The rules of one model's parallel styles. Its DTensor parameters tell their layouts themselves."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def of(self, path: str, module: nn.Module) -> Rule | None:
        """What a module's styles tell."""
        theirs = transformers_tp.transformers_style_of(module)
        if theirs is not None:
            tell = partial(self._local, theirs[1])
            return transformers_tp.transformers_rule_of(module, tell)
        styles = list(parallel_styles_of(module))
        if all(s.passes or not s.known for s in styles):
            return None  # what it does inside is followed
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
        """Whether the gradients of its parameters are summed over the ranks behind the backward pass."""
        return transformers_tp.sums_gradients(module)

    def opened(self, tap: Tap) -> Tap:
        """A tap that opens DTensors."""
        return DTensorTap(tap, self.mesh)

    def _local(self, device_mesh: Any, placement: Any, width: int | None = None) -> Spread | None:
        spread = spread_of_placements([placement], device_mesh, self.mesh)
        if isinstance(spread, Unknown):
            return None
        ends = width is not None and any(d == -1 and width % self.mesh[a].size for d, a in spread.cuts)
        return replace(spread, uneven=ends)

    def _points(self, module: nn.Module, styles: list[ParallelStyle]) -> Iterator[Point]:
        names = {s.name for s in styles if s.known}
        if not isinstance(module, nn.Linear) or not names & {"ColwiseParallel", "RowwiseParallel"}:
            return
        rows = "RowwiseParallel" in names
        gets = Spread(((-1, "tp"),)) if rows else WHOLE
        yield Point("gemm_input", gets, AnyInput(module))
        if rows:
            yield Point("partial", Spread(partial=("tp",)), ForwardOutput(module))


def _feature_width(module: nn.Module) -> int | None:
    """The number of features that a module returns, where it is a linear or an embedding."""
    width = getattr(module, "out_features", getattr(module, "embedding_dim", None))
    return width if isinstance(width, int) else None


def _dtensor_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own DTensor parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        if hasattr(parameter, "placements"):
            yield name, parameter


# -- finding -------------------------------------------------------------------------------------------


def find_dtensor(chunks: list[nn.Module], axis_sizes: Mapping[str, int | None], process_group: Any) -> Found | None:
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

    return Found(NAME, why, make)


def _why_tensor_parallel(root: nn.Module) -> str:
    """What shows that a model is tensor parallel; empty if nothing does."""
    for path, module in named_modules(root):
        theirs = transformers_tp.transformers_style_of(module)
        if theirs is not None:
            return f"{path or 'the module'} has the parallel style {type(theirs[0]).__name__} of transformers"
        style = next(parallel_styles_of(module), None)
        if style is not None:
            return f"{path or 'the module'} has the parallel style {style.name}"
    over_data = any(axis == "dp" for _, axis in mesh_uses_in(root))
    for path, module in named_modules(root):
        for name, parameter in _dtensor_parameters(module):
            names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
            for axis, size in zip(names, parameter.device_mesh.shape, strict=True):
                meaning = AXIS_NAMES.get(axis.lower(), "" if over_data else "tp")
                if size > 1 and meaning in ("tp", "cp"):
                    return f"{path}.{name} is a DTensor over {axis or 'a mesh'} of {size} ranks".lstrip(".")
    return ""
