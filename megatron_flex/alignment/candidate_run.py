"""Forward passes of a Megatron model, as it is and with given layer inputs, and what its hook points hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_flex.alignment.counterparts import Family, Match
from megatron_flex.alignment.site_pairs import take_part
from megatron_flex.collectives import broadcast_in_buckets
from megatron_flex.config import flex_config
from megatron_flex.lens import Alias, FullWeights, TemporaryCaptures, edits, read_prompts, run
from megatron_flex.lens.tensor_views import View, Weights, normalize_stream
from megatron_flex.model import FlexModel
from megatron_flex.sites import Site

ABSENT = "this run has no tensor there"


@dataclass(frozen=True)
class AddedBias(View):
    """The tensor of a site with the bias that Megatron adds after it.

    Attributes:
        part: which equal part of the bias, and of how many; None for all of it.
    """

    part: tuple[int, int] | None = None

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        return tensor + take_part(weights[self.weights[0]], self.part).to(tensor)


@dataclass(frozen=True)
class NormOutput(View):
    """The output of a norm within a linear, from its input.

    `weights` names the weight and, if there is one, the bias.

    Attributes:
        rms: whether it is an RMSNorm.
        epsilon: the constant that it adds to the mean square.
        offset: the constant that it adds to its weight.
    """

    rms: bool = True
    epsilon: float = 0.0
    offset: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Normalized, with weight and bias."""
        out = normalize_stream(tensor, self.rms, self.epsilon) * (
            weights[self.weights[0]].float() + self.offset
        )
        return (out + weights[self.weights[1]].float() if len(self.weights) > 1 else out).to(tensor.dtype)


class CandidateRun:
    """A Megatron model whose hook points are captured. Every rank makes the same calls.

    Args:
        flex: the model with hooks.
        family: the table of its architecture.

    Attributes:
        matches: the sites with a counterpart, in the order of execution.
        uncompared: the other sites, with the reason.
    """

    def __init__(self, flex: FlexModel, family: Family) -> None:
        self.session, self.names = flex.session, flex.interp.names
        self._gpt = self.session.sites.gpt_names
        parameters = frozenset(self._gpt.index(self.session.parameters.index.sites))
        by_name = {site.name: site for site in self.session.sites}
        sites = {name: by_name[n] for name, n in self._gpt.index(by_name).items()}
        self._model_names = {name: site.name for name, site in sites.items()}
        self.matches, self.uncompared = family.match(sites, parameters)
        self.weights = FullWeights(self.session, self.names)
        self._aliases: dict[str, Alias] = {}
        for match in self.matches:
            alias = self._alias(sites[match.site], match)
            if isinstance(alias, str):
                self.uncompared[match.site] = alias
            else:
                self._aliases[match.site] = alias
        self.matches = [m for m in self.matches if m.site in self._aliases]

    def _alias(self, site: Site, match: Match) -> Alias | str:
        """What to capture for a site; text where nothing can be."""
        if site.hidden:
            path, _, point = site.name.rpartition(":")
            norm, made_of = self.names.norm(path), self.names.made_of
            inside = point == "output" and path.endswith("layernorm") and norm and made_of is not None
            if not inside or made_of is None:
                return site.hidden
            view: View = NormOutput(norm, "", made_of.rms, made_of.epsilon, float(made_of.unit_offset))
            return Alias(match.site, f"{path}:input", view)
        bias = self._gpt.to_model(match.row.bias) if self._gpt.renames and match.row.bias else match.row.bias
        view = AddedBias((bias,), "", match.row.bias_part) if bias and self.names.has(bias) else View()
        return Alias(match.site, site.name, view, sure=not match.row.optional)

    def run(self, tokens: Tensor, layer_inputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run the model forward without gradients. Collective over all ranks.

        Args:
            tokens: `[batch, sequence]`, the same on all ranks.
            layer_inputs: full tensors `[b, s, h]` by the name of the site that they replace.

        Returns:
            On the rank that receives captures, the tensor of each site; elsewhere nothing.
        """
        hooks = [
            (self._model_names[site], _Replacement(value)) for site, value in (layer_inputs or {}).items()
        ]
        reading = TemporaryCaptures(self.session, self.weights)
        try:
            with edits(self.session, self.weights, hooks):
                reading.add(list(self._aliases.values()))
                reading.real = run(self.session, read_prompts(self.session, tokens), None)
                return reading.collect(everywhere=False)
        finally:
            reading.remove()

    def broadcast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first rank, on all ranks. Collective over all ranks."""
        return dict(broadcast_in_buckets(list(tensors.items()), self.session.mesh, flex_config.bucket_bytes))


class _Replacement:
    """A hook function that puts one tensor in the place of another."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor:
        return self.value.to(tensor)
