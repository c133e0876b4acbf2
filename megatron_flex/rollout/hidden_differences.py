"""The differences of hidden states, layer by layer, and the first layer that differs beyond round-off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.noise_scale import DEPTH_SHARE, PEAK_GROWTH
from megatron_flex.compare.tolerance import Precision, ReductionDepths, derive_tolerance
from megatron_flex.dump import VALUE
from megatron_flex.errors import FlexError
from megatron_flex.rollout.hidden_files import HiddenStates
from megatron_flex.rollout.rollout_table import Request
from megatron_flex.rollout.token_matching import Match
from megatron_flex.rollout.training_dump import READ_ENTRIES, StoredRows, TrainingDump

TIE_MARGIN = 4.0  # of the difference of two scores over the noise of other tokens
TIE_JUMP = 3.0  # of the error of a token with another expert over the median, at least
MAX_POSITION = 2**62


@dataclass(frozen=True)
class LayerDifferences:
    """The differences before a layer, or after the last one.

    Attributes:
        layer: vLLM's number.
        site: the hook point of the dump.
        requests: the number of each token's request: `[token]`.
        positions: its position.
        errors: the norm of the difference over that of the dump's hidden state: `[token]`.
        bound: of the errors.
        counted: which tokens neither had a near tie of a router up to this layer, nor follow one: `[token]`.
    """

    layer: int
    site: str
    requests: Tensor
    positions: Tensor
    errors: Tensor
    bound: float
    counted: Tensor

    @property
    def beyond(self) -> Tensor:
        """Which tokens differ by more than round-off."""
        return (self.errors > self.bound) & self.counted

    @property
    def greatest(self) -> float:
        """The greatest error."""
        return float(self.errors[self.counted].max()) if bool(self.counted.any()) else 0.0


class HiddenComparer:
    """Compares the hidden states of requests with those of the dump.

    Args:
        hidden: of the rollout.
        dump: of the training run.
        precisions: of the dump and the rollout.
    """

    def __init__(self, hidden: HiddenStates, dump: TrainingDump, precisions: Sequence[Precision]) -> None:
        self.hidden, self.dump, self.precisions = hidden, dump, precisions
        self.sites: dict[int, str] = {}
        self.tied: dict[int, int] = {}  # the first token of a request whose experts were a near tie
        self._rows: dict[str, list[StoredRows]] = {}
        for layer in hidden.layers:
            self.sites[layer] = self._find_site(layer)

    def _find_site(self, layer: int) -> str:
        count = self.dump.layers
        if count and layer > count:
            raise FlexError(f"layer {layer} of the hidden states: the dump's model has {count} layers")
        site = self.dump.find_layer_site(layer)
        if site is None:
            wanted = f"decoder.layers.{layer - 1}:output" if layer else "embedding:output"
            raise FlexError(
                f"layer {layer} of the hidden states is {wanted}, which the dump has not: dump it, or leave "
                f"out the layer",
                site=wanted,
            )
        width = self.list_rows(site)[0].array.shape[-1]
        if width != self.hidden.width:
            raise FlexError(
                f"hidden states have {self.hidden.width} features, and {site} of the dump {width}: give "
                "those of the same model",
                site=site,
            )
        return site

    def list_rows(self, site: str) -> list[StoredRows]:
        """The rows of a site, by sequence."""
        if site not in self._rows:
            self._rows[site] = self.dump.list_rows(site)
        return self._rows[site]

    def compare(self, requests: Sequence[Request], matches: Mapping[int, Match]) -> list[LayerDifferences]:
        """The differences of each layer, in the order of the model; near ties of routers are left out.

        Args:
            requests: of the table.
            matches: where they are in the dump, by their number.
        """
        out: list[LayerDifferences] = []
        depths = ReductionDepths([*self.sites.values()], self.dump.layers)
        for layer in sorted(self.sites):
            site = self.sites[layer]
            parts = [self._compare_request(n, requests[n], match, layer) for n, match in matches.items()]
            numbers, positions, errors = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
            counted = positions < self._get_tied_positions(numbers)
            bound = self._bound(site, layer, depths, out[-1] if out else None)
            compared = LayerDifferences(layer, site, numbers, positions, errors, bound, counted)
            out.append(self._leave_out_ties(compared, out[-1].layer if out else 0, matches))
        return out

    def _get_tied_positions(self, requests: Tensor) -> Tensor:
        """The position from which on tokens are not compared, for each token's request."""
        return torch.tensor([self.tied.get(n, MAX_POSITION) for n in requests.tolist()], dtype=torch.int64)

    def _leave_out_ties(
        self, layer: LayerDifferences, before: int, matches: Mapping[int, Match]
    ) -> LayerDifferences:
        """Without tokens that differ because two experts' scores are equal within round-off."""
        beyond = layer.beyond
        within = layer.errors[layer.counted & ~beyond]
        if not len(within):
            return layer
        jumps = layer.counted & (layer.errors > min(layer.bound, TIE_JUMP * float(within.median())))
        noise = TIE_MARGIN * PEAK_GROWTH * float(within.square().mean().sqrt())
        tied = torch.zeros_like(beyond)
        for at in jumps.nonzero().flatten().tolist():
            number, position = int(layer.requests[at]), int(layer.positions[at])
            match = matches[number]
            tied[at] = any(
                self._is_tied(n, match.sequence, position + match.offset, noise)
                for n in range(before, layer.layer)
            )
            if bool(tied[at]):
                self.tied[number] = min(position, self.tied.get(number, position))
        return replace(layer, counted=layer.counted & ~tied)

    def _is_tied(self, layer: int, sequence: int, position: int, noise: float) -> bool:
        """Whether a router's last chosen expert and the next one have nearly equal scores for a token."""
        chosen = self.dump.experts_per_token
        site = self.dump.find_site(f"decoder.layers.{layer}.mlp.router:logits")
        if site is None or not chosen:
            return False
        rows = self.list_rows(site)[sequence]
        logits = rows.read(rows.find_rows(torch.tensor([position]))[0])[0]
        ordered = logits.sort(descending=True).values
        spread = float((logits - logits.mean()).abs().max())
        return chosen < len(logits) and float(ordered[chosen - 1] - ordered[chosen]) <= noise * spread

    def _bound(
        self, site: str, layer: int, depths: ReductionDepths, before: LayerDifferences | None
    ) -> float:
        """The bound of a layer: derived, and no more than the layer before it explains."""
        item = ComparedTensor(site, VALUE)
        depth = depths.forward(f"decoder.layers.{layer - 1}") if layer else 1
        dtypes = (self.list_rows(site)[0].array.dtype, self.hidden.dtype)
        derived = derive_tolerance(item, depth, self.precisions, dtypes)
        if before is None or before.layer == 0 or bool(before.beyond.any()) or not before.greatest:
            return derived
        depth_before = depths.forward(f"decoder.layers.{before.layer - 1}")
        unit = max(precision.get_unit(d) for precision, d in zip(self.precisions, dtypes, strict=True))
        growth = PEAK_GROWTH * math.sqrt(depth / depth_before)
        return min(derived, growth * before.greatest + DEPTH_SHARE * unit * math.sqrt(depth))

    def _compare_request(
        self, number: int, request: Request, match: Match, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The number of the request, positions and errors of one layer."""
        positions = self.list_positions(request, match)
        errors = [
            (theirs - ours).norm(dim=-1) / ours.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
            for ours, theirs in self.read_states(request, match, layer, positions)
        ]
        joined = torch.cat(errors) if errors else torch.zeros(0, dtype=torch.float64)
        return torch.full_like(positions, number), positions, joined

    def list_positions(self, request: Request, match: Match) -> Tensor:
        """The positions whose tokens are the same in the file and in the dump, and so are all before them."""
        if request.name not in self.hidden.files:
            return torch.zeros(0, dtype=torch.int64)
        ids = self.hidden.read_tokens(request.name)
        positions = torch.arange(len(ids))
        tokens, present = self.dump.sequences[match.sequence].find_tokens(positions + match.offset)
        wrong = (present & (tokens != ids)).nonzero().flatten()
        stop = int(wrong[0]) if len(wrong) else len(ids)
        return positions[present & (positions < stop)]

    def read_states(
        self, request: Request, match: Match, layer: int, positions: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The hidden states of the dump and of the rollout at some positions, in fp64, some at a time."""
        rows = self.list_rows(self.sites[layer])[match.sequence]
        place = self.hidden.layers.index(layer)
        for some in positions.split(max(1, READ_ENTRIES // self.hidden.width)):
            ours = rows.read(rows.find_rows(some + match.offset)[0])
            yield ours, self.hidden.read(request.name, some, place)
