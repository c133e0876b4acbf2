"""The first tensor that is not finite, over all ranks: an order of execution, and the sentence that says it.

Within a step microbatches do not depend on each other, so each has a first tensor of its own; that of the
first microbatch is named. A microbatch runs forward through the pipeline's stages, then backward. Ranks of
one stage pass the same hook points in the same order, except those of experts without tokens: the sequences
of all ranks are merged, and the first tensor in the merged sequence that is not finite on some rank is where
the value arose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_flex.errors import list_some, name_ranks
from megatron_flex.nonfinite.pass_ranges import Located, PassRange

MAX_INPUTS = 2  # tensors before the first one that are described
MAX_NAMES = 4  # ranks and parameters that are named

PassName = tuple[str, int]  # the hook point and the number of the pass


class Candidate(NamedTuple):
    """A pass of a microbatch through a stage in which a tensor is not finite. Ordered by execution.

    Attributes:
        parameters: whether this is the gradients of parameters, after all microbatches.
        microbatch: the microbatch.
        backward: whether this is the backward pass.
        stage: the number of the stage in the order of the pass: negative in the backward pass.
    """

    parameters: bool
    microbatch: int
    backward: bool
    stage: int


class Neighbourhood(NamedTuple):
    """What one rank knows of the pass of a candidate.

    Attributes:
        rank: the global rank.
        replica: its data parallel coordinate.
        ranges: the ranges of the pass in the order of this rank's execution; none if it was not in the pass.
        parameters: the names of parameters on this rank that are not finite.
    """

    rank: int
    replica: int
    ranges: Sequence[PassRange]
    parameters: Sequence[str]


class Verdict(NamedTuple):
    """The first tensor of a step that is not finite while those before it are.

    Attributes:
        iteration: the iteration of the step.
        candidate: the pass.
        site: the hook point, with `.grad` for a gradient; or the name of a parameter with `.grad`.
        call: the number of the pass through the hook point in the microbatch.
        located: for each rank on which the tensor is not finite, its entries; None where they are not known.
        inputs: the minimum and the maximum of the tensors before it, over the ranks of the replica.
        parameters: the parameters of the model that are not finite themselves.
        loss_scale: the factor of the loss against underflow; 1 if there is none.
        replica: the data parallel coordinate of the first of these ranks.
        replicas: the number of data parallel replicas.
    """

    iteration: int
    candidate: Candidate
    site: str
    call: int
    located: Mapping[int, Located | None]
    inputs: Mapping[str, tuple[float, float]]
    parameters: Sequence[str]
    loss_scale: float
    replica: int = 0
    replicas: int = 1

    @property
    def overflows_scaled(self) -> bool:
        """Whether only gradients overflow, under loss scaling: the loss scaler skips such a step."""
        return self.loss_scale > 1 and (self.candidate.backward or self.candidate.parameters)

    @property
    def indices(self) -> tuple[tuple[int, ...], ...]:
        """The first entries in the full tensor, of the first rank that has some; empty if not known."""
        return next((tuple(at.indices) for at in self.located.values() if at is not None and at.full), ())

    def describe(self) -> str:
        """Say what is not finite, where, and what came before."""
        return "; ".join([self._describe_place(), *self._describe_causes()])

    def _describe_place(self) -> str:
        where = f"iteration {self.iteration}"
        if not self.candidate.parameters:
            where += f", microbatch {self.candidate.microbatch}"
            where += f" of data parallel replica {self.replica}" if self.replicas > 1 else ""
        ranks = name_ranks(list(self.located))
        text = f"{where}: {self.site} is the first tensor that is not finite, on {ranks}"
        entries = next(iter(self.located.values()))
        return text if entries is None else f"{text} ({_describe_entries(entries)})"

    def _describe_causes(self) -> Iterable[str]:
        if self.parameters:
            yield f"these parameters are not finite: {list_some(self.parameters, MAX_NAMES)}"
        if self.inputs:
            ranges = (f"{name} from {low:.4g} to {high:.4g}" for name, (low, high) in self.inputs.items())
            yield "before it: " + ", ".join(ranges)
        elif self.candidate.backward:
            yield "no gradient came before it: it comes from the loss, or from what no hook point shows"
        if self.overflows_scaled:
            yield f"the loss is scaled by {self.loss_scale:g}: the loss scaler skips this step"


def _describe_entries(at: Located) -> str:
    kinds = [f"{n} {word}" for n, word in ((at.nans, "NaN"), (at.infinities, "infinite")) if n]
    first = list(at.indices[0]) if at.indices else []
    dims = f" ({', '.join(at.dims)})" if at.dims and all(at.dims) else ""
    tensor = f"the full tensor of {list(at.shape)}{dims}" if at.full else "its shard"
    return f"{' and '.join(kinds)} of {at.entries}; the first at {first} of {tensor}"


def reach_verdict(
    iteration: int, candidate: Candidate, neighbourhoods: Sequence[Neighbourhood], loss_scale: float
) -> Verdict:
    """Name the first tensor of a pass that is not finite.

    Args:
        iteration: the iteration of the step.
        candidate: the pass, of which some rank has a tensor that is not finite.
        neighbourhoods: what each rank knows of the pass.
        loss_scale: the factor of the loss against underflow; 1 if there is none.

    Returns:
        The verdict, the same for the same arguments.
    """
    order = _merge_sequences([[(r.site, r.call) for r in n.ranges] for n in neighbourhoods])
    bad = {(r.site, r.call) for n in neighbourhoods for r in n.ranges if not r.finite}
    at = next(number for number, name in enumerate(order) if name in bad)
    site, call = order[at]
    holders = {n.rank: (n, r) for n in neighbourhoods for r in n.ranges if (r.site, r.call) == order[at]}
    located = {rank: r.located for rank, (_, r) in sorted(holders.items()) if not r.finite}
    replica = holders[next(iter(located))][0].replica
    before = order[:at][-MAX_INPUTS:] if not candidate.parameters else []
    inputs = {name[0]: span for name in before if (span := _join_ranges(neighbourhoods, replica, name))}
    parameters = list(dict.fromkeys(name for n in neighbourhoods for name in n.parameters))
    replicas = len({n.replica for n in neighbourhoods})
    return Verdict(
        iteration, candidate, site, call, located, inputs, parameters, loss_scale, replica, replicas
    )


def _join_ranges(
    neighbourhoods: Sequence[Neighbourhood], replica: int, name: PassName
) -> tuple[float, float] | None:
    """The range of a tensor over the ranks of a replica; None if no rank of it has entries."""
    ranges = [r for n in neighbourhoods if n.replica == replica for r in n.ranges if (r.site, r.call) == name]
    known = [r for r in ranges if not r.empty]
    return (min(r.low for r in known), max(r.high for r in known)) if known else None


def _merge_sequences(sequences: Iterable[Sequence[PassName]]) -> list[PassName]:
    """One sequence with all passes: those that earlier sequences lack come behind their predecessors."""
    out: list[PassName] = []
    for sequence in sequences:
        position = 0
        known = {name: number for number, name in enumerate(out)}
        for name in sequence:
            if name in known:
                position = known[name] + 1
                continue
            out.insert(position, name)
            position += 1
            known = {other: number for number, other in enumerate(out)}
    return out
