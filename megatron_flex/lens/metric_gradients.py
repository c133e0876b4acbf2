"""Gradients of a metric of the logits at hook points, by TransformerLens' names.

The metric is evaluated on full logits on every rank. A second run of the model begins its backward pass from
the gradient of the logits, each rank from its shard, so that the metric itself is code for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_flex.adapters import Prompts
from megatron_flex.collectives import checksum, gather_distinct
from megatron_flex.errors import FlexError, HookError
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.lens_names import Alias
from megatron_flex.lens.temporary_hooks import TemporaryCaptures, concatenate, match_sites
from megatron_flex.lens.tensor_views import View, Weights
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.sites import GRADIENT_SUFFIX

Metric = Callable[[Tensor], Tensor]
SUFFIX = "_grad"  # of TransformerLens' names for gradients


def differentiate_metric(
    session: Session, metric: Metric | None, logits: Tensor, mask: Tensor | None
) -> Tensor:
    """The gradient of a metric with respect to the logits, zero at padding. Collective over the replica.

    Raises:
        FlexError: on all ranks: the metric failed, is not a scalar, does not depend on the logits, or differs
            between ranks.
    """
    gradient, why = torch.empty(0), ""
    try:
        gradient = _differentiate(metric, logits)
    except Exception as error:  # the metric is user code, and other ranks wait for this one
        why = str(error) if isinstance(error, FlexError) else f"metric: {type(error).__name__}: {error}"
    reports = gather_distinct((why, checksum(gradient)), session.mesh.replica())
    for reason, _ in reports:
        if reason:
            raise FlexError(reason)
    if len(reports) > 1:
        raise FlexError("metric has different gradients on ranks that have the same logits; compute it alike")
    return gradient if mask is None else gradient * mask[..., None].to(gradient)


def _differentiate(metric: Metric | None, logits: Tensor) -> Tensor:
    if metric is None:
        raise FlexError(
            "incl_bwd=True differentiates a metric; give metric=, a function of logits [batch, pos, v]"
        )
    leaf = logits.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = metric(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise FlexError(f"metric returned {shape}; return a tensor of one number, such as its mean()")
    gradient = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None:
        raise FlexError(
            "metric does not depend on the logits; compute it from its argument, without detach()"
        )
    return gradient


class TemporaryGradients(TemporaryCaptures):
    """Captures tensors and their gradients where aliases are edited; what is only computed has none."""

    @property
    def sites(self) -> set[str]:
        return {name for a in self.aliases for name in (a.site, a.site + GRADIENT_SUFFIX)}

    def add(self, aliases: Sequence[Alias]) -> None:
        """Add those of some aliases that can be edited. Collective."""
        edited = [(a, *a.edited) for a in aliases if not a.edited[1].fixed]
        super().add([replace(a, site=site, view=view, edit=None) for a, site, view in edited])
        hook = HookFunction(
            match_sites({site for _, site, _ in edited}), hook_type="tensor", gradient_scale="loss"
        )
        if edited:
            self.install(hook)

    def collect(self, everywhere: bool = True) -> dict[str, Tensor]:
        """The last gradients of each alias, microbatches concatenated. Collective.

        Raises:
            HookError: on all ranks, if one has no gradient.
        """
        read = self.gather(everywhere)
        weights = self.weights.assemble(w for a in self.aliases for w in a.view.weights)
        out: dict[str, Tensor] = {}
        for alias in self.aliases:
            values, gradients = read.get(alias.site, []), read.get(alias.site + GRADIENT_SUFFIX, [])
            if gradients:
                pairs = zip(values, gradients, strict=True)
                parts = [convert_gradient(alias.view, value, grad, weights) for value, grad in pairs]
                out[alias.name + SUFFIX] = self.clear_padding(alias, concatenate(parts))
            elif alias.sure and read:
                raise HookError(f"{alias.name} has no gradient; name hook points that the logits depend on")
        return out


def convert_gradient(view: View, value: Tensor, gradient: Tensor, weights: Weights) -> Tensor:
    """The gradient of TransformerLens' tensor, from a site's tensor and its gradient."""
    with torch.enable_grad():
        lens_tensor = view.to_lens(value.detach(), weights).detach().requires_grad_()
        site_tensor = view.to_site(lens_tensor, value.detach(), weights)
        return torch.autograd.grad(site_tensor, lens_tensor, gradient.to(site_tensor))[0]


def run_backward(
    session: Session,
    weights: FullWeights,
    aliases: Sequence[Alias],
    prompts: Prompts,
    microbatch_size: int | None,
    gradient: Tensor,
) -> dict[str, Tensor]:
    """Run the model forward and backward from a gradient of the logits. Every rank calls it.

    Returns:
        The gradients at the aliases, under their names with `_grad`.

    Raises:
        FlexError: on all ranks: this model cannot be differentiated from here.
        HookError: on all ranks: a hook failed, or an alias has no gradient.
    """
    reading = TemporaryGradients(session, weights)
    adapter, count = session.adapter, len(prompts.tokens) // (microbatch_size or len(prompts.tokens))
    layout = next(site.layout for site in session.sites if site.name == adapter.logits)
    try:
        reading.add(aliases)
        reading.mask, reading.real = prompts.attention_mask, count
        session.probing = count
        try:
            adapter.differentiate(prompts, microbatch_size, gradient, layout)
        finally:
            session.probing = None
        return reading.collect()
    finally:
        reading.remove()
