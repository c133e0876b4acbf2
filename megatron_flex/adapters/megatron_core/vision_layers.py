"""Vision towers (CLIP, RADIO) and the projectors between towers and language models.

Their stack of transformer layers is like any other. Before it images become patches and patches embeddings,
on every tensor parallel rank alike: `[b, s, h]`, with the positions of an image along `s`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_flex.adapters.megatron_core.adapted_linears import unadapted
from megatron_flex.adapters.megatron_core.dense_layers import mlp_linears
from megatron_flex.adapters.megatron_core.megatron_taps import gemm, without_batch_dim
from megatron_flex.adapters.megatron_core.module_classes import COLUMN_LINEARS, VISION_CLASSES, is_megatron
from megatron_flex.adapters.megatron_core.site_builder import (
    Kind,
    ParameterKind,
    SiteBuilder,
    used_on_full_tensor,
)
from megatron_flex.adapters.taps import module_input, module_output
from megatron_flex.layout import replicated
from megatron_flex.sites import Site, Tap

EMBEDDERS = ("embedder", "video_embedder")
IMAGE_NORMS = ("ln_pre", "ln_post")
PARTS_WITH_SITES = ("conv1", *EMBEDDERS, *IMAGE_NORMS)


def convolution(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """CLIP's embeddings of patches, `[b, h, rows, columns]`, without positions."""
    yield b.site(
        f"{path}:input", replicated("b", "colors", "height", "width"), Tap(module_input, module, (0, "input"))
    )
    yield b.site(f"{path}:output", replicated("b", "h", "rows", "columns"), Tap(module_output, module))


def embedder(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """RADIO's embeddings of patches: a column-parallel linear, whose output it gathers.

    It does not reduce the gradient of its input, so that ranks have partial ones.
    """
    pixels = replace(replicated("b", "s", "pixels"), shared=("tp",))
    linear = unadapted(module)
    hidden, width = b.no_rule(linear, COLUMN_LINEARS), linear.input_size
    yield b.site(f"{path}:input", pixels, Tap(module_input, module, (0, "input_")), hidden, width)
    yield b.site(f"{path}:gemm_input", pixels, Tap(gemm, linear, (True,)), hidden, width)
    yield b.site(f"{path}:output", replicated("b", "s", "h"), Tap(module_output, module), hidden)


def image_norm(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """The norm before the layers, or after them."""
    yield from b.both(path, module, replicated("b", "s", "h"), "x")


def projector(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """A projector, from a tower's features to those of the language model: an MLP, or one gathered linear.

    Mimo gives it the positions of all images in one dim, LLaVA `[s, images, h]`.
    """
    is_linear = is_megatron(module, *COLUMN_LINEARS)
    yield from map(
        without_batch_dim, _affine_sites(b, path, module) if is_linear else _mlp_sites(b, path, module)
    )


def _mlp_sites(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    width = unadapted(module.linear_fc1).input_size
    yield b.site(f"{path}:input", b.of.stream(), Tap(module_input, module, (0, "hidden_states")), width=width)
    yield b.site(f"{path}:output", b.of.stream(), Tap(module_output, module), beside=(b.of.bias_beside(),))
    yield from mlp_linears(b, path, module, b.config.ffn_hidden_size, input_width=width)


def _affine_sites(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    yield from b.column(path, module, b.of.stream(), b.config.hidden_size, input_width=module.input_size)


VISION_KINDS = (
    Kind(convolution, roles=("conv1",)),
    Kind(embedder, roles=EMBEDDERS),
    Kind(image_norm, roles=IMAGE_NORMS),
    Kind(projector, ("MLP", *COLUMN_LINEARS), ("encoder",)),
)


VISION_PARAMETERS = (
    ParameterKind(used_on_full_tensor, VISION_CLASSES),
    ParameterKind(used_on_full_tensor, roles=("conv1", *IMAGE_NORMS)),
)
