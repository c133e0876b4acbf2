"""The choice of experts in both models: which tokens, and which rows of experts, can be compared.

In two precisions, or with another order of summation, a router may choose another expert where two of them
are almost equal. What follows for such a token is another computation, not a difference of the models.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_flex.alignment.counterparts import Match
from megatron_flex.alignment.reference_run import Captures
from megatron_flex.alignment.token_batch import TokenBatch
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.routing_ties import find_ties
from megatron_flex.compare.tolerance import Tolerances
from megatron_flex.dump import VALUE

NEAR_TIE = 4.0  # times the tolerance of the router's logits: experts this close may be exchanged by round-off
ROUTER_MAP = ".mlp.router:map"


class Routing:
    """Selects the tokens and rows of a tensor that are compared.

    Args:
        matches: the compared sites.
        hf_captures: the tensors of the Hugging Face model.
        captures: those of the Megatron model.
        batch: the tokens.
        tolerances: of the sites.
        carried: whether a layer's output is the next layer's input; else each layer has its own input.

    Attributes:
        notes: in words, where tokens are left out.
    """

    def __init__(
        self,
        matches: Sequence[Match],
        hf_captures: Captures,
        captures: Captures,
        batch: TokenBatch,
        tolerances: Tolerances,
        carried: bool,
    ) -> None:
        self._real = batch.real
        self._tied: dict[int, Tensor] = {}  # by layer, the tokens `[b, s]` that choose among equal experts
        self._carried = carried
        self._maps: dict[int, tuple[Tensor, Tensor]] = {}  # `[b, s, e]`
        self.notes: list[str] = []
        for match in matches:
            if match.layer is None or not match.site.endswith(ROUTER_MAP) or match.site not in captures:
                continue
            hf, logits = (
                hf_captures.get(match.row.other[0]),
                hf_captures.get(match.row.other[0].replace(":map", ":output")),
            )
            if hf is None or logits is None:
                continue
            shape = (*batch.real.shape, -1)
            megatron, hf, logits = (
                captures[match.site].transpose(0, 1).bool(),
                hf.reshape(shape),
                logits.reshape(shape),
            )
            if megatron.shape != hf.shape:
                continue
            scored = ComparedTensor(match.site.replace(":map", ":logits"), VALUE)
            bound = NEAR_TIE * tolerances.bound(scored, (captures[scored.site].dtype, logits.dtype))
            _, tied = find_ties(megatron, hf, logits.float(), bound * float(logits.abs().amax()))
            if bool((tied & batch.real).any()) and carried:
                self.notes.append(
                    f"{int((tied & batch.real).sum())} tokens choose other experts in layer {match.layer}, "
                    "where two are equal up to round-off; they, and the tokens that see them, are not "
                    "compared from there on"
                )
            self._maps[match.layer], self._tied[match.layer] = (megatron, hf), tied

    def _tokens(self, match: Match) -> Tensor:
        """The tokens that are compared at a site, `[b, s]`."""
        out = self._real
        for layer, tied in self._tied.items():
            if layer == match.layer and _routed(match):
                out = out & ~tied
            elif self._carried and (match.layer is None or layer < match.layer) and match.time[0] > 0:
                out = out & (tied.int().cumsum(1) == 0)  # attention carries it to the tokens that follow
        return out

    def select(self, match: Match, megatron: Tensor, hf: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of both tensors that are compared.

        Args:
            match: the site.
            megatron: Megatron's tensor `[b, s, ...]`, or `[rows, ...]` of an expert.
            hf: Hugging Face's.

        Returns:
            Tensors `[tokens, ...]`.
        """
        tokens = self._tokens(match)
        if match.expert >= 0:
            maps = self._maps.get(match.layer if match.layer is not None else -1)
            if maps is None:
                return megatron, hf
            chosen = [m[..., match.expert].T.reshape(-1) for m in maps]  # in the order of rows: [s, b]
            both = chosen[0] & chosen[1] & tokens.T.reshape(-1)
            if len(megatron) != int(chosen[0].sum()) or len(hf) != int(chosen[1].sum()):
                return megatron, hf
            return megatron[both[chosen[0]]], hf[both[chosen[1]]]
        if megatron.shape[:2] != tokens.shape or hf.shape[:2] != tokens.shape:
            return megatron, hf
        if bool(tokens.all()):
            return megatron, hf
        return megatron[tokens], hf[tokens]


def _routed(match: Match) -> bool:
    """Whether a site follows the choice of experts in its layer."""
    return (
        ".router:" in match.site
        or ".experts" in match.site
        or match.site.endswith((".mlp:output", f"{match.layer}:output"))
    )
