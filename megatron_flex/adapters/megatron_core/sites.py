"""The sites of one chunk: each module is handed to the first kind that it fits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron_flex.adapters.megatron_core import attention, bert, dense, latent, moe, mtp, ssm
from megatron_flex.adapters.megatron_core.build import Builder
from megatron_flex.adapters.megatron_core.kinds import global_modules
from megatron_flex.adapters.taps import MethodOutput
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

# the parts of a model whose modules have sites
KNOWN = ("embedding", "encoder", "decoder", "mtp", "pooler", "lm_head", "output_layer", "binary_head")
KINDS = (
    *latent.KINDS,
    *attention.KINDS,
    *moe.KINDS,
    *ssm.KINDS,
    *mtp.KINDS,
    *bert.KINDS,
    *dense.KINDS,
)


def sites_of(root: nn.Module, mesh: Mesh) -> list[Site]:
    """The sites of one chunk in model order."""
    return list(_walk(Builder(root, mesh)))


def _walk(b: Builder) -> Iterator[Site]:
    for path, module in global_modules(b.root):
        role = path.rpartition(".")[2]
        kind = next((k for k in KINDS if k.fits(role, module)), None) if path.startswith(KNOWN) else None
        if kind is not None:
            yield from kind.sites(b, path, module)
    if b.root.post_process:
        tap = MethodOutput(b.root, "compute_language_model_loss")
        yield b.site("loss:output", b.of.loss(), tap)
