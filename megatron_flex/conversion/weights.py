"""Weights of Hugging Face into a Megatron model of any layout, and back.

A rank reads the blocks of the files that its own shards consist of, straight into its parameters.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, detect, list_model_chunks
from megatron_flex.adapters.megatron_core import MegatronAdapter
from megatron_flex.collectives import (
    broadcast_object,
    gather_distinct,
    gather_objects,
    gather_reports,
    max_over_ranks,
)
from megatron_flex.conversion.architecture_arguments import MegatronArguments
from megatron_flex.conversion.architectures import ARCHITECTURES, REFUSED, HuggingFaceArchitecture
from megatron_flex.conversion.checkpoints import (
    FolderWriter,
    ModelWeights,
    TensorForm,
    Weights,
    count_tokens,
    open_weights,
    read_config,
)
from megatron_flex.conversion.conversion_plan import (
    ConversionPlan,
    PlanMaker,
    PlannedParameter,
    blocks_of,
    check_entries,
)
from megatron_flex.conversion.mcore_bridge_models import check_source, check_target, find_bridge
from megatron_flex.conversion.model_settings import check_structure, compare_settings
from megatron_flex.conversion.rearrangement import Heads, clip_runs
from megatron_flex.errors import FlexError, FlexWarning, describe_error
from megatron_flex.layout import Layout, full_shape
from megatron_flex.layout.spans import spans
from megatron_flex.progress import format_bytes
from megatron_flex.runtime.full_parameters import ParameterIndex, ParameterRequest, gather_all_parameters
from megatron_flex.wording import count_words

PADDED = ParameterRequest(padded=True)


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_hf` did on this rank.

    Attributes:
        parameters: the global names of the parameters that this rank holds shards of.
        bytes_read: the bytes of tensors that this rank read; None where mcore-bridge read them.
        unused: the tensors that the architecture leaves out, such as a copy of the embedding.
        differences: settings in which the Megatron model differs from the configuration of Hugging Face.

    Examples:
        >>> loaded = load_hf(chunks, "llama")
        >>> loaded.parameters[0], loaded.bytes_read, loaded.unused
        ('embedding.word_embeddings.weight', 140416, ())
    """

    parameters: tuple[str, ...]
    bytes_read: int | None
    unused: tuple[str, ...]
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """What was loaded, left out and different, in lines."""
        read = "" if self.bytes_read is None else f", {format_bytes(self.bytes_read)} read"
        lines = [f"{count_words(len(self.parameters), 'parameter')} loaded on this rank{read}"]
        lines += [f"unused: {name}" for name in self.unused]
        return "\n".join([*lines, *(f"differs: {text}" for text in self.differences)])


def find_architecture(config: Any) -> HuggingFaceArchitecture:
    """The entry of the table for a configuration.

    Raises:
        FlexError: the table has none, or Megatron has no modules for the architecture.
    """
    kind = config.model_type
    if kind in REFUSED:
        raise FlexError(f"{kind} has no counterpart in Megatron: {REFUSED[kind]}")
    if kind not in ARCHITECTURES:
        raise FlexError(
            f"no conversion for the architecture {kind!r}; the table has {', '.join(ARCHITECTURES)}; give an "
            "HuggingFaceArchitecture of your own, or build the model by mcore-bridge"
        )
    return ARCHITECTURES[kind]


def config_from_hf(source: Any, vocabulary_multiple: int = 1) -> MegatronArguments:
    """The arguments that build a Megatron model like one of Hugging Face.

    Nothing is communicated, and no weights are read.

    Args:
        source: a configuration of transformers, a model of it, or a folder with a `config.json`.
        vocabulary_multiple: the vocabulary is padded to a multiple of this, as the tensor parallel size asks
            for; `megatron.training` pads to `make_vocab_size_divisible_by` times that size.

    Returns:
        `transformer` has arguments of `TransformerConfig` (or of `MLATransformerConfig`, if `latent`), to
        which the caller adds sizes of the mesh and dtypes; `model` has arguments of `GPTModel`.

    Raises:
        FlexError: the architecture is not in the table, or a setting has no counterpart in Megatron.

    Examples:
        >>> arguments = config_from_hf("llama")  # the folder, or hf_model
        >>> arguments.transformer["num_layers"], arguments.model["vocab_size"]
        (4, 64)
    """
    config = read_config(source)
    arguments = find_architecture(config).arguments(config)
    rows = -(-config.vocab_size // vocabulary_multiple) * vocabulary_multiple
    return replace(arguments, model={**arguments.model, "vocab_size": rows})


def load_hf(
    chunks: Any, source: Any, architecture: HuggingFaceArchitecture | None = None, optimizer: Any = None
) -> LoadedWeights:
    """Load weights of Hugging Face into a Megatron model.

    Collective: every rank calls it. Names and shapes of all tensors are validated on all ranks before the
    first parameter changes. Then each rank reads, from memory-mapped files, only the blocks that its shards
    consist of.

    A model that mcore-bridge built for an architecture outside the table is loaded by its own bridge, which
    does not validate before.

    Args:
        chunks: the model, or its virtual pipeline chunks, bare or wrapped.
        source: a folder with safetensors, the same on all ranks; or a model of transformers on every rank.
        architecture: an entry in the place of the table's.
        optimizer: Megatron's optimizer, whose fp32 copies are set from the parameters.

    Returns:
        What this rank read, what was left out, and how the model's settings differ from the configuration's.

    Raises:
        FlexError: on all ranks, with the name of the tensor: it is missing, superfluous, quantized or of a
            wrong shape; or the architecture is unknown. The model is unchanged.

    Examples:
        >>> loaded = load_hf(chunks, "llama")
        >>> len(loaded.parameters), loaded.differences
        (27, ())
    """
    if optimizer is not None and not hasattr(optimizer, "reload_model_params"):
        raise FlexError(
            f"a {type(optimizer).__name__} has no reload_model_params(); give Megatron's optimizer"
        )
    if architecture is None and (bridge := find_bridge(list_model_chunks(chunks))) is not None:
        return _load_by_bridge(bridge, list_model_chunks(chunks), source, optimizer)
    model = MegatronWeights(chunks)
    weights: list[Weights] = []

    def plan() -> tuple[ConversionPlan, tuple[str, ...]]:
        config = read_config(source)
        chosen = architecture or find_architecture(config)
        differences = compare_settings(chosen.arguments(config), model.root)
        weights.append(open_weights(source))
        try:
            check_structure(differences)
            conversion = make_plan_maker(chosen, config).match(
                model.shapes, weights[0].forms, weights[0].where
            )
            check_entries(conversion, weights[0].forms)
            _check_tokens(source, model)
            model.check_plain()
        except FlexError as error:
            raise FlexError(_with_differences(str(error), differences)) from error
        return conversion, differences

    try:
        conversion, differences = _on_all_ranks(plan, model.adapter)
        model.check_same(weights[0].forms, weights[0].where)
        if differences and model.leader:
            warnings.warn(_describe_differences(differences), FlexWarning, stacklevel=2)
        model.adapter.storage.wait_until_ready()
        read = sum(model.write(conversion.parameters[name], weights[0]) for name in model.own_names)
    finally:
        for opened in weights:
            opened.close()
    if optimizer is not None:
        optimizer.reload_model_params()
    return LoadedWeights(tuple(model.own_names), read, conversion.unused, differences)


def to_hf(
    chunks: Any, target: Any, config: Any = None, architecture: HuggingFaceArchitecture | None = None
) -> None:
    """Write a Megatron model's weights as those of Hugging Face.

    Collective: every rank calls it. The full parameters arrive one at a time on the leader, which writes
    safetensors and `config.json` as `save_pretrained` does; or on all ranks that give a model, in which they
    are set in place. Where dtypes are equal, no bit changes.

    Args:
        chunks: the model, or its virtual pipeline chunks, bare or wrapped.
        target: a folder, the same on all ranks; or a model of transformers, on the leader or on all ranks
            (None on the others).
        config: the configuration, or a folder or a model that has it; by default the target's.
        architecture: an entry in the place of the table's.

    Raises:
        FlexError: on all ranks, before anything is written: a parameter has no counterpart, a tensor has
            another shape, or the configuration is unknown; or the disk failed, and the folder is incomplete.

    Examples:
        >>> to_hf(chunks, "out", config="llama")
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("out")
    """
    if architecture is None and (bridge := find_bridge(list_model_chunks(chunks))) is not None:
        _write_by_bridge(bridge, list_model_chunks(chunks), target, config)
        return
    model = MegatronWeights(chunks)
    gives_memory = isinstance(target, nn.Module)
    given = broadcast_object(target is not None, model.adapter.mesh)
    (everywhere,) = max_over_ranks([int(gives_memory and not model.leader)], model.adapter.mesh)

    def prepare() -> tuple[ConversionPlan, ModelWeights | FolderWriter] | None:
        if target is None and given:
            return None
        known = read_config(config if config is not None else target)
        chosen = architecture or find_architecture(known)
        check_structure(compare_settings(chosen.arguments(known), model.root), writing=True)
        maker = make_plan_maker(chosen, known)
        if isinstance(target, nn.Module):
            weights = ModelWeights(target)
            conversion = maker.match(model.shapes, weights.forms, weights.where)
            check_entries(conversion, weights.forms)
            return conversion, weights
        conversion = maker.write(model.shapes)
        if not model.leader:
            return None
        return conversion, FolderWriter(Path(target), _with_dtype(known, model.dtype))

    prepared = _on_all_ranks(prepare, model.adapter)
    problem = ""
    for name, full in gather_all_parameters(model.index, PADDED._replace(everywhere=bool(everywhere))):
        if prepared is None or problem:
            continue
        try:
            _write_parameter(prepared[0].parameters[name], full, prepared[1])
        except Exception as error:  # of the disk; the other ranks go on to the end, and then all raise
            problem = describe_error(error)
    if prepared is not None and isinstance(prepared[1], FolderWriter):
        problem = _finish(prepared[1], problem)
    if reports := gather_reports(problem or None, model.adapter.mesh):
        raise FlexError(f"{target} was not written: {reports[0][1]}")


class MegatronWeights:
    """The parameters of a Megatron model on all ranks, and this rank's shards of them.

    Collective: made on every rank.

    Args:
        chunks: the model, or its virtual pipeline chunks.

    Attributes:
        adapter: the adapter of the model.
        root: the first chunk, unwrapped.
        index: all parameters, and the biases of routers, which Megatron keeps as buffers.
        shapes: the full shape of each, padding included, in model order.
    """

    def __init__(self, chunks: Any) -> None:
        self.adapter: Adapter = detect(list_model_chunks(chunks))
        if not isinstance(self.adapter, MegatronAdapter):
            raise FlexError(f"weights go into a model of Megatron, and this one is {self.adapter.name}'s")
        self.adapter.check_is_one_model("the conversion of weights")
        self.adapter.check()  # some settings change what is in a parameter, such as interleaved gates
        self.root: Any = self.adapter.roots[0]
        # Checkpoints of Hugging Face have the biases of routers as parameters.
        self._local_sites = local_sites = [*self.adapter.parameters(), *self.adapter.buffers()]
        local_report = [site.remote() for site in local_sites], self.adapter.without_layout()
        reports = gather_objects(local_report, self.adapter.mesh, ["pp"])  # ranks of a stage list the same
        unknown = {name: kind for _, names in reports for name, kind in names.items()}
        if unknown:
            name, kind = next(iter(unknown.items()))
            raise FlexError(
                f"{name} belongs to a {kind}, whose layout is not known; no weights are converted"
            )
        everywhere = dict.fromkeys(site for sites, _ in reports for site in sites)
        self.index = ParameterIndex(self.adapter, local_sites, list(everywhere))
        sizes = self.adapter.mesh.sizes
        self.shapes = {
            name: full_shape(PADDED.layout(site, sizes), site.local, sizes)
            for name, site in self.index.first_copies().items()
        }

    @property
    def leader(self) -> bool:
        """Whether full tensors arrive on this rank."""
        return self.adapter.mesh.is_first(axis.name for axis in self.adapter.mesh)

    @property
    def own_names(self) -> list[str]:
        """The parameters of which this rank has a shard, in model order."""
        return [name for name in self.shapes if self.index.held(name)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(site.parameter.dtype for site in self._local_sites if site.parameter is not None)

    def check_same(self, forms: Mapping[str, TensorForm], where: str) -> None:
        """Validate that all ranks have the same tensors before them. Collective.

        Raises:
            FlexError: on all ranks: they do not.
        """
        digest = hashlib.sha256(repr(sorted(forms.items())).encode()).hexdigest()
        if len(gather_distinct(digest, self.adapter.mesh)) > 1:
            raise FlexError(
                f"{where} has other tensors on some ranks than on others; give all ranks the same"
            )

    def check_plain(self) -> None:
        """Validate that the parameters can be written in parts.

        Raises:
            FlexError: one is kept in another form, such as quantized.
        """
        for name, sites in self.index.local_sites.items():
            kind = next((type(s.parameter.data) for s in sites if s.parameter is not None), Tensor)
            if kind is not Tensor:
                raise FlexError(
                    f"{name} is kept as a {kind.__name__}; load the weights before it is converted"
                )

    def write(self, parameter: PlannedParameter, weights: Weights) -> int:
        """Read this rank's shards of a parameter, and return the bytes that were read."""
        mesh, read = self.adapter.mesh, 0
        for site, local in self.index.held(parameter.name):
            layout = PADDED.layout(site, mesh.sizes)
            for at, part, index in _blocks(layout, parameter, mesh.coords, mesh.sizes):
                target = self.adapter.storage.value(local)[at]
                if part is None:
                    target.zero_()  # rows that pad the vocabulary
                    continue
                block = weights.read(part.name, index)
                target.copy_(block.T if part.transposed else block)
                read += block.nbytes
        return read


def _blocks(
    layout: Layout, parameter: PlannedParameter, coords: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[slice, ...], Any, Any]]:
    """The blocks of a shard: where in the shard, the tensor (None for padding), and where in the tensor."""
    rest = [
        spans(dim, length, coords, sizes)
        for dim, length in zip(layout.dims[1:], parameter.shape[1:], strict=True)
    ]
    local = 0
    last = sum(run.rows for run in parameter.runs)
    for start, stop in spans(layout.dims[0], parameter.shape[0], coords, sizes):
        clipped = clip_runs(parameter.runs, start, stop)
        for run in clipped:
            rows = slice(local + run.start, local + run.start + run.rows)
            origin = slice(run.origin, run.origin + run.rows)
            for inside, columns in _combine(rest):
                part = parameter.parts[run.part]
                yield (rows, *inside), part, part.locate(origin, columns)
        if stop > last:
            yield (slice(local + max(last, start) - start, local + stop - start),), None, None
        local += stop - start


def _combine(
    rest: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Every combination of the spans of further dims: where they are in the shard, and in the full tensor."""
    if not rest:
        yield (), ()
        return
    at = 0
    for start, stop in rest[0]:
        for inside, full in _combine(rest[1:]):
            yield (slice(at, at + stop - start), *inside), (slice(start, stop), *full)
        at += stop - start


def _on_all_ranks(action: Callable[[], Any], adapter: Adapter) -> Any:
    """Run something on every rank; if it fails on one, all raise the first error. Collective."""
    result: Any = None
    problem, cause = "", None
    try:
        result = action()
    except Exception as error:  # raised on all ranks below
        problem, cause = describe_error(error), error
    if reports := gather_reports(problem or None, adapter.mesh):
        raise FlexError(reports[0][1]) from cause
    return result


def _load_by_bridge(bridge: Any, chunks: list[nn.Module], source: Any, optimizer: Any) -> LoadedWeights:
    """Let mcore-bridge load a model that it built. Collective."""
    adapter = detect(chunks)
    folder = _on_all_ranks(partial(check_source, bridge, source), adapter)
    bridge.load_weights(chunks, str(folder))
    if optimizer is not None:
        optimizer.reload_model_params()
    names = [site.name for site in adapter.parameters() if site.parameter is not None]
    return LoadedWeights((*names, *adapter.without_layout()), None, (), ())


def _write_by_bridge(bridge: Any, chunks: list[nn.Module], target: Any, config: Any) -> None:
    """Let mcore-bridge write a model that it built. Collective."""
    adapter = detect(chunks)

    def check() -> tuple[Path, Any]:
        return check_target(target), read_config(target if config is None else config)

    folder, known = _on_all_ranks(check, adapter)
    bridge.save_weights(chunks, str(folder))
    if adapter.mesh.is_first(axis.name for axis in adapter.mesh):
        known.save_pretrained(folder)


def place_full_tensors(chunks: Any, tensors: Mapping[str, Tensor], target: nn.Module | None) -> None:
    """Write full tensors of Megatron's parameters, such as gradients, into those of a Hugging Face model.

    Collective: every rank calls it.

    Args:
        chunks: the model, or its virtual pipeline chunks.
        tensors: by the name of the parameter; those of the leader are used.
        target: the model whose parameters are set in place, on the leader; None on the other ranks.

    Raises:
        FlexError: on all ranks: a parameter has no counterpart.
    """
    model = MegatronWeights(chunks)

    def place() -> None:
        if target is None:
            return
        config = read_config(target)
        weights = ModelWeights(target)
        conversion = make_plan_maker(find_architecture(config), config).match(
            model.shapes, weights.forms, weights.where
        )
        for name, full in tensors.items():
            _write_parameter(conversion.parameters[name], full, weights)

    _on_all_ranks(place, model.adapter)


def make_plan_maker(architecture: HuggingFaceArchitecture, config: Any) -> PlanMaker:
    """The plan maker of an architecture for a configuration."""
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return PlanMaker(
        architecture,
        Heads(config.num_attention_heads, groups),
        bool(config.tie_word_embeddings),
        config.num_hidden_layers,
        config.vocab_size,
    )


def _check_tokens(source: Any, model: MegatronWeights) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows."""
    tokens = count_tokens(source)
    name = "embedding.word_embeddings.weight"
    if tokens is not None and tokens > model.shapes[name][0]:
        raise FlexError(
            f"the tokenizer has {tokens} tokens, and {name} {model.shapes[name][0]} rows: build the Megatron "
            "model with a larger vocabulary"
        )


def _with_differences(problem: str, differences: Sequence[str]) -> str:
    return f"{problem}; {_describe_differences(differences)}" if differences else problem


def _describe_differences(differences: Sequence[str]) -> str:
    return f"the Megatron model differs from the configuration of Hugging Face: {', '.join(differences)}"


def _with_dtype(config: Any, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(config)
    config.dtype = dtype
    return config


def _write_parameter(parameter: PlannedParameter, full: Tensor, target: ModelWeights | FolderWriter) -> None:
    """Write the tensors that make up a full parameter."""
    if isinstance(target, ModelWeights):
        for part, run in blocks_of(parameter):
            rows = full[run.start : run.start + run.rows]
            rest = tuple(slice(0, n) for n in part.shape[1:])
            index = part.locate(slice(run.origin, run.origin + run.rows), rest)
            target.write(part.name, index, rows.T if part.transposed else rows)
        return
    parts = [torch.empty(part.shape, dtype=full.dtype) for part in parameter.parts]
    for run in parameter.runs:
        parts[run.part][run.origin : run.origin + run.rows] = full[run.start : run.start + run.rows]
    for part, tensor in zip(parameter.parts, parts, strict=True):
        target.add(part.name, tensor.T if part.transposed else tensor)


def _finish(writer: FolderWriter, problem: str) -> str:
    """Finish a folder, or remove its parts; why it failed, or nothing."""
    try:
        if problem:
            writer.abandon()
        else:
            writer.finish()
    except Exception as error:  # of the disk
        return problem or describe_error(error)
    return problem
