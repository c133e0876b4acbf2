"""Weights of Hugging Face: a folder of safetensors, or a model in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_flex.errors import FlexError, describe_error

Index = tuple[int | slice, ...]
CONFIG, TENSORS, TENSORS_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
MAX_FILE_BYTES = 5 * 10**9  # bytes of one written file, which its writer holds in memory
INSTALL = "pip install 'megatron-flex[huggingface]'"


class TensorForm(NamedTuple):
    """The shape and the dtype of a stored tensor; safetensors' name of the dtype."""

    shape: tuple[int, ...]
    dtype: str


class Weights(Protocol):
    """Weights of Hugging Face that can be read in slices.

    Attributes:
        where: the folder or the class of the model, for messages.
        forms: the shape and dtype of each tensor.
    """

    where: str
    forms: Mapping[str, TensorForm]

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor, as `tensor[index]`. It may share memory with its source."""

    def close(self) -> None:
        """Close files."""


class FolderWeights:
    """The weights of a folder as `save_pretrained` writes it: one file, or several with an index.

    Files are memory-mapped: what is not read in `read` is not read from the disk.
    """

    def __init__(self, folder: Path) -> None:
        safetensors = import_extra("safetensors")
        self.where = str(folder)
        self.forms: Mapping[str, TensorForm] = {}
        self._files: dict[Path, Any] = {}
        self._of: dict[str, Any] = {}
        for path in _list_files(folder):
            try:
                file = safetensors.safe_open(path, framework="pt")
            except Exception as error:  # the library's own kinds of errors, for damaged files
                raise FlexError(
                    f"{path} is not a complete safetensors file ({error}); copy it again"
                ) from error
            self._files[path] = file
            for name in file.keys():  # noqa: SIM118 - the file has no iterator
                tensor = file.get_slice(name)
                self._of[name] = tensor
                self.forms[name] = TensorForm(tuple(tensor.get_shape()), tensor.get_dtype())

    def read(self, name: str, index: Index) -> Tensor:
        return cast(Tensor, self._of[name][index])

    def close(self) -> None:
        """Close the files."""
        self._of.clear()
        self._files.clear()


class ModelWeights:
    """The weights of a model in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.where = type(model).__name__
        self._tensors: dict[str, Tensor] = dict(model.state_dict())
        for name, tensor in self._tensors.items():
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
                kind = "without memory, on meta" if tensor.is_meta else f"a {type(tensor).__name__}"
                raise FlexError(f"{name} of {self.where} is {kind}; give a model that is on one device")
        self.forms: Mapping[str, TensorForm] = {
            n: TensorForm(tuple(t.shape), dtype_name(t.dtype)) for n, t in self._tensors.items()
        }

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor, a view."""
        return self._tensors[name].detach()[index]

    def write(self, name: str, index: Index, value: Tensor) -> None:
        """Write a part of a tensor in place."""
        with torch.no_grad():
            self._tensors[name][index].copy_(value)

    def close(self) -> None:
        """Nothing is open."""


class FolderWriter:
    """Writes tensors to a folder as `save_pretrained` does, in the given order, in files of limited size.

    The index and the configuration come last: a folder without them was not finished.

    Args:
        folder: the folder; made if it does not exist.
        config: the configuration to write.

    Raises:
        FlexError: the folder has weights already.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        check_empty(folder)
        self._folder, self._config = folder, config
        self._held: dict[str, Tensor] = {}
        self._parts: list[tuple[Path, list[str]]] = []
        self._bytes = self._total = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write a file if those held would exceed its size."""
        if self._held and self._bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f".part-{len(self._parts)}"
        import_extra("safetensors.torch").save_file(self._held, path, metadata={"format": "pt"})
        self._parts.append((path, list(self._held)))
        self._held, self._bytes = {}, 0

    def finish(self) -> None:
        """Write what is held, name the files, and write the index and the configuration."""
        self._flush()
        count = len(self._parts)
        names = (
            [TENSORS]
            if count == 1
            else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        )
        weight_map = {}
        for (path, tensors), name in zip(self._parts, names, strict=True):
            os.replace(path, self._folder / name)
            weight_map.update(dict.fromkeys(tensors, name))
        if count > 1:
            text = json.dumps(
                {"metadata": {"total_size": self._total}, "weight_map": weight_map}, indent=2, allow_nan=False
            )
            (self._folder / TENSORS_INDEX).write_text(text, encoding="utf-8")
        self._config.save_pretrained(self._folder)

    def abandon(self) -> None:
        """Remove the unfinished files."""
        for path, _ in self._parts:
            path.unlink(missing_ok=True)


def check_empty(folder: Path) -> None:
    """Validate that a folder has no weights.

    Raises:
        FlexError: it has.
    """
    if weights_file := next(folder.glob("*.safetensors*"), None):
        raise FlexError(f"{weights_file} already exists; name a folder without weights")


def open_weights(source: Any) -> FolderWeights | ModelWeights:
    """The weights of a folder or a model.

    Raises:
        FlexError: the source is neither, or the folder has no safetensors.
    """
    if isinstance(source, nn.Module):
        return ModelWeights(source)
    return FolderWeights(folder_of(source))


def folder_of(source: Any) -> Path:
    """The path of a folder that exists.

    Raises:
        FlexError: there is no such folder. Nothing is downloaded.
    """
    if not isinstance(source, str | os.PathLike):
        raise FlexError(f"a {type(source).__name__} is neither a model of transformers nor a folder of one")
    folder = Path(source)
    if not folder.is_dir():
        raise FlexError(f"{folder} is not a folder; download the model first, nothing is downloaded here")
    return folder


def read_config(source: Any) -> Any:
    """The configuration of a model, of a folder, or itself.

    Raises:
        FlexError: the source has none.
    """
    if hasattr(source, "model_type"):
        return source
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        if not hasattr(config, "model_type"):
            raise FlexError(f"{type(source).__name__} has no configuration of transformers")
        return config
    folder = folder_of(source)
    if not (folder / CONFIG).is_file():
        raise FlexError(f"{folder} has no {CONFIG}: give the folder that save_pretrained wrote")
    kinds = import_extra("transformers")
    try:
        return kinds.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise FlexError(f"{folder / CONFIG}: {error}") from error


def count_tokens(source: Any) -> int | None:
    """The number of tokens of the tokenizer in a folder; None if it has none that is a JSON file."""
    if isinstance(source, nn.Module) or not (folder_of(source) / TOKENIZER).is_file():
        return None
    path = folder_of(source) / TOKENIZER
    tokenizer = _read_object(path)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in tokenizer.get("added_tokens", ())]
        return 1 + max(map(index, [*numbers, *added]), default=-1)
    except (AttributeError, KeyError, TypeError) as error:
        raise FlexError(f"{path}: has no vocabulary with a number of each token; copy it again") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype, such as `BF16`."""
    return {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


def import_extra(name: str) -> Any:
    """Import a package of the extra `huggingface`.

    Raises:
        FlexError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise FlexError(f"{name.partition('.')[0]} is not installed; {INSTALL}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        FlexError: the file cannot be read, or has something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FlexError(f"{path}: is not JSON ({describe_error(error)}); copy the file again") from error
    if not isinstance(value, dict):
        raise FlexError(f"{path}: is JSON, but not an object; copy the file again")
    return value


def _read_indexed_files(index: Path) -> list[str]:
    """The names of the files that an index of weights refers to."""
    weight_map = _read_object(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    plain = [n for n in names if isinstance(n, str) and n and "\0" not in n and Path(n).name == n]
    if not plain or len(plain) < len(names):
        raise FlexError(
            f"{index}: its weight_map does not map each tensor to a file in the folder; copy the file again"
        )
    return sorted(set(plain))


def _list_files(folder: Path) -> Iterable[Path]:
    index = folder / TENSORS_INDEX
    if index.is_file():
        names = _read_indexed_files(index)
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            raise FlexError(f"{folder} lacks {gone[0]}, which its index names; copy it again")
        return [folder / name for name in names]
    if (folder / TENSORS).is_file():
        return [folder / TENSORS]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FlexError(
            f"{folder} has no *.safetensors; load the model with transformers, write it by save_pretrained"
        )
    return files
