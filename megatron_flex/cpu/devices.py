"""Sends what asks for "cuda" to the CPU: factories, `.cuda()`, `.to("cuda")`, pinned memory.

A `TorchFunctionMode` sees every call of torch on its own thread, and only there: a thread that allocates
on "cuda" by name has to enter a `CpuDevices()` itself (`torch.cuda.current_device()` needs none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.data import dataloader

from megatron_flex.cpu.patching import Patches

_CPU = torch.device("cpu")


class CpuDevices(TorchFunctionMode):
    """While it is entered, a CUDA device named in a torch call means the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the few methods that are about the device, and rewrite the arguments of the others."""
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if kwargs:
            kwargs = _redirect_arguments(kwargs)
        for arg in args:  # every call of torch comes by here, attributes of tensors too: nothing is made anew
            if type(arg) is torch.device and arg.type == "cuda":
                args = tuple(_cpu_for(arg) if isinstance(arg, torch.device) else arg for arg in args)
                break
        return func(*args, **kwargs) if kwargs else func(*args)


def _cpu_for(device: Any) -> Any:
    """The CPU where `device` means a CUDA device (by object, name or index), else `device` itself."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _redirect_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None and not kwargs.get("pin_memory"):
        return kwargs
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = _cpu_for(changed["device"])
    # There is no device to copy to, so nothing gains from pinned memory, and allocating it fails.
    changed.pop("pin_memory", None)
    return changed


def _return_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.cuda()`: it is there already."""
    return args[0]


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0], *(_cpu_for(arg) for arg in args[1:2]), *args[2:], **_redirect_arguments(kwargs))


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.type()`: Megatron's optimizer compares the name with "torch.cuda.FloatTensor"."""
    if len(args) == 1 and not kwargs:
        name: str = func(args[0])
        return name.replace("torch.", "torch.cuda.", 1)
    wanted = [arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args[1:]]
    return func(args[0], *wanted, **kwargs)


def _not_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.cuda: _return_tensor,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _return_tensor,
    torch.Tensor.is_pinned: _not_pinned,
}


def _leave_mode(mode: CpuDevices) -> None:
    """Take `mode` out of the stack of this thread, wherever others have pushed theirs since."""
    above: list[Any] = []
    while mode in _get_current_function_mode_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def _enter_mode_in_backward(run: Callable[..., Any], mode: CpuDevices) -> Callable[..., Any]:
    """`run`, with the mode entered: `backward()` passes through a mode, and torch leaves that mode meanwhile.

    Recomputation happens in there, and allocates as the forward pass does.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if mode in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    return run_backward


def _without_pinning(init: Callable[..., None]) -> Callable[..., None]:
    def start(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """Begin to iterate as if the loader had not been asked for pinned memory (it would only warn)."""
        asked, loader.pin_memory = loader.pin_memory, False
        try:
            init(self, loader, *args, **kwargs)
        finally:
            loader.pin_memory = asked

    return start


def install_cpu_devices(patches: Patches) -> None:
    """Enter the mode on this thread, for as long as `patches` stand."""
    mode = CpuDevices()
    _push_mode(mode)
    patches.on_restore(lambda: _leave_mode(mode))
    loading = dataloader._BaseDataLoaderIter
    patches.set(loading, "__init__", _without_pinning(vars(loading)["__init__"]))
    # Bound in both modules, once by import.
    backward = _enter_mode_in_backward(torch.autograd.graph._engine_run_backward, mode)
    for module in (torch.autograd.graph, torch.autograd):
        patches.set_present(module, "_engine_run_backward", backward)
