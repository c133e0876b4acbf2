"""Models in torch's DistributedDataParallel and FullyShardedDataParallel (FSDP1).

The first has all parameters on each rank and averages gradients during the backward pass. The second
flattens and shards parameters; they are gathered by its own functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.adapter_base import LocalGradient, Undo
from megatron_flex.adapters.module_names import (
    named_modules,
    named_parameters,
    strip_wrapper_names,
)
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.parameter_storage import REDUCED_REMEDY, ModuleParameters, StoredParameter
from megatron_flex.errors import FlexError, list_some

COMM_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."  # these average equally on all replicas:
AVERAGING_HOOKS = (
    *("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"),
    *("quantization_pertensor_hook", "quantization_perchannel_hook", "_reducer_allreduce_and_upcast_hook"),
    "apply_optim_in_backward_hook",
)


def ddp_wrappers_of(chunk: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers around a model or parts of it, the outermost first."""
    wrappers = walk_modules(chunk).of_classes(lambda kind: issubclass(kind, DistributedDataParallel))
    return cast(list[DistributedDataParallel], wrappers)


class DDPParameters(ModuleParameters):
    """Each rank has all of its parameters, and wrappers average their gradients in the backward pass."""

    name = "DistributedDataParallel"

    def __init__(self, root: nn.Module, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().__init__(root)
        self.wrappers = wrappers
        self.why = "it is in torch's DistributedDataParallel"
        self._before: bool | str | None = None  # the answer when the parameters were frozen
        self.scheduled = False  # a pipeline schedule averages with the last microbatch of each step

    def reduced(self, called: bool = False) -> bool | str:
        """True after a backward pass outside of `no_sync()`, if the wrappers have all parameters."""
        if self._before is not None:
            return self._before
        left_out = self._left_out()
        if left_out:
            return f"DistributedDataParallel leaves out {list_some(left_out, 1)}; {REDUCED_REMEDY}"
        return True if self.scheduled else all_synchronized(self.wrappers)

    def _left_out(self) -> list[str]:
        """The trained parameters that no wrapper averages."""
        averaged = {
            p
            for w in self.wrappers
            for n, p in w.module.named_parameters(remove_duplicate=False)
            if n not in w.parameters_to_ignore
        }
        return [n for n, p in named_parameters(self.root) if p.requires_grad and p not in averaged]

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and make the wrappers wait for no gradient, as in `no_sync()`.

        Raises:
            FlexError: a wrapper has a static graph and would record this as its graph.
        """
        known = self.reduced()
        thaw = suspend_reduction(self.wrappers)
        self._before = known
        unfreeze = super().freeze()

        def undo() -> None:
            thaw()
            unfreeze()
            self._before = None

        return undo


def suspend_reduction(wrappers: Sequence[DistributedDataParallel]) -> Undo:
    """Make wrappers wait for no gradient, as in `no_sync()`, until the returned function is called.

    Raises:
        FlexError: a wrapper has a static graph and would record this as its graph.
    """
    for wrapper in wrappers:
        if wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued:
            raise FlexError(
                "DistributedDataParallel(static_graph=True) learns from its first step which gradients "
                "come, so that this cannot be one without any; train one step before freezing"
            )
    before = [(w.require_backward_grad_sync, w.require_forward_param_sync) for w in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False

    def undo() -> None:
        for wrapper, (backward, forward) in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward

    return undo


def all_synchronized(wrappers: Sequence[DistributedDataParallel]) -> bool | str:
    """True if the last backward pass averaged all gradients; as text why that is unknown."""
    # A forward pass records whether its backward pass averages.
    if not all(w.require_backward_grad_sync and w.require_forward_param_sync for w in wrappers):
        return (
            "the model last ran in DistributedDataParallel's no_sync(), which averages no gradients; "
            f"{REDUCED_REMEDY}"
        )
    hooks = (comm_hook for wrapper in wrappers for comm_hook in wrapper._comm_hooks)
    unknown = next((why for hook, state in hooks if (why := _why_not_averaging(hook, state))), "")
    return f"{unknown}; {REDUCED_REMEDY}" if unknown else True


def _why_not_averaging(hook: Any, state: Any) -> str:
    """Why a communication hook may leave different gradients on replicas; empty if it averages them."""
    hook = hook.func if isinstance(hook, partial) else hook
    name, module = getattr(hook, "__name__", type(hook).__name__), getattr(hook, "__module__", "")
    if module.startswith(COMM_HOOKS):
        if name in AVERAGING_HOOKS:
            return ""
        inner = inspect.getclosurevars(hook).nonlocals.get("hook")
        if inner is not None:  # torch's own wrappers of hooks, which compress, or step an optimizer then
            return _why_not_averaging(inner, state)
        if name == "post_localSGD_hook":
            if state.iter < state.start_localSGD_iter:
                return ""
            after = f"after {state.start_localSGD_iter} backward passes"  # at which it counts no further
            return f"{after} post_localSGD_hook averages gradients only inside its subgroups"
    return f"DistributedDataParallel's communication hook {name} does not tell whether it averages gradients"


FLAT_PARAMETER = (
    "_flat_param"  # the name of a wrapped module's only parameter, where the original ones are not kept
)
REDUCED_PAST_HOOKS = (
    "FullyShardedDataParallel reduces its gradient past any hook; read "
    "get_module_parameter(name, gradient=True) after the step"
)
# Communication hooks of torch that average over the process group of their state:
HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"
AVERAGING = ("allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook")


def fsdp_wrappers_of(chunk: nn.Module) -> list[Any]:
    """The wrappers around a model or parts of it, the outermost first."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return walk_modules(chunk).of_classes(lambda kind: issubclass(kind, fsdp.FullyShardedDataParallel))


class ParameterHome(NamedTuple):
    """The location of a parameter.

    Attributes:
        unit: the wrapper that stores it.
        module: the module that has it while it is gathered.
        attribute: its name in the module.
    """

    unit: Any
    module: nn.Module
    attribute: str


class FSDPParameters(ModuleParameters):
    """Wrappers keep the parameters in flat ones, which are sharded.

    Parameters outside of all wrappers are replicated in their modules.
    """

    name = "FullyShardedDataParallel"

    def __init__(self, root: nn.Module, units: list[Any]) -> None:
        self.units, self.why = units, "it is in torch's FullyShardedDataParallel"
        self._places: dict[nn.Parameter, ParameterHome] = {}
        sharded: dict[str, StoredParameter] = {}
        paths = {module: path for path, module in named_modules(root)}
        for unit in units:  # the outermost first, so that they learn their roles
            for stored, place in self._parameters_of_wrapper(unit, paths):
                sharded[stored.name] = stored
                self._places[stored.parameter] = place
        super().__init__(root)
        names = [*(k.name for k in self._kept), *sharded]
        order = {path: i for i, path in enumerate(paths.values())}
        names.sort(key=lambda n: order[n.rpartition(".")[0]])
        full = {k.name: k for k in self._kept if k.name.rpartition(".")[2] != FLAT_PARAMETER}
        self._kept = [k for n in dict.fromkeys(names) if (k := sharded.get(n) or full.get(n)) is not None]

    def _parameters_of_wrapper(
        self, unit: Any, paths: dict[nn.Module, str]
    ) -> Iterator[tuple[StoredParameter, ParameterHome]]:
        """The parameters of one wrapper. Collective over its ranks."""
        inside = list(_modules_of_wrapper(unit.module))
        before = {(m, key) for m in inside for key in m._parameters}
        with self._gathered(unit):
            for module in inside:
                for key, parameter in module._parameters.items():
                    if parameter is None or key == FLAT_PARAMETER:
                        continue
                    if not _uses_original_parameters(unit) and (module, key) in before:
                        continue  # excluded from the flat one
                    path, shape = paths[module], tuple(parameter.shape)
                    if type(parameter.data) is not Tensor:
                        raise FlexError(
                            f"{path}.{key} is a {type(parameter.data).__name__} in FullyShardedDataParallel, "
                            "whose parts are not known together; shard it with fully_shard() instead"
                        )
                    parameter_stand_in = (
                        parameter if _uses_original_parameters(unit) else _placeholder(parameter)
                    )
                    name = f"{path}.{key}" if path else key
                    yield (
                        StoredParameter(name, parameter_stand_in, shape, REDUCED_PAST_HOOKS, sharded=True),
                        ParameterHome(unit, module, key),
                    )

    @contextmanager
    def _gathered(self, unit: Any, write: bool = False, gradients: bool = False) -> Iterator[None]:
        """Gather one wrapper's parameters with PyTorch's own function."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.wait_until_ready()
        with FullyShardedDataParallel.summon_full_params(
            unit, recurse=False, writeback=write, with_grads=gradients
        ):
            yield

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """This rank's part of each flat parameter, by the names in it; hybrid strategies make copies."""
        shards: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        for handle in (h for h in (unit._handle for unit in self.units) if h is not None):
            flat: Any = handle.flat_param
            part = (dist.get_rank(handle.process_group),) if handle.uses_sharded_strategy else ()
            local = getattr(flat, "_local_shard", flat) if part else flat
            shards[", ".join(strip_wrapper_names(n) for n in flat._fqns)] = part, local.detach()
        return shards

    def wait_until_ready(self) -> None:
        """Raise while the model runs."""
        for unit in self.units:
            if unit.training_state.name != "IDLE":
                raise FlexError(
                    "FullyShardedDataParallel gathers no parameters while the model runs; ask outside of its "
                    "forward and backward pass"
                )

    def value(self, parameter: nn.Parameter) -> Tensor:
        place = self._places.get(parameter)
        if place is None:
            return super().value(parameter)
        with self._gathered(place.unit):
            return _gathered_parameter(place).detach().clone()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to the gathered parameter, which PyTorch writes back to each rank's shard."""
        place = self._places.get(parameter)
        if place is None:
            super().set_value(parameter, value)
            return
        with self._gathered(place.unit, write=True), torch.no_grad():
            _gathered_parameter(place).copy_(value)

    def reduced(self, called: bool = False) -> bool | str:
        """True: the wrappers average, and unaveraged gradients are not accessible.

        As text why not, if a wrapper omits parameters, or has a communication hook that may not average.
        """
        left_out = [
            k.name for k in self._kept if k.parameter not in self._places and k.parameter.requires_grad
        ]
        if left_out:
            return f"FullyShardedDataParallel leaves out {left_out[0]}; {REDUCED_REMEDY}"
        return next((why for unit in self.units if (why := _not_averaging(unit))), True)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The gathered gradient.

        Raises:
            FlexError: it is not reduced yet, or cannot be gathered at this time.
        """
        place = self._places.get(parameter)
        if place is None:
            return super().gradient(parameter, reduced)
        if not reduced and _sharded(place.unit):
            raise FlexError(
                "FullyShardedDataParallel keeps no gradients of each rank's own; reduced=True reads"
            )
        with self._with_gradients(place.unit) as gradient_of:
            gradient = gradient_of(place)
            return LocalGradient(None if gradient is None else gradient.detach().clone())

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write to the gathered gradient, which PyTorch writes back to each rank's shard."""
        place = self._places.get(parameter)
        if place is None:
            super().put_gradient(parameter, value, reduced)
            return
        with self._with_gradients(place.unit, write=True) as gradient_of, torch.no_grad():
            gradient = gradient_of(place)
            if gradient is None:
                raise FlexError("the flat parameter has no gradient yet; run a backward pass first")
            gradient.copy_(value)

    @contextmanager
    def _with_gradients(self, unit: Any, write: bool = False) -> Iterator[Any]:
        """Gather one wrapper's gradients: returns a function from a gathered parameter to its gradient."""
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
        # PyTorch gathers no gradients of flat parameters: they temporarily replace the values.
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
        self.wait_until_ready()
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
    """A module and its submodules outside of other wrappers."""
    yield module
    for child in module.children():
        if fsdp_wrappers_of(child)[:1] != [child]:
            yield from _modules_of_wrapper(child)


def _uses_original_parameters(unit: Any) -> bool:
    """Whether the original parameters are kept as views of the flat one."""
    return bool(unit._use_orig_params)


def _sharded(unit: Any) -> bool:
    """Whether the flat parameter and its gradient are sharded."""
    return unit._handle is not None and bool(unit._handle.uses_sharded_strategy)


def _not_averaging(unit: Any) -> str:
    """Why a wrapper's communication hook may not average gradients; empty if it does, or there is none."""
    hook, state = getattr(unit, "_comm_hook", None), getattr(unit, "_comm_hook_state", None)
    if hook is None:
        return ""
    hook = hook.func if isinstance(hook, partial) else hook
    name = getattr(hook, "__name__", type(hook).__name__)
    remedy = "pass reduced=True if it averages them over all" if _sharded(unit) else REDUCED_REMEDY
    if getattr(hook, "__module__", "") != HOOKS or name not in AVERAGING:
        return (
            f"FullyShardedDataParallel's communication hook {name} does not tell whether it averages "
            f"gradients; {remedy}"
        )
    groups = (getattr(state, "process_group", None), unit.process_group)
    averaged_ranks, data_ranks = ({*dist.get_process_group_ranks(g)} for g in groups)
    if averaged_ranks != data_ranks:
        return (
            f"FullyShardedDataParallel's communication hook {name} averages gradients over ranks "
            f"{sorted(averaged_ranks)} of {sorted(data_ranks)}; {remedy}"
        )
    return ""


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """The name of a parameter that exists only while it is gathered."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _gathered_parameter(place: ParameterHome) -> nn.Parameter:
    parameter = place.module._parameters[place.attribute]
    assert parameter is not None
    return parameter
