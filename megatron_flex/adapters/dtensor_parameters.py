"""Parameters that are DTensors: of `fully_shard` (FSDP2), of tensor parallel styles, or of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from megatron_flex.adapters import data_parallel
from megatron_flex.adapters.adapter_base import LocalGradient, Undo
from megatron_flex.adapters.mesh_axes import axes_of_device_mesh
from megatron_flex.adapters.module_names import named_modules
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.parameter_storage import REDUCED_REMEDY, ModuleParameters, StoredParameter
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh

REDUCED_BY_FULLY_SHARD = (
    "fully_shard reduces its gradient past any hook; read get_module_parameter(name, gradient=True) after "
    "the step"
)
DTENSOR_GRADIENT = (
    "its gradient is a DTensor, whose shards no hook gets; read get_module_parameter(name, "
    "gradient=True) after the step"
)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor; torch's module for them is not imported for this."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def fully_shard_modules(chunk: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    # `fully_shard` gives a module another class, which has this; asking a module for what is absent is slow
    return walk_modules(chunk).of_classes(lambda kind: hasattr(kind, "_get_fsdp_state"))


def has_dtensors(chunk: nn.Module) -> bool:
    """Whether parameters are DTensors, or are so while the model runs, or while it does not."""
    walk, kinds = walk_modules(chunk), _dtensor_classes()
    if fully_shard_modules(chunk) or any(_placement_of(p) is not None for p in walk.parameters):
        return True
    # DTensors that modules hold as attributes; classes are asked first, as modules have a million attributes
    in_attributes = bool(kinds) and any(issubclass(kind, kinds) for kind in walk.attribute_classes)
    return in_attributes and any(_placement_of(p) is not None for _, p in _named_parameters(chunk))


def _dtensor_classes() -> tuple[type, ...]:
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return () if tensors is None else (tensors.DTensor,)


class DTensorPlacement(NamedTuple):
    """The placement of a DTensor: identifies it and its shards."""

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _placement_of(parameter: Any) -> DTensorPlacement | None:
    """The placement of a parameter; None if it is replicated."""
    if is_dtensor(parameter):
        return DTensorPlacement(
            parameter.device_mesh, parameter.placements, tuple(parameter.shape), parameter.stride()
        )
    spec = getattr(parameter, "_st_info", None)  # of a DTensor that DistributedDataParallel converted
    if spec is None:
        return None
    return DTensorPlacement(spec.mesh, tuple(spec.placements), tuple(spec.shape), tuple(spec.stride))


def _named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name, each once.

    After a forward pass in DistributedDataParallel, modules have DTensors made from the parameters.
    """
    yielded: set[nn.Parameter] = set()
    kinds = _dtensor_classes()
    for path, module in named_modules(root):
        parameters: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
        dtensors: list[tuple[str, Any]] = [(n, t) for n, t in vars(module).items() if isinstance(t, kinds)]
        for name, tensor in dtensors:
            if tensor.grad_fn is not None:
                made_of = getattr(tensor.grad_fn.next_functions[0][0], "variable", None)
                if hasattr(made_of, "_st_info"):
                    parameters[name] = made_of
        for name, parameter in parameters.items():
            if parameter not in yielded:
                yielded.add(parameter)
                yield f"{path}.{name}" if path else name, parameter


class DTensorParameters(ModuleParameters):
    """DTensors over data or tensor parallel ranks or both, beside replicated parameters.

    Args:
        root: the model without its wrappers.
        mesh: the axes of the run.
        wrappers: the DistributedDataParallel modules around it.
    """

    def __init__(self, root: nn.Module, mesh: Mesh, wrappers: Sequence[DistributedDataParallel] = ()) -> None:
        self.root, self.mesh, self.units, self.wrappers = root, mesh, fully_shard_modules(root), wrappers
        self.name = "fully_shard" if self.units else "DTensor"
        self.why = (
            "fully_shard was called on modules of it" if self.units else "parameters of it are DTensors"
        )
        self._before: bool | str | None = None  # the answer about gradients when they were frozen
        self.wait_until_ready()
        self._reshard()
        named = list(_named_parameters(root))
        self._unknown = {n: type(p).__name__ for n, p in named if is_lazy(p)}
        self._kept = [stored for n, p in named if not is_lazy(p) and (stored := self._keep(n, p)) is not None]

    def _keep(self, name: str, parameter: nn.Parameter) -> StoredParameter | None:
        """The parameter with its layout; None for one that no layout describes."""
        placing = _placement_of(parameter)
        if placing is None:
            return StoredParameter(name, parameter, tuple(parameter.shape))
        dims = [Dim() for _ in placing.shape]
        shape = list(placing.shape)
        placed = self._placed(placing)
        if placed is None:
            over = " and ".join(axis for axis in self._axes(placing) if axis)
            self._unknown[name] = f"DTensor placed as {placing.placements} over {over}"
            return None
        for dim, segment_count, axis in placed:
            size = self.mesh[axis].size
            length = -(-shape[dim] // size)
            keep = None if shape[dim] % size == 0 else shape[dim]
            dims[dim], shape[dim] = Dim("", (Cut(axis),), segments=(1,) * segment_count, keep=keep), length
        hidden = REDUCED_BY_FULLY_SHARD if self.units else DTENSOR_GRADIENT
        return StoredParameter(name, parameter, tuple(shape), hidden, Layout(tuple(dims)), sharded=True)

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """This rank's shard of each DTensor; ranks along a dim that replicates it have copies."""
        shards: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        for stored in self._kept:
            tensor: Any = stored.parameter
            if is_dtensor(tensor):
                places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
                part = tuple(at for at, placement in places if not placement.is_replicate())
                shards[stored.name] = part, tensor.to_local().detach()
        return shards

    def _placed(self, placing: DTensorPlacement) -> list[tuple[int, int, str]] | None:
        """How a parameter is sharded besides data parallel ranks: dim, number of pieces, axis.

        Several pieces are those of packed weights, `[gate | up]`, each sharded separately. None where no
        layout describes it: a dim over two axes, pieces of unequal parts, other kinds of placements.
        """
        cut: set[int] = set()
        sharded_dims = []
        for placement, axis in zip(placing.placements, self._axes(placing), strict=True):
            if axis in ("", "dp") or placement.is_replicate():
                continue
            segment_count = _count_segments(placement)
            dim = placement.dim % len(placing.shape) if segment_count else -1
            even = segment_count == 1 or (
                segment_count and placing.shape[dim] % (segment_count * self.mesh[axis].size) == 0
            )
            if not even or dim in cut:
                return None
            cut.add(dim)
            sharded_dims.append((dim, segment_count, axis))
        return sharded_dims

    def _axes(self, placing: DTensorPlacement) -> list[str]:
        return axes_of_device_mesh(placing.device_mesh, self.mesh)

    def _replicated_placements(self, placing: DTensorPlacement) -> list[Any]:
        """Its placements without the sharding over data parallel ranks."""
        from torch.distributed.tensor import Replicate

        pairs = zip(placing.placements, self._axes(placing), strict=True)
        return [Replicate() if axis in ("", "dp") else placement for placement, axis in pairs]

    # -- reading and setting ---------------------------------------------------------------------------

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The local tensor of the DTensor without data parallel sharding."""
        return self._local(parameter.detach(), parameter)

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to the local shard, which optimizers reference."""
        self._reshard()
        self._write(parameter.detach(), parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The same for the gradient, summed where it is partial.

        Raises:
            FlexError: the wrappers have not reduced it yet.
        """
        self.wait_until_ready()
        if any(_has_unreduced_gradients(group) for group in self._groups()):
            raise FlexError(
                "gradients are kept unreduced since a backward pass after "
                "set_requires_gradient_sync(False); run the last one with True first"
            )
        if parameter.grad is None:
            return LocalGradient(None)
        return LocalGradient(self._local(parameter.grad.detach(), parameter))

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write to the tensor that the optimizer reads."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._write(parameter.grad.detach(), parameter, value)

    def _local(self, tensor: Any, parameter: Any) -> Tensor:
        """This rank's shard of a tensor that is placed like a parameter, or is partial."""
        placing = _placement_of(parameter)
        if placing is None:
            full: Tensor = tensor
            return full
        if not is_dtensor(tensor):
            tensor = _make_dtensor(tensor, placing, placing.placements)
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded
            tensor = tensor.to(tensor.device_mesh.device_type)
        local: Tensor = tensor.redistribute(placements=self._replicated_placements(placing)).to_local()
        shape = self._shape(parameter)
        if tuple(local.shape) != shape:  # the last shards of an uneven dim
            padded = local.new_zeros(shape)
            padded[tuple(slice(n) for n in local.shape)] = local
            return padded
        return local

    def _write(self, into: Any, parameter: Any, value: Tensor) -> None:
        placing = _placement_of(parameter)
        if placing is None:
            into.copy_(value)
            return
        value = value.to(placing.device_mesh.device_type)
        value = value[tuple(slice(n) for n in self._unpadded(parameter, placing))].contiguous()
        full = _make_dtensor(value, placing, self._replicated_placements(placing))
        placements = into.placements if is_dtensor(into) else placing.placements
        part = full.redistribute(placements=placements).to_local()
        (into.to_local() if is_dtensor(into) else into).copy_(part)

    def _shape(self, parameter: Any) -> tuple[int, ...]:
        return next(k.shape for k in self._kept if k.parameter is parameter)

    def _unpadded(self, parameter: Any, placing: DTensorPlacement) -> tuple[int, ...]:
        """This rank's shard of the shape that `value` returns, for an uneven dim."""
        shape = list(self._shape(parameter))
        for dim, _, axis in self._placed(placing) or ():
            at = self.mesh[axis].coord
            shape[dim] = max(0, min(shape[dim], placing.shape[dim] - at * shape[dim]))
        return tuple(shape)

    # -- the wrappers ----------------------------------------------------------------------------------

    def reduced(self, called: bool = False) -> bool | str:
        """True where `fully_shard` or another wrapper averages them; else each replica has its own."""
        if self._before is not None:
            return self._before
        if not self.units:
            return data_parallel.all_synchronized(self.wrappers) if self.wrappers else False
        left_out = [k.name for k in self._kept if not k.sharded and k.parameter.requires_grad]
        if left_out and self.mesh["dp"].size > 1:
            return f"fully_shard leaves out {left_out[0]}; {REDUCED_REMEDY}"
        if any(not getattr(group, "all_reduce_grads", True) for group in self._groups()):
            return f"set_requires_all_reduce(False) leaves replicas apart; {REDUCED_REMEDY}"
        return True

    def wait_until_ready(self) -> None:
        """Raise while the model runs."""
        for unit in self.units:
            states = [unit._get_fsdp_state(), *_parameter_groups(unit)]
            if any(s._training_state.name != "IDLE" for s in states):
                raise FlexError(
                    "fully_shard moves parameters while the model runs; ask for them outside of its forward "
                    "and backward pass"
                )

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and make wrappers wait for no gradient."""
        known = self.reduced()
        thaw = data_parallel.suspend_reduction(self.wrappers)
        self._before = known
        trained = [k.parameter for k in self._kept if k.parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def undo() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)
            thaw()
            self._before = None

        return undo

    def _reshard(self) -> None:
        """Drop gathered parameters of a forward pass, which would not see the new values."""
        for unit in self.units:
            unit.reshard()

    def _groups(self) -> Iterator[Any]:
        for unit in self.units:
            yield from _parameter_groups(unit)


def _count_segments(placement: Any) -> int:
    """The number of pieces of a dim that a placement shards over its axis; 0 if unsupported."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    return int(type(placement) is Shard)


def _make_dtensor(local: Tensor, placing: DTensorPlacement, placements: Sequence[Any]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        placing.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(placing.shape),
        stride=placing.stride,
    )


def _parameter_groups(unit: Any) -> list[Any]:
    """The groups of parameters that are gathered together; older torch has one for each module."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    single = [] if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]
    return list(groups) if groups is not None else single


def _has_unreduced_gradients(group: Any) -> bool:
    """Whether gradients of one backward pass are reduced in a later one."""
    for parameter in group.fsdp_params:
        waiting = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        if waiting is not None or getattr(parameter, "unsharded_accumulated_grad", None) is not None:
            return True
    return False
