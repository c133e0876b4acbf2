"""Rows of experts: which rows a rank has, which rank sent them, and which token each row belongs to.

A rank's tokens are counted by sequence and then by batch. On the rank that has the tokens, rows are ordered
by expert and then by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_flex.layout.algebra import Coords, Layout, Sizes
from megatron_flex.layout.assembly import extract
from megatron_flex.layout.spans import padded_shape


@dataclass(eq=False)
class ExpertChoice:
    """The experts chosen for each of a rank's tokens, in one call of one layer.

    Attributes:
        chosen: `[tokens, experts]`, true where the token goes to the expert.
        shape: `(sequence, batch)` of the tokens; `tokens` is their product.
        slots: maximum number of experts of a token.
        stream: the layout `[s, b, ...]` of the tokens.
        etp_outer: whether a rank's rows are ordered by source (etp, ep) and not (ep, etp).
    """

    chosen: Tensor
    shape: tuple[int, int]
    slots: int
    stream: Layout
    etp_outer: bool

    @cached_property
    def host(self) -> Tensor:
        """`chosen` on the host, which waits for the device once: only there the number of rows is known."""
        return self.chosen.cpu()

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Expert and token of each row on the rank that has the tokens, by expert and then by token; on the
        host.
        """
        experts, tokens = self.host.T.nonzero(as_tuple=True)
        return experts, tokens

    @cached_property
    def slot(self) -> Tensor:
        """`[tokens, experts]`: the slot of an expert among those of the token, by expert number; on the
        host.
        """
        return self.host.cumsum(1) - 1

    @cached_property
    def indices(self) -> Tensor:
        """`[sequence, batch, slots]`: the experts of each token in ascending order; -1 for none."""
        experts, tokens = self.pairs
        out = experts.new_full((self.chosen.shape[0], self.slots), -1)
        out[tokens, self.slot[tokens, experts]] = experts
        return to_device(out.view(*self.shape, self.slots), self.chosen.device)

    @cached_property
    def _places(self) -> Tensor:
        """The place of each row, by expert and then by token, among the slots of all tokens."""
        experts, tokens = self.pairs
        return to_device(tokens * self.slots + self.slot[tokens, experts], self.chosen.device)

    def by_token(self, rows: Tensor) -> Tensor:
        """`[sequence, batch, slots, ...]` of all rows of these tokens; zeros in slots without an expert."""
        dense = rows.new_zeros((self.chosen.shape[0] * self.slots, *rows.shape[1:]))
        dense.index_copy_(0, self._places, rows)
        return dense.view(*self.shape, self.slots, *rows.shape[1:])

    def by_expert(self, dense: Tensor) -> Tensor:
        """All rows of these tokens, the inverse of `by_token`."""
        return dense.reshape(-1, *dense.shape[3:]).index_select(0, self._places)

    def token_positions(self, coords: Coords, sizes: Sizes) -> Tensor:
        """The positions of the rank's tokens among all tokens, counted by sequence and then by batch.

        Args:
            coords: the rank's coordinates.
            sizes: the sizes of the mesh axes.
        """
        stream = Layout(self.stream.dims[:2])
        shape = padded_shape(stream, self.shape, sizes)
        positions = torch.arange(shape[0] * shape[1], device=self.chosen.device).view(shape)
        return extract(stream, positions, coords, sizes).reshape(-1)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, for which the host does not wait."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def select_experts(experts: int, ranks: int, coord: int, expert: int | None = None) -> slice:
    """The experts of a rank whose rows are in a tensor.

    Args:
        experts: how many there are.
        ranks: the number of ranks that share them, contiguously.
        coord: the rank's coordinate among those.
        expert: if given, the tensor has only the rows of this expert.
    """
    each = experts // ranks
    first = coord * each
    if expert is None:
        return slice(first, first + each)
    return slice(expert, expert + int(first <= expert < first + each))


def rows_by_source(counts: Tensor, etp_outer: bool) -> list[list[Tensor]]:
    """For each coordinate of `etp` and of `ep`, the rows here that were sent from that rank, by expert.

    Args:
        counts: `[ep, etp, experts]`: the number of rows from each rank to the experts here.
        etp_outer: whether the rows of an expert are ordered by source (etp, ep) and not (ep, etp).
    """
    outer = counts.permute(2, 1, 0) if etp_outer else counts.permute(2, 0, 1)
    starts = (outer.reshape(-1).cumsum(0).view(outer.shape) - outer).permute(
        (2, 1, 0) if etp_outer else (1, 2, 0)
    )
    none = torch.empty(0, dtype=torch.int64)
    return [
        [
            torch.cat(
                [
                    none,
                    *(
                        torch.arange(int(s), int(s + n))
                        for s, n in zip(starts[e, t], counts[e, t], strict=True)
                    ),
                ]
            )
            for e in range(counts.shape[0])
        ]
        for t in range(counts.shape[1])
    ]
