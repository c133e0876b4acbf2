"""What the search for causes can look at: tensors and weights of both models around the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron_flex.alignment.alignment_result import SiteVerdict
from megatron_flex.alignment.counterparts import Match
from megatron_flex.alignment.reference_run import Captures
from megatron_flex.alignment.site_pairs import axis_sizes, compared_pair, reference_tensor
from megatron_flex.alignment.site_rows import sum_site
from megatron_flex.alignment.token_batch import TokenBatch


@dataclass
class Evidence:
    """The first site that differs, and what is around it. On the rank with the Hugging Face model.

    Attributes:
        first: the verdict of the site.
        matches: all compared sites by name.
        hf_captures: the tensors of the Hugging Face model by point.
        captures: those of the Megatron model by site, with the layer inputs of the Hugging Face model.
        weights: full Megatron parameters of the site's layer and of those outside of layers.
        hf_model: the Hugging Face model.
        config: Megatron's configuration.
        batch: the tokens.
        tolerance: how far the tensors may differ if a hypothesis is right.
    """

    first: SiteVerdict
    matches: Mapping[str, Match]
    hf_captures: Captures
    captures: Captures
    weights: Captures
    hf_model: Any
    config: Any
    batch: TokenBatch
    tolerance: float = field(init=False)
    sizes: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.tolerance = (self.first.isolated or self.first.accumulated).tolerance
        self.sizes = axis_sizes(self.hf_model.config, len(self.batch.tokens))

    @property
    def site(self) -> str:
        """The site that differs first."""
        return self.first.site

    @property
    def match(self) -> Match:
        """Its row."""
        return self.matches[self.site]

    @property
    def layer(self) -> str:
        """The path of its layer, `decoder.layers.3`; empty outside of layers."""
        return "" if self.match.layer is None else f"decoder.layers.{self.match.layer}"

    def pair(self, site: str) -> tuple[Tensor, Tensor] | None:
        """The two tensors of a site in the same order, in fp32, Megatron's first; None if one is missing."""
        match = self.matches.get(site)
        if match is None or site not in self.captures:
            return None
        hf = reference_tensor(match.row, self.hf_captures, self.sizes)
        if hf is None:
            return None
        megatron, hf = compared_pair(match.row, self.captures[site], hf, self.sizes, self.config)
        return (megatron.float(), hf.float()) if megatron.is_floating_point() else (megatron, hf)

    def megatron(self, site: str) -> Tensor | None:
        """Megatron's tensor at a site, as `pair` has it."""
        pair = self.pair(site)
        return None if pair is None else pair[0]

    def hf(self, site: str) -> Tensor | None:
        """Hugging Face's tensor at a site, as `pair` has it."""
        pair = self.pair(site)
        return None if pair is None else pair[1]

    def equal(self, a: Tensor | None, b: Tensor | None) -> bool:
        """Whether two tensors are equal up to the tolerance."""
        return a is not None and b is not None and sum_site(a, b).error <= self.tolerance

    def module(self, point: str = "") -> nn.Module | None:
        """The Hugging Face module of a point; of the site's first point if empty."""
        path = (point or self.match.row.other[0]).partition(":")[0]
        return dict(self.hf_model.named_modules()).get(path)

    def parameter(self, name: str) -> Tensor | None:
        """A parameter of the Hugging Face model on the CPU in fp32; None if it has none of that name."""
        parameter = dict(self.hf_model.named_parameters(remove_duplicate=False)).get(name)
        return None if parameter is None else parameter.detach().float().cpu()
