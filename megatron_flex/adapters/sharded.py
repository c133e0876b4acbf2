"""Parameters that are DTensors: of `fully_shard` (FSDP2), of tensor parallel styles, or of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megatron_flex.adapters.base import LocalGradient, Undo
from megatron_flex.adapters.device_mesh import axes_of
from megatron_flex.adapters.keeping import SAY_REDUCED, Kept
from megatron_flex.adapters.naming import named_parameters
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh

BESIDE = (
    "fully_shard reduces its gradient past any hook; read get_module_parameter(name, gradient=True) after "
    "the step"
)
WRAPPED = (
    "its gradient comes as a DTensor, whose parts no hook is told; read get_module_parameter(name, "
    "gradient=True) after the step"
)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is one; torch's module of them is not imported for this."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def units_of(chunk: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [m for m in chunk.modules() if hasattr(m, "_get_fsdp_state")]


def has_dtensors(chunk: nn.Module) -> bool:
    """Whether parameters are DTensors, or would be if the model did not run."""
    return bool(units_of(chunk)) or any(is_dtensor(p) for p in chunk.parameters())


class Sharded:
    """DTensors over data or tensor parallel ranks or both, beside parameters that every rank has."""

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self.root, self.mesh, self.units = root, mesh, units_of(root)
        self.name = "fully_shard" if self.units else "DTensor"
        self.why = (
            "fully_shard was called on modules of it" if self.units else "parameters of it are DTensors"
        )
        self.settle()
        self._reshard()
        named = list(named_parameters(root))
        self._lazy = {n: type(p).__name__ for n, p in named if is_lazy(p)}
        self._kept = [self._keep(n, p) for n, p in named if not is_lazy(p)]

    def _keep(self, name: str, parameter: nn.Parameter) -> Kept:
        if not is_dtensor(parameter):
            return Kept(name, parameter, tuple(parameter.shape))
        dims = [Dim() for _ in parameter.shape]
        shape = list(parameter.shape)
        for placement, axis in self._placed(name, parameter):
            dim, size = placement.dim, self.mesh[axis].size
            length = -(-shape[dim] // size)
            keep = None if shape[dim] % size == 0 else shape[dim]
            dims[dim], shape[dim] = Dim("", (Cut(axis),), keep=keep), length
        hidden = BESIDE if self.units else WRAPPED
        return Kept(name, parameter, tuple(shape), hidden, Layout(tuple(dims)), sharded=True)

    def _placed(self, name: str, parameter: Any) -> Iterator[tuple[Any, str]]:
        """The placements that cut a parameter over other than data parallel ranks.

        Raises:
            FlexError: it is cut in a way that no layout tells.
        """
        from torch.distributed.tensor import Shard

        cut: set[int] = set()
        for placement, axis in zip(parameter.placements, self._axes(parameter), strict=True):
            if axis in ("", "dp") or placement.is_replicate():
                continue
            if type(placement) is not Shard or placement.dim in cut:
                raise FlexError(
                    f"{name} is placed as {parameter.placements} over {axis}, and how that cuts it is not "
                    "known; cut each dim over one axis of the mesh, in equal parts"
                )
            cut.add(placement.dim)
            yield placement, axis

    def _axes(self, parameter: Any) -> list[str]:
        return axes_of(parameter.device_mesh, self.mesh)

    def _whole(self, parameter: Any) -> list[Any]:
        """Its placements without what shards it over data parallel ranks."""
        from torch.distributed.tensor import Replicate

        pairs = zip(parameter.placements, self._axes(parameter), strict=True)
        return [Replicate() if axis in ("", "dp") else placement for placement, axis in pairs]

    # -- reading and setting ---------------------------------------------------------------------------

    def parameters(self) -> list[Kept]:
        """All but those of lazy modules that have not run."""
        return self._kept

    def without_layout(self) -> dict[str, str]:
        """Those of lazy modules."""
        return self._lazy

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The local part of the DTensor that it is without data parallel sharding."""
        return self._local(parameter.detach(), parameter)

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into the local shard, where optimizers know it."""
        self._reshard()
        self._write(parameter.detach(), parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Likewise of the gradient, summed where it is still summands.

        Raises:
            FlexError: the wrappers have not reduced it yet.
        """
        self.settle()
        if any(_waits(group) for group in self._groups()):
            raise FlexError(
                "gradients are kept unreduced since a backward pass behind "
                "set_requires_gradient_sync(False); run the last one with True first"
            )
        if parameter.grad is None:
            return LocalGradient(None)
        return LocalGradient(self._local(parameter.grad.detach(), parameter))

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write where the optimizer reads."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._write(parameter.grad.detach(), parameter, value)

    def _local(self, tensor: Any, parameter: Any) -> Tensor:
        """This rank's part of a tensor that is placed like a parameter, or is summands of it."""
        if not is_dtensor(tensor):
            return tensor  # type: ignore[no-any-return]
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded
            tensor = tensor.to(tensor.device_mesh.device_type)
        local: Tensor = tensor.redistribute(placements=self._whole(parameter)).to_local()
        due = self._shape(parameter)
        if tuple(local.shape) != due:  # the last parts of what does not divide
            padded = local.new_zeros(due)
            padded[tuple(slice(n) for n in local.shape)] = local
            return padded
        return local

    def _write(self, into: Any, parameter: Any, value: Tensor) -> None:
        if not is_dtensor(into):
            into.copy_(value)
            return
        from torch.distributed.tensor import DTensor

        value = value.to(into.device_mesh.device_type)
        value = value[tuple(slice(n) for n in self._unpadded(parameter))].contiguous()
        whole = DTensor.from_local(
            value,
            into.device_mesh,
            self._whole(parameter),
            run_check=False,
            shape=into.shape,
            stride=into.stride(),
        )
        into.to_local().copy_(whole.redistribute(placements=into.placements).to_local())

    def _shape(self, parameter: Any) -> tuple[int, ...]:
        return next(k.shape for k in self._kept if k.parameter is parameter)

    def _unpadded(self, parameter: Any) -> tuple[int, ...]:
        """This rank's part of the shape that `value` gives, where that does not divide."""
        shape = list(self._shape(parameter))
        for placement, axis in self._placed("", parameter):
            dim, at = placement.dim, self.mesh[axis].coord
            shape[dim] = max(0, min(shape[dim], parameter.shape[dim] - at * shape[dim]))
        return tuple(shape)

    # -- the wrappers ----------------------------------------------------------------------------------

    def reduced(self) -> bool | str | None:
        """True where `fully_shard` averages them; each replica's own otherwise."""
        if not self.units:
            return False
        left = [k.name for k in self._kept if not k.sharded and k.parameter.requires_grad]
        if left and self.mesh["dp"].size > 1:
            return f"fully_shard leaves out {left[0]}; {SAY_REDUCED}"
        if any(not getattr(group, "all_reduce_grads", True) for group in self._groups()):
            return f"set_requires_all_reduce(False) leaves replicas apart; {SAY_REDUCED}"
        return True

    def settle(self) -> None:
        """Refuse while the model runs."""
        for unit in self.units:
            states = [unit._get_fsdp_state(), *_groups_of(unit)]
            if any(s._training_state.name != "IDLE" for s in states):
                raise FlexError(
                    "fully_shard moves parameters while the model runs; ask for them outside of its forward "
                    "and backward pass"
                )

    def freeze(self) -> Undo:
        """Turn `requires_grad` off."""
        trained = [k.parameter for k in self._kept if k.parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def undo() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)

        return undo

    def _reshard(self) -> None:
        """Drop what is gathered since a forward pass, which would not see what is set."""
        for unit in self.units:
            unit.reshard()

    def _groups(self) -> Iterator[Any]:
        for unit in self.units:
            yield from _groups_of(unit)


def _groups_of(unit: Any) -> list[Any]:
    """The groups of parameters that are gathered together; older torch has one for each module."""
    state = unit._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    one = [] if many is not None else [g for g in (state._fsdp_param_group,) if g is not None]
    return list(many) if many is not None else one


def _waits(group: Any) -> bool:
    """Whether gradients of one backward pass wait for a later one to be reduced."""
    return any(getattr(p, "unsharded_accumulated_grad", None) is not None for p in group.fsdp_params)
