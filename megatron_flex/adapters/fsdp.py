"""Models in torch's FullyShardedDataParallel (FSDP1), by its own ways of gathering what it flattens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import LocalGradient, Undo
from megatron_flex.adapters.parameter_storage import SAY_REDUCED, Kept, ModuleParameters
from megatron_flex.adapters.module_names import named_modules
from megatron_flex.errors import FlexError

FLAT_PARAMETER = "_flat_param"  # what a wrapped module's only parameter is called, where the original ones are not kept
REDUCED_PAST_HOOKS = (
    "FullyShardedDataParallel reduces its gradient past any hook; read "
    "get_module_parameter(name, gradient=True) after the step"
)


def fsdp_wrappers_of(chunk: nn.Module) -> list[Any]:
    """The wrappers around a model or parts of it, the outermost first."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        [] if fsdp is None else [m for m in chunk.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    )


class ParameterHome(NamedTuple):
    """Where a parameter is.

    Attributes:
        unit: the wrapper that keeps it.
        module: the module that has it while it is gathered.
        own: its name there.
    """

    unit: Any
    module: nn.Module
    own: str


class FSDPParameters(ModuleParameters):
    """Wrappers keep the parameters in flat ones, of which each rank has a part.

    Parameters that no wrapper keeps are in their modules, whole.
    """

    name = "FullyShardedDataParallel"

    def __init__(self, root: nn.Module, units: list[Any]) -> None:
        self.units, self.why = units, "it is in torch's FullyShardedDataParallel"
        self._places: dict[nn.Parameter, ParameterHome] = {}
        found: dict[str, Kept] = {}
        paths = {module: path for path, module in named_modules(root)}
        for unit in units:  # the outermost first, which thereby learn that they are
            for kept, place in self._parameters_of_wrapper(unit, paths):
                found[kept.name] = kept
                self._places[kept.parameter] = place
        super().__init__(root)
        names = [*(k.name for k in self._kept), *found]
        order = {path: i for i, path in enumerate(paths.values())}
        names.sort(key=lambda n: order[n.rpartition(".")[0]])
        whole = {k.name: k for k in self._kept if k.name.rpartition(".")[2] != FLAT_PARAMETER}
        self._kept = [k for n in dict.fromkeys(names) if (k := found.get(n) or whole.get(n)) is not None]

    def _parameters_of_wrapper(self, unit: Any, paths: dict[nn.Module, str]) -> Iterator[tuple[Kept, ParameterHome]]:
        """What one wrapper keeps. Collective over its ranks."""
        inside = list(_modules_of_wrapper(unit.module))
        before = {(m, own) for m in inside for own in m._parameters}
        with self._gathered(unit):
            for module in inside:
                for own, parameter in module._parameters.items():
                    if parameter is None or own == FLAT_PARAMETER:
                        continue
                    if not _uses_original_parameters(unit) and (module, own) in before:
                        continue  # left out of the flat one
                    path, shape = paths[module], tuple(parameter.shape)
                    if type(parameter.data) is not Tensor:
                        raise FlexError(
                            f"{path}.{own} is a {type(parameter.data).__name__} in FullyShardedDataParallel, "
                            "whose parts are not known together; shard it with fully_shard() instead"
                        )
                    parameter_stand_in = parameter if _uses_original_parameters(unit) else _placeholder(parameter)
                    name = f"{path}.{own}" if path else own
                    yield Kept(name, parameter_stand_in, shape, REDUCED_PAST_HOOKS, sharded=True), ParameterHome(unit, module, own)

    @contextmanager
    def _gathered(self, unit: Any, write: bool = False, gradients: bool = False) -> Iterator[None]:
        """Have one wrapper's parameters whole, by PyTorch's own way."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.settle()
        with FullyShardedDataParallel.summon_full_params(
            unit, recurse=False, writeback=write, with_grads=gradients
        ):
            yield

    def settle(self) -> None:
        """Refuse while the model runs."""
        for unit in self.units:
            if unit.training_state.name != "IDLE":
                raise FlexError(
                    "FullyShardedDataParallel gathers no parameters while the model runs; ask outside of its "
                    "forward and backward pass"
                )

    def value(self, parameter: nn.Parameter) -> Tensor:
        """It is gathered."""
        place = self._places.get(parameter)
        if place is None:
            return super().value(parameter)
        with self._gathered(place.unit):
            return _gathered_parameter(place).detach().clone()

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into what is gathered, which goes back into each rank's part."""
        place = self._places.get(parameter)
        if place is None:
            super().put(parameter, value)
            return
        with self._gathered(place.unit, write=True), torch.no_grad():
            _gathered_parameter(place).copy_(value)

    def reduced(self) -> bool | str | None:
        """True: the wrappers average, and keep what they have not averaged where nobody can read it."""
        left = [k.name for k in self._kept if k.parameter not in self._places and k.parameter.requires_grad]
        return f"FullyShardedDataParallel leaves out {left[0]}; {SAY_REDUCED}" if left else True

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """It is gathered.

        Raises:
            FlexError: it is not reduced yet, or cannot be gathered at this moment.
        """
        place = self._places.get(parameter)
        if place is None:
            return super().gradient(parameter, reduced)
        if not reduced:
            raise FlexError(
                "FullyShardedDataParallel keeps no gradients of each rank's own; reduced=True reads"
            )
        with self._with_gradients(place.unit) as gradient_of:
            found = gradient_of(place)
            return LocalGradient(None if found is None else found.detach().clone())

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into what is gathered, which goes back into each rank's part."""
        place = self._places.get(parameter)
        if place is None:
            super().put_gradient(parameter, value)
            return
        with self._with_gradients(place.unit, write=True) as gradient_of, torch.no_grad():
            found = gradient_of(place)
            if found is None:
                raise FlexError("there is no gradient to be set in a flat one; run a backward pass first")
            found.copy_(value)

    @contextmanager
    def _with_gradients(self, unit: Any, write: bool = False) -> Iterator[Any]:
        """Have one wrapper's gradients whole: what gives a gathered parameter's."""
        flat: Any = unit._handle.flat_param
        if flat.grad is not None and flat.grad.shape != flat._local_shard.shape:
            raise FlexError(
                "gradients are kept unreduced since a backward pass in FullyShardedDataParallel's no_sync(); "
                "run the last one outside of it first"
            )
        if _uses_original_parameters(unit):
            with self._gathered(unit, write, gradients=True):
                yield lambda place: _gathered_parameter(place).grad
            return
        if flat.grad is None:
            yield lambda place: None
            return
        if flat.data.shape != flat.grad.shape:
            raise FlexError(
                "FullyShardedDataParallel(use_orig_params=False) has left its parameters gathered after a "
                "forward pass and gathers no gradients then; read them before that, or set "
                "use_orig_params=True"
            )
        # PyTorch gathers no gradients of flat parameters: they take the place of the values for a moment.
        values = flat.data.clone()
        try:
            flat.data.copy_(flat.grad)
            with self._gathered(unit, write):
                yield _gathered_parameter
            if write:
                flat.grad.copy_(flat.data)
        finally:
            flat.data.copy_(values)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, of flat parameters too."""
        self.settle()
        frozen = [p for p in self._places if p.requires_grad]
        flat = [f for u in self.units if u._handle is not None and (f := u._handle.flat_param).requires_grad]
        unfreeze = super().freeze()
        for parameter in (*frozen, *flat):
            parameter.requires_grad_(False)

        def undo() -> None:
            unfreeze()
            for parameter in (*frozen, *flat):
                parameter.requires_grad_(True)

        return undo


def _modules_of_wrapper(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those below it that no other wrapper keeps."""
    yield module
    for child in module.children():
        if fsdp_wrappers_of(child)[:1] != [child]:
            yield from _modules_of_wrapper(child)


def _uses_original_parameters(unit: Any) -> bool:
    """Whether the original parameters are kept as views of the flat one."""
    return bool(unit._use_orig_params)


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """What a parameter goes by that exists only while it is gathered."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _gathered_parameter(place: ParameterHome) -> nn.Parameter:
    found = place.module._parameters[place.own]
    assert found is not None
    return found
