"""Tensors for presets, from files: `.safetensors`, and `.pt` without running what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.errors import HookError, suggest_nearest
from megatron_flex.runtime import Captures

SAFETENSORS_MISSING = "{path} needs the package safetensors: pip install safetensors, or give a .pt file"


def read_tensor_file(path: str | Path) -> Any:
    """What a file holds: tensors by name, or of a `.pt` file whatever was saved.

    Raises:
        HookError: there is no such file, it is neither, or safetensors is not installed.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".pt"):
        raise HookError(f"{path}: a file of tensors is a .safetensors or a .pt file")
    if not path.is_file():
        raise HookError(f"no file {path} on this rank; every rank that runs the edit reads it")
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    return _import_safetensors(path).load_file(path)


def read_tensor(path: str | Path) -> Tensor:
    """The one tensor of a file, or with `file#name` the one of that name.

    Raises:
        HookError: there are several and none is named, or it is not there.
    """
    file, _, name = str(path).partition("#")
    found = read_tensor_file(file)
    if isinstance(found, Tensor):
        return found
    tensors = {n: t for n, t in found.items() if isinstance(t, Tensor)} if isinstance(found, Mapping) else {}
    if name and name not in tensors:
        raise HookError(f"{file} has no tensor {name!r}{suggest_nearest(name, tensors)}")
    if not name and len(tensors) != 1:
        raise HookError(f"{file} holds {len(tensors)} tensors; name one of them behind a #: {file}#name")
    return tensors[name or next(iter(tensors))]


def write(captures: Captures, path: str | Path) -> None:
    """Write what was read to a file for `patch`, on the rank that has it; on others nothing is done.

    Of several steps the last one is written.

    Args:
        captures: `flex.output_dict`.
        path: a `.safetensors` or `.pt` file.
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
    """Names such as `site#2` or `site#2.1` sorted out: site to (microbatch, call) to tensor."""
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
