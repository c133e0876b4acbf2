"""Where full parameters are read from: a Hugging Face folder or model, a dump, a Megatron checkpoint.

A source lists names, shapes and dtypes without reading values, and reads rows of one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_flex.conversion import Heads
from megatron_flex.conversion.architectures import OUTPUT_WEIGHT
from megatron_flex.conversion.checkpoints import (
    CONFIG,
    FolderWeights,
    Index,
    ModelWeights,
    TensorForm,
    Weights,
    dtype_name,
    import_extra,
    read_config,
)
from megatron_flex.conversion.conversion_plan import PlannedParameter
from megatron_flex.conversion.parameter_names import canonical_names
from megatron_flex.conversion.rearrangement import clip_runs
from megatron_flex.conversion.weights import find_architecture, make_plan_maker
from megatron_flex.dump.reader import OpenDump, open_dump
from megatron_flex.dump.schema import MEGATRON
from megatron_flex.errors import FlexError
from megatron_flex.weights.megatron_checkpoint import CheckpointTensors, find_checkpoint
from megatron_flex.weights.parameter_digest import ParameterForm

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = "a Hugging Face folder, a dump, a Megatron checkpoint, or a file of digests"


class WeightSource(Protocol):
    """Full parameters that can be read in rows.

    Attributes:
        where: the folder, or the class of the model.
        heads: the heads of attention; None if they are not known.
        forms: the shape and dtype of each parameter, by the name that a GPTModel with the local spec has.
        stored: the names of the tensors of each.
    """

    where: str
    heads: Heads | None
    forms: Mapping[str, ParameterForm]
    stored: Mapping[str, tuple[str, ...]]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a parameter. They may share memory with the source."""

    def close(self) -> None:
        """Close files."""


class HuggingFaceSource:
    """Weights of Hugging Face, as parameters of a GPTModel by the table of architectures.

    Args:
        weights: the tensors.
        config: the configuration of transformers.

    Raises:
        FlexError: the table has no such architecture, or the tensors are not those of the configuration.
    """

    def __init__(self, weights: Weights, config: Any) -> None:
        self.where, self._weights = weights.where, weights
        maker = make_plan_maker(find_architecture(config), config)
        self.heads: Heads | None = maker.heads
        shapes = maker.list_shapes(weights.forms)
        if config.tie_word_embeddings:
            shapes.pop(OUTPUT_WEIGHT, None)  # the embedding, which a Megatron model has once, too
        if not shapes:
            raise FlexError(
                f"{self.where} has no tensor of a {config.model_type} model, which {CONFIG} names"
            )
        self._planned = maker.match(shapes, weights.forms, weights.where).parameters
        self.forms: Mapping[str, ParameterForm] = {
            name: ParameterForm(planned.shape, DTYPES[weights.forms[planned.parts[0].name].dtype])
            for name, planned in self._planned.items()
        }
        self.stored: Mapping[str, tuple[str, ...]] = {
            name: _name_parts(planned) for name, planned in self._planned.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a parameter, of one tensor or joined from several."""
        planned = self._planned[name]
        rest = tuple(slice(0, n) for n in planned.shape[1:])
        blocks = []
        for run in clip_runs(planned.runs, start, stop):
            part = planned.parts[run.part]
            block = self._weights.read(part.name, part.locate(slice(run.origin, run.origin + run.rows), rest))
            blocks.append(block.T if part.transposed else block)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def close(self) -> None:
        """Close the files."""
        self._weights.close()


def _name_parts(planned: PlannedParameter) -> tuple[str, ...]:
    return tuple(p.name if p.entry is None else f"{p.name}[{p.entry}]" for p in planned.parts)


class _DumpedTensors:
    """The parameters of the last iteration of a dump, as tensors of Hugging Face."""

    def __init__(self, dump: OpenDump) -> None:
        self.where, self._dump = str(dump.path), dump
        self._arrays = {name: dump.parameter(name)[-1] for name in dump.parameters}
        self.forms: Mapping[str, TensorForm] = {
            name: TensorForm(array.shape, dtype_name(array.dtype)) for name, array in self._arrays.items()
        }

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor."""
        return self._arrays[name][index].torch()

    def close(self) -> None:
        """Close the dump."""
        self._dump.close()


class MegatronSource:
    """Full tensors that have Megatron's names.

    Args:
        tensors: the tensors.
        heads: the heads of attention; None if they are not known.
    """

    def __init__(self, tensors: Weights | CheckpointTensors, heads: Heads | None) -> None:
        self.where, self.heads, self._tensors = tensors.where, heads, tensors
        self._stored = {plain: name for name, plain in canonical_names(tensors.forms).items()}
        self.stored: Mapping[str, tuple[str, ...]] = {plain: (name,) for plain, name in self._stored.items()}
        self.forms: Mapping[str, ParameterForm] = {
            plain: ParameterForm(tensors.forms[name].shape, DTYPES[tensors.forms[name].dtype])
            for plain, name in self._stored.items()
            if tensors.forms[name].dtype in DTYPES
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a parameter."""
        form = self.forms[name]
        index = (slice(start, stop), *(slice(0, n) for n in form.shape[1:])) if form.shape else ()
        return self._tensors.read(self._stored[name], index)

    def close(self) -> None:
        """Close files."""
        self._tensors.close()


def read_heads(config: Mapping[str, Any]) -> Heads | None:
    """The heads of attention that a configuration of Megatron has; None if their rows are not known."""
    queries, groups = config.get("num_attention_heads"), config.get("num_query_groups")
    if not isinstance(queries, int) or config.get("attention_output_gate"):
        return None  # a gate has rows beside those of the queries
    grouped = isinstance(groups, int) and config.get("group_query_attention", True)
    return Heads(queries, groups if grouped and isinstance(groups, int) else queries)


def open_source(source: Any) -> WeightSource:
    """Open weights; names and shapes are read, and no values.

    Args:
        source: a folder of Hugging Face, a dump, a Megatron checkpoint, or a model of transformers.

    Raises:
        FlexError: it is something else, damaged, or of an architecture that the table does not have.
    """
    if isinstance(source, nn.Module):
        return HuggingFaceSource(ModelWeights(source), read_config(source))
    if not isinstance(source, str | PathLike):
        raise FlexError(f"a {type(source).__name__} has no weights; give {KINDS}")
    folder = Path(source)
    if not folder.is_dir():
        raise FlexError(f"{folder} is not a folder of weights; give {KINDS}")
    if (folder / CONFIG).is_file():
        return HuggingFaceSource(FolderWeights(folder), read_config(folder))
    checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        tensors = CheckpointTensors(checkpoint)
        return MegatronSource(tensors, read_heads(tensors.arguments))
    if not any(folder.glob("run-*")):
        raise FlexError(f"{folder} has no {CONFIG}, no checkpoint and no run of a dump; give {KINDS}")
    return _open_dumped(folder)


def _open_dumped(folder: Path) -> WeightSource:
    dump = open_dump(folder)
    try:
        if not dump.parameters or not dump.iteration_keys:
            raise FlexError(
                f"{folder} is a dump without parameters; dump them with --flex-dump-parameters '**'"
            )
        model = dump.manifest.model
        if dump.manifest.framework == MEGATRON:
            return MegatronSource(_DumpedTensors(dump), read_heads(model))
        if "model_type" not in model:
            raise FlexError(
                f"{folder} is a dump of neither a Megatron nor a Hugging Face model; give {KINDS}"
            )
        return HuggingFaceSource(_DumpedTensors(dump), _config_of_dump(model))
    except BaseException:
        dump.close()
        raise


def _config_of_dump(model: Mapping[str, Any]) -> Any:
    known = dict(model)
    return import_extra("transformers").AutoConfig.for_model(known.pop("model_type"), **known)
