"""The CPU wherever a call of torch names a CUDA device: each function that takes a device, and no other.

The functions are replaced where users find them, as attributes of torch, so that every thread has them and
a call of any other function costs nothing. `torch._C._VariableFunctions` and torch's C++ keep the originals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.jit import _builtins as script_builtins
from torch.utils import _device as default_device
from torch.utils.data import dataloader

from megatron_flex.cpu.patches import Patches

# What creates a tensor on the device that an argument names. tests/unit/test_cpu.py compares this list with
# the schemas of the installed torch.
_FACTORIES: tuple[tuple[Any, str], ...] = (
    (torch, "empty empty_like empty_permuted empty_quantized empty_strided eye from_file full full_like"),
    (torch, "ones ones_like zeros zeros_like rand rand_like randint randint_like randn randn_like randperm"),
    (torch, "normal arange range linspace logspace tril_indices triu_indices scalar_tensor tensor as_tensor"),
    (torch, "asarray bartlett_window blackman_window hamming_window hann_window kaiser_window"),
    (torch, "sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor"),
    (torch, "sparse_bsr_tensor sparse_bsc_tensor"),
    (torch.fft, "fftfreq rfftfreq"),
    (torch.nested, "nested_tensor as_nested_tensor"),
    (torch.Tensor, "new new_empty new_empty_strided new_full new_ones new_tensor new_zeros"),
)
_CPU = torch.device("cpu")


def _cpu_for(device: Any) -> Any:
    """The CPU where `device` means a CUDA device (by object, name or index), else `device` itself."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _redirect_keywords(keywords: dict[str, Any]) -> None:
    if "device" in keywords:
        keywords["device"] = _cpu_for(keywords["device"])
    # There is no device to copy to, so nothing gains from pinned memory, and allocating it fails.
    keywords.pop("pin_memory", None)


def _redirect_factory(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def create_on_cpu(*args: Any, **keywords: Any) -> Any:
        if keywords:
            _redirect_keywords(keywords)
        return create(*args, **keywords)

    return create_on_cpu


def _redirect_to(move: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(move)
    def to(tensor: Any, *args: Any, **keywords: Any) -> Any:
        if keywords:
            _redirect_keywords(keywords)
        if args:
            return move(tensor, _cpu_for(args[0]), *args[1:], **keywords)
        return move(tensor, **keywords)

    return to


def _redirect_type(convert: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(convert)
    def type_of_gpu(tensor: Any, *args: Any, **keywords: Any) -> Any:
        # Megatron's optimizer compares the name with "torch.cuda.FloatTensor".
        if not args and not keywords:
            name: str = convert(tensor)
            return name.replace("torch.", "torch.cuda.", 1)
        cpu_args = [arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args]
        return convert(tensor, *cpu_args, **keywords)

    return type_of_gpu


def _return_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def same(tensor: Any, *args: Any, **keywords: Any) -> Any:
        return tensor  # it is there already

    return same


def _not_pinned(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def is_pinned(tensor: Any, *args: Any, **keywords: Any) -> bool:
        return False

    return is_pinned


_METHODS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "to": _redirect_to,
    "type": _redirect_type,
    "cuda": _return_tensor,
    "pin_memory": _return_tensor,
    "is_pinned": _not_pinned,
}


def _redirect_default(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def start(self: Any, device: Any) -> None:
        init(self, _cpu_for(torch.device(device)))

    return start


def _without_pinning(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def start(self: Any, loader: Any, *args: Any, **keywords: Any) -> None:
        """Begin to iterate as if the loader had not been asked for pinned memory (it would only warn)."""
        asked, loader.pin_memory = loader.pin_memory, False
        try:
            init(self, loader, *args, **keywords)
        finally:
            loader.pin_memory = asked

    return start


def _replace_factory(patches: Patches, owner: Any, name: str) -> None:
    """Replace one function that creates tensors, also for `torch.jit.script`, which knows it by identity."""
    original = getattr(owner, name)
    replaced = _redirect_factory(original)
    patches.set(owner, name, replaced)
    operator = script_builtins._find_builtin(original)
    if operator is not None:
        table = script_builtins._get_builtin_table()
        table[id(replaced)] = operator
        patches.on_restore(lambda: table.pop(id(replaced), None))


def install_device_arguments(patches: Patches) -> None:
    """Replace the functions that take a device, until `patches` are restored."""
    # Torch keeps this set once it was asked for; it must hold the functions that its C++ reports.
    default_device._device_constructors()
    for owner, names in _FACTORIES:
        for name in names.split():
            if hasattr(owner, name):  # versions differ in what they have
                _replace_factory(patches, owner, name)
    for name, redirect in _METHODS.items():
        patches.set(torch.Tensor, name, redirect(getattr(torch.Tensor, name)))
    # `with torch.device("cuda")` and `torch.set_default_device` add their device behind the functions above.
    context = default_device.DeviceContext
    patches.set(context, "__init__", _redirect_default(vars(context)["__init__"]))
    loading = dataloader._BaseDataLoaderIter
    patches.set(loading, "__init__", _without_pinning(vars(loading)["__init__"]))
