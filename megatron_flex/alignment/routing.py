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
        theirs: the tensors of the Hugging Face model.
        ours: those of the Megatron model.
        batch: the tokens.
        tolerances: of the sites.
        carried: whether a layer's output is the next layer's input; else each layer has its own input.

    Attributes:
        notes: in words, where tokens are left out.
    """

    def __init__(
        self,
        matches: Sequence[Match],
        theirs: Captures,
        ours: Captures,
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
            if match.layer is None or not match.site.endswith(ROUTER_MAP) or match.site not in ours:
                continue
            there, logits = (
                theirs.get(match.row.other[0]),
                theirs.get(match.row.other[0].replace(":map", ":output")),
            )
            if there is None or logits is None:
                continue
            shape = (*batch.real.shape, -1)
            here, there, logits = (
                ours[match.site].transpose(0, 1).bool(),
                there.reshape(shape),
                logits.reshape(shape),
            )
            if here.shape != there.shape:
                continue
            scored = ComparedTensor(match.site.replace(":map", ":logits"), VALUE)
            bound = NEAR_TIE * tolerances.bound(scored, (ours[scored.site].dtype, logits.dtype))
            _, tied = find_ties(here, there, logits.float(), bound * float(logits.abs().amax()))
            if bool((tied & batch.real).any()) and carried:
                self.notes.append(
                    f"{int((tied & batch.real).sum())} tokens choose other experts in layer "
                    f"{match.layer}, where two "
                    "are equal up to round-off; they, and the tokens that see them, are not "
                    "compared from there on"
                )
            self._maps[match.layer], self._tied[match.layer] = (here, there), tied

    def _tokens(self, match: Match) -> Tensor:
        """The tokens that are compared at a site, `[b, s]`."""
        out = self._real
        for layer, tied in self._tied.items():
            if layer == match.layer and _routed(match):
                out = out & ~tied
            elif self._carried and (match.layer is None or layer < match.layer) and match.time[0] > 0:
                out = out & (tied.int().cumsum(1) == 0)  # attention carries it to the tokens that follow
        return out

    def select(self, match: Match, here: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of both tensors that are compared.

        Args:
            match: the site.
            here: Megatron's tensor `[b, s, ...]`, or `[rows, ...]` of an expert.
            there: Hugging Face's.

        Returns:
            Tensors `[tokens, ...]`.
        """
        tokens = self._tokens(match)
        if match.expert >= 0:
            maps = self._maps.get(match.layer if match.layer is not None else -1)
            if maps is None:
                return here, there
            own = [m[..., match.expert].T.reshape(-1) for m in maps]  # in the order of rows: [s, b]
            both = own[0] & own[1] & tokens.T.reshape(-1)
            if len(here) != int(own[0].sum()) or len(there) != int(own[1].sum()):
                return here, there
            return here[both[own[0]]], there[both[own[1]]]
        if here.shape[:2] != tokens.shape or there.shape[:2] != tokens.shape:
            return here, there
        if bool(tokens.all()):
            return here, there
        return here[tokens], there[tokens]


def _routed(match: Match) -> bool:
    """Whether a site follows the choice of experts in its layer."""
    return (
        ".router:" in match.site
        or ".experts" in match.site
        or match.site.endswith((".mlp:output", f"{match.layer}:output"))
    )
