"""`--flex-align`: the model of a script against a Hugging Face model in a folder, before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_flex.alignment import Alignment, align
from megatron_flex.collectives import broadcast_object
from megatron_flex.dump.json_form import format_json
from megatron_flex.errors import FlexError, describe_error
from megatron_flex.model import FlexModel

SAMPLES, LENGTH = 2, 32  # of the random tokens, where none are given
SEED = 1234


def align_with_folder(flex: FlexModel, folder: str, tokens: str | None, report: str | None) -> list[str]:
    """Align the model with the one in a folder. Collective over the mesh.

    Args:
        flex: the model, with its weights.
        folder: a folder as `save_pretrained` writes it.
        tokens: a JSON file of token ids; random ones if None.
        report: a file for the result as JSON, written on the first rank.

    Returns:
        The result in lines.

    Raises:
        FlexError: on all ranks: the folder or the file cannot be read, or the models cannot be compared.
    """
    mesh = flex.session.mesh
    first = all(axis.coord == 0 for axis in mesh)
    hf_model, batch, problem = None, None, ""
    if first:
        try:
            hf_model = _load(folder, flex)
            batch = _read_tokens(tokens, int(hf_model.config.vocab_size))  # type: ignore[union-attr, arg-type]
        except Exception as error:  # of transformers and json, which raise many kinds
            problem = f"--flex-align {folder}: {describe_error(error)}"
    batch, problem = broadcast_object((batch, problem), mesh)
    if problem:
        raise FlexError(problem)
    alignment: Alignment = align(hf_model, flex, batch)
    if first and report is not None:
        Path(report).write_text(format_json(alignment.to_json()))
    return str(alignment).splitlines()


def _load(folder: str, flex: FlexModel) -> nn.Module:
    """The model in a folder, in the precision of the Megatron model."""
    if not (Path(folder) / "config.json").exists():
        raise FlexError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    from transformers import AutoModelForCausalLM

    config = flex.session.adapter.roots[0].config  # type: ignore[attr-defined]  # checked by `align`
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((dtype for name, dtype in half.items() if getattr(config, name, False)), torch.float32)
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return loaded


def _read_tokens(file: str | None, vocabulary: int) -> Any:
    """Token ids `[batch, sequence]`, or a mapping with a mask."""
    if file is None:
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(0, vocabulary, (SAMPLES, LENGTH), generator=generator)
    stored = json.loads(Path(file).read_text())
    if isinstance(stored, dict):
        return {name: torch.tensor(rows) for name, rows in stored.items()}
    return torch.tensor(stored)
