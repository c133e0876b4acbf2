"""The digest of all full parameters of a model: made from any source, or in a run, and kept in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_flex.adapters import list_model_chunks
from megatron_flex.checksums import ZERO_CHECKSUM, is_sealed, seal_json
from megatron_flex.collectives import run_or_raise_on_all
from megatron_flex.conversion import Heads
from megatron_flex.conversion.parameter_names import canonical_names
from megatron_flex.conversion.weights import MegatronWeights
from megatron_flex.dump.json_form import check_form, derive_form, from_json, load_json, to_json
from megatron_flex.errors import FlexError
from megatron_flex.runtime.full_parameters import ParameterRequest, gather_all_parameters
from megatron_flex.weights.parameter_digest import ParameterDigest, ParameterForm, ReadRows, digest_parameter
from megatron_flex.weights.parameter_parts import ParameterPart, list_parts
from megatron_flex.weights.weight_sources import WeightSource, open_source, read_heads

VERSION = 1
FORM = {
    "checksum": "str",
    "weights_digest": "int",
    "source": "str",
    "heads": ["int"],
    "parameters": {"*": derive_form(ParameterDigest)},
}


@dataclass(frozen=True)
class WeightsDigest:
    """The digests of all full parameters of a model, the same for every layout.

    Attributes:
        source: what was read.
        heads: the heads of queries, and of keys and values; None if they are not known.
        parameters: by the name that a GPTModel with the local spec has.
    """

    source: str
    heads: Heads | None
    parameters: Mapping[str, ParameterDigest]

    @property
    def forms(self) -> dict[str, ParameterForm]:
        """The shape and dtype of each parameter."""
        return {name: digest.form for name, digest in self.parameters.items()}

    def write(self, path: str | PathLike[str]) -> None:
        """Write it to a JSON file, which is replaced.

        Raises:
            FlexError: the file cannot be written.

        Examples:
            >>> from megatron_flex.weights import digest_weights
            >>> digest_weights("llama").write("digest.json")
        """
        content = {
            "checksum": ZERO_CHECKSUM.decode(),
            "weights_digest": VERSION,
            "source": self.source,
            "heads": list(self.heads or ()),
            "parameters": {name: to_json(digest) for name, digest in self.parameters.items()},
        }
        text = seal_json(json.dumps(content, indent=0, allow_nan=False).encode()) + b"\n"
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            with draft.open("xb") as file:
                file.write(text)
            draft.replace(target)
        except OSError as error:
            raise FlexError(f"{path}: {error.strerror or error}") from None


def read_digest(path: str | PathLike[str]) -> WeightsDigest:
    """Read a file of digests.

    Raises:
        FlexError: it is not such a file, or damaged.
    """
    try:
        text = Path(path).read_bytes().strip()
        content = load_json(text)
        if not isinstance(content, dict) or content.get("weights_digest") != VERSION:
            raise ValueError(f"weights_digest is not {VERSION}")
        check_form(content, FORM)
        if not is_sealed(text):
            raise ValueError("its checksum is wrong")
    except OSError as error:
        raise FlexError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FlexError(f"{path} is not a file of digests, or is damaged ({error}); write it again") from None
    heads = content["heads"]
    parameters = {name: from_json(ParameterDigest, record) for name, record in content["parameters"].items()}
    return WeightsDigest(content["source"], Heads(*heads) if len(heads) == 2 else None, parameters)


def digest_source(
    source: WeightSource, heads: Heads | None, forms: Mapping[str, ParameterForm] | None = None
) -> WeightsDigest:
    """Digest the full parameters of a source, one at a time.

    Args:
        source: the source.
        heads: the heads of attention; None if they are not known.
        forms: the parts of parameters to digest, with so many rows and in this dtype; None for all, as they
            are.
    """
    digests = {}
    for name, part in list_parts(source.forms, heads).items():
        if forms is None or name in forms:
            form = part.form if forms is None else forms[name]
            stored = source.stored[part.parameter]
            digests[name] = _digest_part(
                name, part, form, partial(source.read, part.parameter), heads, stored
            )
    return WeightsDigest(source.where, heads, digests)


def _digest_part(
    name: str,
    part: ParameterPart,
    form: ParameterForm,
    read: ReadRows,
    heads: Heads | None,
    stored: tuple[str, ...],
) -> ParameterDigest:
    """Digest a part of a parameter.

    Args:
        name: the name of the part.
        part: its rows in the parameter.
        form: the shape and dtype in which it is digested.
        read: reads rows of the parameter.
        heads: the heads of attention; None if they are not known.
        stored: the names of the tensors that the parameter is read from.
    """

    def convert(start: int, stop: int) -> Tensor:
        return part.read(read, start, stop).to(form.dtype)

    of_part = part.number is not None and len(stored) > 1
    return digest_parameter(
        name, form, convert, heads, stored[part.number or 0] if of_part else ", ".join(stored)
    )


def digest_weights(source: Any) -> WeightsDigest:
    """Digest all full parameters of a folder or a model.

    Args:
        source: a folder of Hugging Face, a dump, a Megatron checkpoint of the format torch_dist, a file of
            digests, or a model of transformers.

    Returns:
        The digest, which is the same for every layout of the weights.

    Raises:
        FlexError: the source is something else, or damaged, or no table has its architecture.

    Examples:
        >>> from megatron_flex.weights import digest_weights
        >>> digest = digest_weights("llama")
        >>> digest.parameters["decoder.final_layernorm.weight"].stored
        'model.norm.weight'
    """
    if isinstance(source, str | PathLike) and Path(source).is_file():
        return read_digest(source)
    opened = open_source(source)
    try:
        return digest_source(opened, opened.heads)
    finally:
        opened.close()


def digest_run(chunks: Any, source: str = "a run") -> WeightsDigest | None:
    """Digest the full parameters of a Megatron model in a run, one at a time. Collective over the job.

    Args:
        chunks: the model, or its virtual pipeline chunks.
        source: the name of the run in the digest.

    Returns:
        The digest on the first rank; None on the others.

    Raises:
        FlexError: on all ranks: the layout of a parameter is not known, or it cannot be digested.

    Examples:
        >>> from megatron_flex.weights import digest_run
        >>> digest = digest_run(chunks)
        >>> len(digest.parameters)
        39
    """
    model = MegatronWeights(list_model_chunks(chunks))
    heads = read_heads(vars(model.root.config))
    plain_names = canonical_names(model.shapes)
    forms = {plain_names[name]: ParameterForm(shape, model.dtype) for name, shape in model.shapes.items()}
    parts_of: dict[str, list[tuple[str, ParameterPart]]] = {}
    for part_name, part in list_parts(forms, heads).items():
        parts_of.setdefault(part.parameter, []).append((part_name, part))
    digests: dict[str, ParameterDigest] = {}
    failed: list[Exception] = []
    for name, full in gather_all_parameters(model.index, ParameterRequest()):
        if failed:
            continue  # every rank takes part to the end
        try:
            for part_name, part in parts_of[plain_names[name]]:
                shape = tuple(full.shape) if part.number is None else part.form.shape
                form = ParameterForm(shape, full.dtype)
                digests[part_name] = _digest_part(part_name, part, form, _slice_rows(full), heads, (name,))
        except Exception as error:  # raised on all ranks below
            failed.append(error)

    def finish() -> WeightsDigest | None:
        if failed:
            raise failed[0]
        return WeightsDigest(source, heads, digests) if model.leader else None

    return run_or_raise_on_all(model.adapter.mesh, finish)


def _slice_rows(full: Tensor) -> ReadRows:
    return lambda start, stop: full[start:stop] if full.ndim else full
