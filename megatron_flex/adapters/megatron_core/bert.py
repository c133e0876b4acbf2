"""BERT's own parts, behind the encoder, which is a stack like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.build import SiteBuilder, Kind, OwnerKind, ParameterKind
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.taps import ModuleOutput
from megatron_flex.layout import Layout, replicated
from megatron_flex.sites import Site


def lm_head(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A linear and a norm that every rank has whole, applied to its part of the residual stream."""
    yield from b.both(path, module, b.of.stream(), "hidden_states")
    yield from b.both(f"{path}.dense", module.dense, b.of.stream(), "input")
    yield from b.both(f"{path}.layer_norm", module.layer_norm, b.of.stream(), "x")


def first_token(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """What is made of each sample's first token, `[b, ...]`, by every rank alike."""
    layout = replicated("b", "h" if path == "pooler" else "classes")
    yield b.site(f"{path}:output", layout, ModuleOutput(module))


def _lm_head_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    for parameter in module.parameters():
        yield parameter, of.uncut(parameter.ndim, shared=of.sequence_parallel)


def _tokentypes_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=False)


def _first_token_layouts(of: ModelLayouts, module: Any) -> Iterator[tuple[nn.Parameter, Layout]]:
    heads = [m for m in (getattr(module, "pooler", None), getattr(module, "binary_head", None)) if m]
    for parameter in (p for head in heads for p in head.parameters()):
        yield parameter, of.uncut(parameter.ndim, shared=False)


BERT_KINDS = (Kind(lm_head, ("BertLMHead",)), Kind(first_token, roles=("pooler", "binary_head")))
BERT_PARAMETERS = (ParameterKind(_tokentypes_layout, roles=("tokentype_embeddings",)),)
BERT_OWNERS = (OwnerKind(_lm_head_layouts, ("BertLMHead",)), OwnerKind(_first_token_layouts, ("BertModel",)))
