"""Tensors that are on a CUDA device for Python, and for torch's dispatch, while the host has their bytes.

For torch's C++ they are on `meta:0`: that is another device than the CPU, which it does not allocate, and for
which autograd needs no driver.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.accelerator.collectives import run_collective
from tests.support.accelerator.streams import CUDA, Upload, device_of_process

NATIVE = torch.device("meta", 0)

aten: Any = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
MASKS = (torch.bool, torch.uint8)
DRIVER_BUFFER = 2**16  # bytes
WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.equal.default: "equal",
    aten.allclose.default: "allclose",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
}


def is_device(device: Any) -> bool:
    """Whether an argument of torch names the simulated device."""
    if isinstance(device, torch.device):
        return device.type == "cuda" or device == NATIVE
    return device.startswith("cuda") if isinstance(device, str) else type(device) is int


def native(device: Any) -> Any:
    """The device for torch's C++ in the place of a CUDA device."""
    return NATIVE if is_device(device) else device


class DeviceTensor(Tensor):
    """A tensor of the simulated device.

    Attributes:
        host: its bytes.
        memory: the memory in which they lie.
    """

    host: Tensor
    memory: Any

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> DeviceTensor:
        out: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=NATIVE,
            requires_grad=requires_grad,
        )
        out.host, out.memory = host, device_of_process().memory(host)
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As of any tensor: the same memory, without history."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, new: DeviceTensor) -> None:
        host, memory = new.host, new.memory
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.host, self.memory = host, memory

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        device_of_process().recording.wait("tolist")
        return self.host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return self.host.type().replace("torch.", "torch.cuda.", 1)
        return super().type(*args, **kwargs)

    def record_stream(self, stream: Any) -> None:
        self.memory.streams.add(stream)

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def new_tensor(self, data: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_as_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_as_tensors(index), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = DeviceTensor(self.host.clone(), self.requires_grad and not isinstance(self, nn.Parameter))
            kept = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
            memo[id(self)] = kept
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"{self.host!r} on {CUDA}"


def _as_tensors(index: Any) -> Any:
    """An index with its lists as tensors of the host, as torch's C++ would make them."""
    if isinstance(index, list):
        return torch.tensor(index)
    return tuple(map(_as_tensors, index)) if isinstance(index, tuple) else index


class Dispatch(TorchDispatchMode):
    """Runs all that torch calls in this thread, so that functions without a tensor can name the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation."""
    if func.namespace == "c10d":
        return run_collective(func, args, kwargs, DeviceTensor)
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._to_copy.default and _crosses(args[0], kwargs.get("device")):
        return _to_copy(args[0], **kwargs)
    return _compute(func, args, kwargs)


def _crosses(tensor: Tensor, device: Any) -> bool:
    return device is not None and is_device(device) != isinstance(tensor, DeviceTensor)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    device = device_of_process()
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    given, pinned = kwargs.get("device"), bool(kwargs.get("pin_memory"))
    ours = [t for t in tensors if isinstance(t, DeviceTensor)]
    if ours:
        _check_devices(func, args, [t for t in tensors if not isinstance(t, DeviceTensor)])
        _record_waits(func, args, kwargs)
        for tensor in ours:
            if not device.read(tensor.memory):
                device.recording.violation(f"{func} of a tensor that another stream makes")
    on_device = is_device(given) if given is not None else bool(ours)
    options = {k: torch.device("cpu") if k == "device" and is_device(v) else v for k, v in kwargs.items()}
    if pinned:
        options["pin_memory"] = False
    out = func(*tree_map(_host, args), **tree_map(_host, options))
    written = _returned_arguments(func)
    for place in _written_arguments(func):
        for tensor in tree_leaves(_argument(place, args, kwargs)):
            if isinstance(tensor, DeviceTensor):
                device.wrote(tensor.memory)
                assert tensor.host.shape == tensor.shape, f"{func} changes the shape of its argument"
    if pinned:
        return tree_map(lambda t: device.pin(t) if isinstance(t, Tensor) else t, out)
    if not isinstance(out, (tuple, list)):
        return _returned(out, written[0] if written else None, args, kwargs, on_device)
    if len(out) != len(written):  # a list of tensors
        return [_returned(one, None, args, kwargs, on_device) for one in out]
    return type(out)(_returned(o, w, args, kwargs, on_device) for o, w in zip(out, written, strict=True))


def _returned(out: Any, place: Any, args: Any, kwargs: Any, on_device: bool) -> Any:
    """An output: the argument that was written to, or a tensor of the device if it is one."""
    if place is not None:
        return _argument(place, args, kwargs)
    if isinstance(out, (tuple, list)):
        return [_returned(one, None, args, kwargs, on_device) for one in out]
    if not on_device or not isinstance(out, Tensor):
        return out
    made = DeviceTensor(out)
    if made.memory.stream is None:
        device_of_process().wrote(made.memory)
    return made


@cache
def _written_arguments(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operation writes to: numbers, or names of those that have no number."""
    return tuple(
        argument.name if argument.kwarg_only else number
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _returned_arguments(func: Any) -> tuple[int | str | None, ...]:
    """For each return value the argument that is written to and returned; None for a new tensor."""
    places: dict[str, int | str] = {}
    for place in _written_arguments(func):
        argument = next(a for n, a in enumerate(func._schema.arguments) if place in (n, a.name))
        places.update(dict.fromkeys(argument.alias_info.before_set, place))
    aliases = (r.alias_info.before_set if r.alias_info is not None else () for r in func._schema.returns)
    return tuple(next((places[n] for n in names if n in places), None) for names in aliases)


def _argument(place: int | str, args: Any, kwargs: Any) -> Any:
    return kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None


def _host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _check_devices(func: Any, args: Any, plain: list[Tensor]) -> None:
    """Raise where tensors of the device and of the host cannot be together."""
    assert not any(t.device == NATIVE for t in plain), f"{func}: torch made a tensor past the simulation"
    mixed = [t for t in plain if t.dim() > 0]
    if func in INDEXED and isinstance(args[0], DeviceTensor):  # an index of the host is copied
        values = args[2] if len(args) > 2 else args[0]
        mixed = [values] if not isinstance(values, DeviceTensor) and values.dim() > 0 else []
    elif plain and not isinstance(args[0], DeviceTensor) and 0 in _written_arguments(func):
        mixed = plain
    if mixed:
        text = f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu"
        raise RuntimeError(device_of_process().recording.violation(text))


def _record_waits(func: Any, args: Any, kwargs: Any) -> None:
    recording = device_of_process().recording
    if func in WAITS:
        recording.wait(WAITS[func])
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        recording.wait("repeat_interleave")
    elif func in INDEXED:
        indices = [i for i in args[1] if i is not None]
        if any(not isinstance(i, DeviceTensor) for i in indices):
            recording.wait("an index of the host")
        elif any(i.dtype in MASKS for i in indices):
            filled = len(args) > 2 and args[2].numel() == 1 and len(indices) == 1  # as masked_fill
            if not filled:
                recording.wait("a mask as index")


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy into a tensor, from wherever to wherever."""
    device = device_of_process()
    if isinstance(source, DeviceTensor) and not isinstance(target, DeviceTensor):
        blocking = not (non_blocking and device.is_pinned(target) and target.is_contiguous())
        device.copy_to_host(source.memory, source.host, target, blocking)
        return target
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor):
            _wait_for_upload(source, non_blocking)
        elif not device.read(source.memory):
            device.recording.violation("a copy of a tensor that another stream makes")
        device.wrote(target.memory)
    _host(target).copy_(_host(source))
    return target


def _to_copy(source: Tensor, device: Any, non_blocking: bool = False, **options: Any) -> Tensor:
    """Copy to the other side."""
    options.pop("pin_memory", None)
    if is_device(device):
        _wait_for_upload(source, non_blocking)
        out = DeviceTensor(aten._to_copy.default(source, **options))
        device_of_process().wrote(out.memory)
        return out
    assert isinstance(source, DeviceTensor)
    target = torch.empty_like(source.host, **{"dtype": options.get("dtype") or source.dtype})
    if non_blocking:  # torch pins what it copies to
        device_of_process().pin(target)
    return _copy(target, source, non_blocking)


def _wait_for_upload(source: Tensor, non_blocking: bool) -> None:
    """A copy from the host: only what is pinned, or fits into the driver's own buffer, does not block."""
    device = device_of_process()
    if non_blocking and device.is_pinned(source):
        device.current_stream().pending.append(Upload(source))
    elif not non_blocking or source.nbytes > DRIVER_BUFFER:
        device.recording.wait("a copy from the host")
        device.current_stream().finish()
