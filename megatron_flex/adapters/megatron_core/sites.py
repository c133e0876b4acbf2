"""The sites of one chunk: each module is handed to the first kind that it fits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron_flex.adapters.megatron_core import attention, bert, dense, latent, moe, mtp, ssm_layers
from megatron_flex.adapters.megatron_core.build import SiteBuilder
from megatron_flex.adapters.megatron_core.module_classes import global_modules
from megatron_flex.adapters.taps import MethodOutput
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

# the parts of a model whose modules have sites
PARTS_WITH_SITES = ("embedding", "encoder", "decoder", "mtp", "pooler", "lm_head", "output_layer", "binary_head")
SITE_KINDS = (
    *latent.LATENT_KINDS,
    *attention.ATTENTION_KINDS,
    *moe.MOE_KINDS,
    *ssm_layers.SSM_KINDS,
    *mtp.MTP_KINDS,
    *bert.BERT_KINDS,
    *dense.DENSE_KINDS,
)


def sites_of(root: nn.Module, mesh: Mesh) -> list[Site]:
    """The sites of one chunk in model order."""
    return list(_walk_sites(SiteBuilder(root, mesh)))


def _walk_sites(b: SiteBuilder) -> Iterator[Site]:
    for path, module in global_modules(b.root):
        role = path.rpartition(".")[2]
        kind = next((k for k in SITE_KINDS if k.fits(role, module)), None) if path.startswith(PARTS_WITH_SITES) else None
        if kind is not None:
            yield from kind.sites(b, path, module)
    if b.root.post_process:
        tap = MethodOutput(b.root, "compute_language_model_loss")
        yield b.site("loss:output", b.of.loss(), tap)
