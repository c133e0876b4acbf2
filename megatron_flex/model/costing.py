"""What the hooks that stand would cost, told by FlexModel before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_flex.errors import FlexError
from megatron_flex.runtime import Session

if TYPE_CHECKING:
    from megatron_flex.costs import RunEstimate, Links


class Costing:
    """What FlexModel says of costs."""

    session: Session
    chunks: nn.ModuleList

    def costs(
        self,
        *,
        sequence_length: int | None = None,
        micro_batch_size: int | None = None,
        microbatches: int = 1,
        links: Links | None = None,
    ) -> RunEstimate:
        """What the active hooks, dumps and statistics cost in a step: bytes by link, collectives, memory.

        Communicates nothing, and needs no step to have run; any rank may call it alone, and each gets the
        same. `docs/costs.md` has the formulae. Entries are counted as being of the parameters' dtype.

        Args:
            sequence_length: of the whole sequence; None where `megatron.training` was given it.
            micro_batch_size: samples of a microbatch; likewise.
            microbatches: of a step, on each data parallel rank.
            links: how fast they are, and how many ranks share a node.

        Raises:
            FlexError: nothing stands whose cost can be told, or nothing tells a length.
        """
        from megatron_flex.costs import Links, estimate_run  # needs numpy, which reading and editing do not
        from megatron_flex.costs.session_estimate import SessionEstimate

        if microbatches < 1:
            raise FlexError(f"microbatches={microbatches}: a step has at least one")
        links, session = links or Links(), self.session
        given = {"s": sequence_length, "b": micro_batch_size}
        lengths = {**session.rehearsal.stage.lengths, **{n: k for n, k in given.items() if k is not None}}
        modules: list[Any] = [m for chunk in self.chunks for m in chunk.modules()]
        padded = max((int(getattr(m, "vocab_size", 0) or 0) for m in modules), default=0)
        config = next((m.config for m in modules if hasattr(m, "config")), None)
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        standing = SessionEstimate(session, lengths, padded, microbatches)
        found, more = list(standing.hooks()), list(standing.more(links))
        if not found and not more:
            why = "; ".join(f"{n}: {w}" for n, w in standing.uncounted.items())
            raise FlexError(f"costs of nothing: {why or 'no hook is active; register some first'}")
        return estimate_run(standing.mesh, found, links, standing.uncounted, heads, more)
