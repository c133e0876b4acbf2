"""Full parameters of a Megatron checkpoint in the format torch_dist, without Megatron and without ranks.

The checkpoint has one tensor for a parameter of all layers, and of all experts of a layer; both are dims of
it. They are taken apart here, and the parts of all ranks are joined, one parameter at a time.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.conversion.checkpoints import Index, TensorForm, dtype_name
from megatron_flex.errors import FlexError, describe_error

LATEST, DISTRIBUTED, COMMON = "latest_checkpointed_iteration.txt", ".metadata", "common.pt"
COMMON_STATE = "common_state/"  # of newer versions: the arguments, in the files of the tensors
STACKED = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<after>(?!\d).+)")  # layers are the first dim
EXPERTS = ".mlp.experts.experts."  # experts are the next dim
IGNORED = re.compile(r"optimizer\.|.*optimizer\.state|.*_extra_state|rng_state|rerun_state_machine_state")

RECORDS = "torch.distributed.checkpoint.metadata"  # a module of dataclasses and enumerations
PLAIN_CLASSES = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class StoredSlice(NamedTuple):
    """A full parameter in a tensor of the checkpoint: the entries of the first dims that it has."""

    tensor: str
    entries: tuple[int, ...]


def find_checkpoint(folder: Path) -> Path | None:
    """The folder of a checkpoint's files: this one, or that of the newest iteration; None if it has none.

    Raises:
        FlexError: the checkpoint is of another format, or the newest iteration is missing.
    """
    if (folder / DISTRIBUTED).is_file():
        return folder
    if not (folder / LATEST).is_file():
        return None
    word = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    newest = folder / (f"iter_{int(word):07d}" if word.isdecimal() else "release")
    if not newest.is_dir():
        raise FlexError(
            f"{folder / LATEST} names iteration {word[:20]!r}, and {newest} is not there; copy it again"
        )
    if not (newest / DISTRIBUTED).is_file():
        raise FlexError(
            f"{newest} has no {DISTRIBUTED}: it is not in the format torch_dist; save it with "
            "--ckpt-format torch_dist"
        )
    return newest


class CheckpointTensors:
    """The parameters of a checkpoint, each as one full tensor.

    Args:
        folder: the folder of one iteration.

    Attributes:
        where: the folder.
        forms: the shape and dtype of each parameter, by its global name.
        arguments: Megatron's arguments of the run; empty if the checkpoint has none.

    Raises:
        FlexError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        self.where, self._folder = str(folder), folder
        try:
            metadata: Any = _PlainUnpickler(io.BytesIO((folder / DISTRIBUTED).read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise ValueError("it has no record of tensors")
        except Exception as error:  # raised again: pickle raises many kinds for damaged files
            raise FlexError(
                f"{folder / DISTRIBUTED} is damaged ({describe_error(error)}); copy it again"
            ) from error
        self._metadata: Any = metadata
        self._slices: dict[str, StoredSlice] = {}
        forms: dict[str, TensorForm] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not IGNORED.match(key):
                for name, stored in _take_apart(key, tuple(entry.size)):
                    shape = tuple(entry.size)[len(stored.entries) :]
                    self._slices[name] = stored
                    forms[name] = TensorForm(shape, dtype_name(entry.properties.dtype))
        self.forms: Mapping[str, TensorForm] = forms
        self.arguments = self._read_arguments()
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a parameter, which is kept until another one is read."""
        if self._last is None or self._last[0] != name:
            self._last = None  # frees it before the next one is read
            self._last = name, self._join(name)
        return self._last[1][index]

    def close(self) -> None:
        """Free the last parameter."""
        self._last = None

    def _join(self, name: str) -> Tensor:
        """Join the parts of all ranks."""
        stored = self._slices[name]
        entry = self._metadata.state_dict_metadata[stored.tensor]
        depth = len(stored.entries)
        full = torch.empty(tuple(entry.size)[depth:], dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            spans = list(zip(chunk.offsets, chunk.sizes, strict=True))
            if all(at <= n < at + size for n, (at, size) in zip(stored.entries, spans[:depth], strict=True)):
                part = self._read_chunk(stored.tensor, chunk.offsets)
                inside = tuple(n - at for n, (at, _) in zip(stored.entries, spans[:depth], strict=True))
                full[tuple(slice(at, at + size) for at, size in spans[depth:])] = part[inside]
        return full

    def _read_chunk(self, key: str, offsets: Any) -> Tensor:
        content = self._read_bytes(key, offsets)
        try:
            tensor: Tensor = torch.load(  # noqa: TID251  # Megatron writes these files by torch.save; only weights are read
                io.BytesIO(content), map_location="cpu", weights_only=True
            )
        except Exception as error:  # raised again: torch.load raises many kinds for damaged files
            raise FlexError(
                f"{key} in {self._folder} is damaged ({describe_error(error)}); copy it again"
            ) from error
        return tensor

    def _read_bytes(self, key: str, offsets: Any = None) -> bytes:
        """The bytes that a rank wrote for a part of a tensor, or for an object."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._metadata.storage_data[MetadataIndex(key, offsets)]
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content: bytes = file.read(info.length)
        except OSError as error:
            raise FlexError(f"{path}: {error.strerror or error}; copy the checkpoint again") from None
        if len(content) < info.length:
            raise FlexError(f"{path} ends within {key}; copy the checkpoint again")
        return content

    def _read_arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments, of which only plain values are read: nothing in the file is executed."""
        common = self._folder / COMMON
        key = next((k for k in self._metadata.state_dict_metadata if k.startswith(COMMON_STATE)), None)
        if key is None and not common.is_file():
            return {}
        content = common.read_bytes() if key is None else self._read_bytes(key)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
                state = _PlainUnpickler(io.BytesIO(archive.read(name))).load()
        except Exception as error:  # of zipfile and pickle, which raise many kinds for damaged files
            where = common if key is None else key
            raise FlexError(
                f"{where} in {self._folder} is damaged ({describe_error(error)}); copy it again"
            ) from error
        state = state[0] if isinstance(state, list) and state else state
        arguments = state.get("args") if isinstance(state, dict) else None
        return vars(arguments) if isinstance(arguments, argparse.Namespace) else {}


def _take_apart(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredSlice]]:
    """The parameters in a tensor of the checkpoint: one, or one for each layer and expert."""
    stacked = STACKED.fullmatch(key)
    names: list[tuple[str, tuple[int, ...]]] = [(key, ())]
    if stacked is not None:
        names = [(f"{stacked['before']}.{n}.{stacked['after']}", (n,)) for n in range(shape[0])]
    for name, entries in names:
        if EXPERTS not in name:
            yield name, StoredSlice(key, entries)
            continue
        before, _, after = name.partition(EXPERTS)
        for expert in range(shape[len(entries)]):
            plain = f"{before}.mlp.experts.local_experts.{expert}.{after}"
            yield plain, StoredSlice(key, (*entries, expert))


class _Unknown:
    """What stands in place of an object of a class that is not imported."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values and records of them, and calls nothing else that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        """The classes of plain values and of records of tensors; a stand-in for all others."""
        if (module, name) in PLAIN_CLASSES:
            return super().find_class(module, name)
        if module == RECORDS:  # and not what that module imports
            value = getattr(import_module(RECORDS), name, None)
            return value if getattr(value, "__module__", "") == RECORDS else _Unknown
        value = getattr(torch, name, None) if module == "torch" else None
        return value if isinstance(value, torch.dtype) else _Unknown

    def persistent_load(self, pid: Any) -> Any:
        """No storage of tensors is read."""
        return _Unknown()
