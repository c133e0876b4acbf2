"""Tensors for presets: masks of chosen entries, constants on a device, shape checks, files.

Files are `.safetensors`, and `.pt` loaded without running code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.errors import HookError, suggest_nearest
from megatron_flex.runtime import Captures
from megatron_flex.runtime.selection.entry_selection import UNKNOWN_TEXT
from megatron_flex.wording import count_words

Indices = int | slice | Sequence[int]


def mask_along(
    inputs: Tensor, dim: int, indices: Indices, what: str, width: int = 1, length: int | None = None
) -> Tensor:
    """The chosen entries of a dim, as booleans that broadcast to the tensor.

    Args:
        inputs: the tensor.
        dim: the index of the dim.
        indices: the entries; negative ones count from the end.
        what: their name in messages.
        width: the number of entries for each index.
        length: the dim's full length, where `inputs` is a shard.

    Raises:
        HookError: an index is out of range.
    """
    size = (inputs.shape[dim] if length is None else length) // width
    if isinstance(indices, slice):
        chosen = tuple(range(*indices.indices(size)))
    else:
        given = (indices,) if isinstance(indices, int) else tuple(indices)
        wrong = [i for i in given if not -size <= i < size]
        if wrong:
            raise HookError(
                f"{what}: {wrong[0]} is beyond a dim of {size}; name some from {-size} to {size - 1}"
            )
        chosen = tuple(i % size for i in given)
    mask = _make_mask(size, chosen, width, inputs.device)
    return mask.view([-1 if i == dim else 1 for i in range(inputs.ndim)])


def find_in_call(positions: Indices, first: int, length: int) -> tuple[int, ...]:
    """The chosen tokens of a call that continues a text, counted from the call's first token.

    Args:
        positions: the chosen tokens of the text; negative ones count from its end.
        first: the number of tokens in earlier calls, -1 if unknown.
        length: the number of tokens in this call.

    Raises:
        HookError: a position is beyond the text, or the number of tokens in earlier calls is unknown.
    """
    if first < 0:
        raise HookError(f"positions: {UNKNOWN_TEXT}")
    end = first + length
    if isinstance(positions, slice):
        chosen: Sequence[int] = range(*positions.indices(end))
    else:
        given = (positions,) if isinstance(positions, int) else tuple(positions)
        wrong = [i for i in given if not -end <= i < end]
        if wrong:
            raise HookError(
                f"positions: {wrong[0]} is beyond a text of {end}; name some from {-end} to {end - 1}"
            )
        chosen = [i % end for i in given]
    return tuple(i - first for i in chosen if i >= first)


@lru_cache(maxsize=256)
def _make_mask(size: int, chosen: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[list(chosen)] = True
        return mask.repeat_interleave(width).to(device)


class DeviceConstant:
    """A constant tensor on the device and in the dtype of another; copied there once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._moved: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, inputs: Tensor) -> Tensor:
        """The tensor on the device and in the dtype of `inputs`."""
        if self.tensor.requires_grad:  # not constant then: the converted tensor has a graph
            return self.tensor.to(inputs.device, inputs.dtype)
        at = inputs.device, inputs.dtype
        if at not in self._moved:
            with torch.inference_mode(False):
                self._moved[at] = self.tensor.detach().to(*at)
        return self._moved[at]


def check_broadcast(tensor: Tensor, full: Tensor | Sequence[int], what: str) -> Tensor:
    """The tensor, which must have the given full shape, or broadcast to it.

    Raises:
        HookError: it does not.
    """
    shape = tuple(full.shape if isinstance(full, Tensor) else full)
    try:
        good = torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        good = False
    if not good:
        raise HookError(
            f"{what} of shape {tuple(tensor.shape)} does not fit a tensor of shape {shape}; "
            "give one of that shape, or of its last dims"
        )
    return tensor


SAFETENSORS_MISSING = "{path} needs the package safetensors: pip install safetensors, or give a .pt file"


def read_tensor_file(path: str | Path) -> Any:
    """The content of a file: tensors by name, or for a `.pt` file whatever was saved.

    Raises:
        HookError: there is no such file, its type is unknown, or safetensors is not installed.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".pt"):
        raise HookError(f"{path}: a file of tensors is a .safetensors or a .pt file")
    if not path.is_file():
        raise HookError(f"no file {path} on this rank; every rank that runs the edit reads it")
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    return _import_safetensors(path).load_file(path)


def read_tensor(path: str | Path) -> Tensor:
    """The only tensor of a file, or with `file#name` the one of that name.

    Raises:
        HookError: there are several and none is named, or the name does not exist.
    """
    file, _, name = str(path).partition("#")
    content = read_tensor_file(file)
    if isinstance(content, Tensor):
        return content
    tensors = (
        {n: t for n, t in content.items() if isinstance(t, Tensor)} if isinstance(content, Mapping) else {}
    )
    if name and name not in tensors:
        raise HookError(f"{file} has no tensor {name!r}{suggest_nearest(name, tensors)}")
    if not name and len(tensors) != 1:
        count = count_words(len(tensors), "tensor")
        raise HookError(f"{file} holds {count}; name one of them after a #: {file}#name")
    return tensors[name or next(iter(tensors))]


def write(captures: Captures, path: str | Path) -> None:
    """Write captures to a file for `patch`, on the rank that has them; other ranks do nothing.

    Of several steps the last one is written.

    Args:
        captures: `flex.output_dict`.
        path: a `.safetensors` or `.pt` file.

    Examples:
        >>> with attach(chunks, [HookFunction("decoder.layers.2")]) as flex:
        ...     train_step(chunks)
        ...     edits.write(flex.output_dict, "clean.safetensors")
        >>> edit = HookFunction("decoder.layers.2", edits.patch("clean.safetensors"))
        >>> with attach(chunks, [edit]):
        ...     train_step(chunks)
    """
    out = {}
    for site, readings in captures.items():
        last = max(k.step for k in readings.keys)
        for key, tensor in zip(readings.keys, readings, strict=True):
            if key.step == last:
                out[f"{site}#{key.microbatch}" + (f".{key.call}" if key.call else "")] = tensor.contiguous()
    if not out:
        return
    if Path(path).suffix == ".pt":
        torch.save(out, path)
    else:
        _import_safetensors(path).save_file(out, path)


def group_by_pass(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Names such as `site#2` or `site#2.1`, parsed: site to (microbatch, call) to tensor."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        site, mark, number = name.rpartition("#")
        if not mark:
            out[name] = tensor
            continue
        microbatch, _, call = number.partition(".")
        out.setdefault(site, {})[int(microbatch), int(call or 0)] = tensor
    return out


def _import_safetensors(path: str | Path) -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError:
        raise HookError(SAFETENSORS_MISSING.format(path=path)) from None
