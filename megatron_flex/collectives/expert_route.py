"""Routes the rows of experts' tensors to the ranks of their tokens, and back to the experts.

A router decides at each call which rank holds which row. At their tokens every rank has the rows of its own
tokens, sharded like the residual stream, so that an ordinary Layout describes the rest of the way.

    at the experts    rows of this rank's experts, from all ranks of `ep` and `etp`: by source rank, then by
                      expert; the same rows on all of `etp`, their features sharded over it
         |            `to_tokens` assembles the features, keeps the rows whose tokens are on ranks with this
         |            coordinate of `etp`, and exchanges them over `ep`; `to_experts` is the inverse
    at the tokens     rows of this rank's tokens, as `[s, b, slots, ...]`; of one expert as `[rows, ...]`
         |            a Layout assembles them; the rows of one expert are then sorted by `gather_order`
    full tensor       rows in the order of the tokens

The numbers of rows follow from the router's choice. Each rank knows its own and gathers those of the others
once a call, at the first use. Gradients take the same route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_scatter import (
    assemble_on_all_ranks,
    assemble_uneven,
    has_uneven_shards,
    stack_along,
)
from megatron_flex.collectives.messages import as_bytes
from megatron_flex.collectives.meter import call_metered
from megatron_flex.layout import (
    Dim,
    ExpertChoice,
    Layout,
    extract,
    padded_shape,
    rows_by_source,
    select_experts,
    to_device,
)
from megatron_flex.layout.gradient_layout import find_route_gradient
from megatron_flex.mesh import Mesh


@dataclass(eq=False)
class Dispatch(ExpertChoice):
    """The router's choice on this rank, and the ranks to which the tokens are dispatched.

    Attributes:
        mesh: the run's axes; experts are sharded over `ep`, and rows come from all ranks of `ep` and `etp`.
    """

    mesh: Mesh
    _tokens: dict[tuple[str, ...], Tensor] = field(init=False, repr=False, default_factory=dict)
    _rows: dict[int | None, RowPlan] = field(init=False, repr=False, default_factory=dict)

    @cached_property
    def _counts(self) -> Tensor:
        """`[ep, etp, experts]`: the number of rows from each rank, on the host.

        Collective over `ep` and `etp` at the first use, which all their ranks therefore reach together.
        """
        axes = [axis for axis in (self.mesh["etp"], self.mesh["ep"]) if axis.size > 1]
        counts = self.chosen.sum(0) if axes else self.host.sum(0)
        for axis in axes:
            counts = stack_along(counts, axis)
        return counts.cpu().view(self.mesh["ep"].size, self.mesh["etp"].size, -1)

    def count_tokens(self, axes: tuple[str, ...]) -> Tensor:
        """`[ranks, experts]`: the number of tokens that each rank along some axes has for each expert, on the
        host; the last axis counts fastest. Collective over the axes, once.
        """
        known = self._tokens.get(axes)
        if known is None:
            counts = self.chosen.sum(0)
            for axis in (self.mesh[name] for name in reversed(axes)):
                counts = stack_along(counts, axis) if axis.size > 1 else counts
            known = self._tokens[axes] = counts.reshape(-1, self.chosen.shape[1]).cpu()
        return known

    def plan_rows(self, expert: int | None) -> RowPlan:
        """Where the rows of all experts, or of one, are on this rank. Collective as `_counts`."""
        plan = self._rows.get(expert)
        if plan is None:
            plan = self._rows[expert] = self._plan_rows(expert)
        return plan

    def _plan_rows(self, expert: int | None) -> RowPlan:
        ep, etp, counts = self.mesh["ep"], self.mesh["etp"], self._counts
        experts = select_experts(self.chosen.shape[1], ep.size, ep.coord, expert)
        places = [torch.cat(ranks) for ranks in rows_by_source(counts[:, :, experts], self.etp_outer)]
        sent = counts[ep.coord, etp.coord].clone()
        if expert is not None:  # a rank sends, and receives, rows of that expert alone
            sent[:expert] = 0
            sent[expert + 1 :] = 0
        return RowPlan(
            [len(rows) for rows in places],
            [to_device(rows, self.chosen.device) for rows in places],
            counts[:, etp.coord, experts].sum(1).tolist(),
            sent.view(ep.size, -1).sum(1).tolist(),
        )


class RowPlan(NamedTuple):
    """Where the rows of experts are on this rank.

    Attributes:
        lengths: for each coordinate of `etp`, how many rows come from its ranks.
        places: which rows of the local tensor these are: by source rank, then by expert.
        from_ranks: the number of local rows from each rank of this rank's `ep` group.
        to_ranks: the number of this rank's own rows on each rank of its `ep` group.
    """

    lengths: list[int]
    places: list[Tensor]
    from_ranks: list[int]
    to_ranks: list[int]


@dataclass(eq=False)
class Route:
    """The route of one tensor whose dim 0 has the rows of this rank's experts.

    Attributes:
        dispatch: the source ranks of the rows.
        layout: the layout of the tensor over `etp`; its rows, dim 0, are the same on all of `etp`.
        token_layout: the layout of the tensors at their tokens: `[s, b, slots, ...]`, or `[rows, ...]` of one
            expert, uneven where the tokens are sharded.
        expert: if given, the rows are those of this expert alone; ranks without it hold no rows.
    """

    dispatch: Dispatch
    layout: Layout
    token_layout: Layout
    expert: int | None = None

    @property
    def mesh(self) -> Mesh:
        """The run's axes."""
        return self.dispatch.mesh

    @property
    def has_rows(self) -> bool:
        """Whether the tensor has rows of an expert on this rank."""
        ep = self.mesh["ep"]
        experts = select_experts(self.dispatch.chosen.shape[1], ep.size, ep.coord, self.expert)
        return int(experts.stop) > int(experts.start)

    def for_gradient(self) -> Route:
        """The route of the tensor's gradient."""
        return Route(self.dispatch, *find_route_gradient(self.layout, self.token_layout), self.expert)

    def gather_order(self) -> Tensor | None:
        """For one expert, the permutation that sorts the assembled rows by token; None if none is needed.

        Collective over the axes that shard the tokens in the first call, which all their ranks make together.
        """
        return None if self.expert is None else self._token_order

    @cached_property
    def _token_order(self) -> Tensor:
        rows = Layout(self.token_layout.dims[:1])
        places = self.dispatch.token_positions(self.mesh.coords, self.mesh.sizes)
        tokens = self.dispatch.host[:, self.expert].nonzero()[:, 0]
        positions = places.index_select(0, to_device(tokens, places.device))
        if has_uneven_shards(rows, self.mesh):
            positions = assemble_uneven(positions, rows, self.mesh, self.list_shapes(rows, positions))
        return positions.argsort()

    def list_shapes(self, layout: Layout, rows: Tensor) -> list[tuple[int, ...]]:
        """The shapes of all ranks' rows of one expert at their tokens. Collective once for all experts.

        Args:
            layout: the layout of the rows.
            rows: those of this rank's tokens.
        """
        assert self.expert is not None
        axes = tuple(name for name in layout.axes if name not in layout.partial)
        lengths = self.dispatch.count_tokens(axes)[:, self.expert].tolist()
        return [(length, *rows.shape[1:]) for length in lengths]

    def empty_at_tokens(self, local: Tensor) -> Tensor:
        """An empty tensor of the shape that `local` has at its tokens."""
        features = self._features(local)
        if self.expert is None:
            return local.new_empty((*self.dispatch.shape, self.dispatch.slots, *features))
        return local.new_empty((int(self.dispatch.host[:, self.expert].sum()), *features))

    def count_bytes(self, local: Tensor) -> int:
        """The bytes of the full tensor at its tokens, as all ranks count them without communication: of one
        expert those that it has if all experts have the same number of tokens.
        """
        choice = self.dispatch
        tokens = prod(padded_shape(Layout(choice.stream.dims[:2]), choice.shape, self.mesh.sizes))
        rows = tokens * choice.slots
        if self.expert is not None:
            rows = -(-rows // choice.chosen.shape[1])
        return rows * prod(self._features(local)) * local.element_size()

    def _features(self, local: Tensor) -> tuple[int, ...]:
        """The shape of one whole row."""
        row = Layout((Dim("t"), *self.layout.dims[1:]))
        return padded_shape(row, local.shape, self.mesh.sizes)[1:]

    def to_tokens(self, local: Tensor) -> Tensor:
        """The rows of this rank's own tokens. Collective over `ep` and `etp`.

        Args:
            local: the rows of this rank's experts, in `layout`.

        Returns:
            The local tensor in `token_layout`; zeros in slots without an expert.
        """
        rows, _ = assemble_on_all_ranks(local, self.layout, self.mesh)  # features are cut over `etp`
        plan = self.dispatch.plan_rows(self.expert)
        # All of `etp` have the rows of all of their tokens. Each keeps those of its own tokens and of the
        # ranks with its coordinate on `etp`, so that the exchange is over `ep` alone.
        kept = rows.index_select(0, plan.places[self.mesh["etp"].coord])
        rows = self._exchange(kept, plan.from_ranks, plan.to_ranks)
        return self.dispatch.by_token(rows) if self.expert is None else rows

    def to_experts(self, rows: Tensor) -> Tensor:
        """The rows of this rank's experts, the inverse of `to_tokens`. Collective over `ep` and `etp`."""
        rows = self.dispatch.by_expert(rows) if self.expert is None else rows
        plan, axis = self.dispatch.plan_rows(self.expert), self.mesh["etp"]
        rows = self._exchange(rows, plan.to_ranks, plan.from_ranks)
        if axis.size > 1:  # the rows of the other coordinates, in pieces of one length for the collective
            most = max(plan.lengths)
            padded = rows.new_zeros((most, *rows.shape[1:]))
            padded[: len(rows)] = rows
            pieces = list(stack_along(padded, axis))
        else:
            pieces = [rows]
        full = rows.new_empty((sum(plan.lengths), *rows.shape[1:]))
        for piece, places, length in zip(pieces, plan.places, plan.lengths, strict=True):
            full.index_copy_(0, places, piece[:length])
        return extract(self.layout, full, self.mesh.coords, self.mesh.sizes)

    def _exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all over `ep`: send `send[r]` rows to rank r and receive `receive[r]` rows from it."""
        axis = self.mesh["ep"]
        if axis.size == 1:
            return rows
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        width = rows[:1].nbytes if len(rows) else out[:1].nbytes  # sent as bytes: not all dtypes can be
        received, sent = [n * width for n in receive], [n * width for n in send]
        call_metered(
            "all_to_all", axis, out, dist.all_to_all_single, as_bytes(out), as_bytes(rows), received, sent
        )
        return out
