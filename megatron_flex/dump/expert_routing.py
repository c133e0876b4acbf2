"""Experts' tensors of a dump: ranks stored the rows that routers sent them; reading sorts the rows by token.

A rank writes its rows as they are, and which experts its own tokens go to. From all ranks' decisions follows
whose each row is, by the rules that a live read goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.json_form import to_json
from megatron_flex.dump.schema import RouterRecord, layout_from_json, layout_to_json
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import (
    Coords,
    ExpertChoice,
    Layout,
    Sizes,
    Span,
    coordinates,
    padded_shape,
    rows_by_source,
    select_experts,
)

BIT_VALUES = (1, 2, 4, 8, 16, 32, 64, 128)
ExpertCoords = tuple[int, int, int]  # coordinates on `edp`, `ep`, `etp`


def pack_choice(chosen: Tensor) -> Tensor:
    """`[tokens, experts]` of bools as bits: `[tokens, bytes]`. Nothing waits for a device."""
    tokens, experts = chosen.shape
    width = -(-experts // len(BIT_VALUES))
    padded = chosen.new_zeros((tokens, width * len(BIT_VALUES)), dtype=torch.uint8)
    padded[:, :experts] = chosen
    weights = torch.tensor(BIT_VALUES, dtype=torch.uint8, device=chosen.device)
    return (padded.view(tokens, width, len(BIT_VALUES)) * weights).sum(2, dtype=torch.uint8)


def unpack_choice(packed: Tensor, experts: int) -> Tensor:
    """The inverse of `pack_choice`."""
    weights = torch.tensor(BIT_VALUES, dtype=torch.uint8)
    return (packed[:, :, None] & weights).ne(0).flatten(1)[:, :experts].contiguous()


def choice_to_json(choice: ExpertChoice) -> dict[str, Any]:
    """The route of an entry that has a decision: all of it but the bits."""
    stream = layout_to_json(Layout(choice.stream.dims[:2]))
    record = RouterRecord(choice.chosen.shape[1], choice.shape, choice.slots, stream, choice.etp_outer)
    return to_json(record)


def choice_from_json(record: Any, packed: Tensor) -> ExpertChoice:
    """The decision that `choice_to_json` and `pack_choice` wrote.

    Raises:
        DumpError: the record is not a decision.
    """
    try:
        stored = RouterRecord(**record)
        experts, (sequence, batch) = int(stored.experts), (int(n) for n in stored.shape)
        stream, slots = layout_from_json(stored.stream), int(stored.slots)
        if packed.shape != (sequence * batch, -(-experts // len(BIT_VALUES))) or len(stream.dims) != 2:
            raise DumpError(f"bits of shape {tuple(packed.shape)} for {sequence * batch} tokens: damaged")
        chosen = unpack_choice(packed, experts)
        if not 0 < slots <= experts or (sequence * batch and int(chosen.sum(1).max()) > slots):
            raise DumpError(f"tokens that go to more than {slots} of {experts} experts: damaged")
        return ExpertChoice(chosen, (sequence, batch), slots, stream, bool(stored.etp_outer))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, LayoutError) as error:
        raise DumpError(f"no decision of a router: {error!r}; the dump is damaged") from error


class RowLocations(NamedTuple):
    """The location of the rows of one data parallel replica's tokens, one entry for each row.

    Attributes:
        edp: the coordinate of the ranks that store the row,
        ep: likewise,
        row: and its number there.
        token: that it belongs to, counted in the full tensor by sequence and then by batch.
        slot: its place among the rows of its token; 0 if they are those of one expert.
    """

    edp: Tensor
    ep: Tensor
    row: Tensor
    token: Tensor
    slot: Tensor

    def among(self, tokens: Tensor) -> RowLocations:
        """The locations of the rows of some tokens, given by a mask."""
        selected = tokens[self.token]
        return RowLocations(*(entry[selected] for entry in self))

    def ranks(self) -> list[tuple[int, int, Tensor]]:
        """The coordinates `edp`, `ep` that have rows, each with a mask of its entries."""
        coordinates = torch.stack([self.edp, self.ep]).unique(dim=1).T.tolist()
        return [(edp, ep, (self.edp == edp) & (self.ep == ep)) for edp, ep in coordinates]


class ExpertRouting:
    """What the routers of all ranks decided, in one call of one layer.

    Args:
        choices: each rank's coordinates and decision; of all ranks that hold the layer.
        sizes: the mesh.

    Raises:
        DumpError: decisions that no layer makes.
    """

    def __init__(self, choices: Iterable[tuple[Coords, ExpertChoice]], sizes: Sizes) -> None:
        self.sizes = sizes
        self.choices = {get_expert_coords(coords): (coords, choice) for coords, choice in choices}
        every = [c for _, c in self.choices.values()]
        if not every:
            raise DumpError("the dump has no router's decision; parts of it are missing")
        some = every[0]
        self.experts = some.chosen.shape[1]
        if self.experts % sizes.get("ep", 1) or any(
            _get_choice_kind(c) != _get_choice_kind(some) for c in every
        ):
            counts = sorted({c.chosen.shape[1] for c in every})
            raise DumpError(
                f"routers choose among {counts} experts on {sizes.get('ep', 1)} ranks, and not all alike: "
                "the dump is damaged"
            )
        self.slots, self._tokens = some.slots, Layout(some.stream.dims[:2])
        try:
            sequence, batch = padded_shape(self._tokens, some.shape, sizes)
            for coords, choice in self.choices.values():
                choice.token_positions(coords, sizes)
        except LayoutError as error:
            raise DumpError(f"tokens of routers: {error}; the dump is damaged") from error
        self.shape = sequence, batch
        self._sent: dict[tuple[int, int, int | None], list[list[Tensor]]] = {}
        self._rows: dict[tuple[int, int | None], RowLocations] = {}

    @property
    def weight(self) -> int:
        """The number of entries of all ranks' decisions."""
        return sum(choice.chosen.numel() for _, choice in self.choices.values())

    @property
    def sequences(self) -> tuple[Span, ...]:
        """The first token and the end of each packed sequence; empty where nothing is packed."""
        return self._tokens.dims[0].sequences

    def rows(self, replica: int, expert: int | None = None) -> RowLocations:
        """Return the location of the rows of a replica's tokens.

        Args:
            replica: its coordinate on `dp`.
            expert: if given, of a tensor that has the rows of this expert alone.

        Raises:
            DumpError: a rank's decision is missing, or there is no such expert.
        """
        key = replica, expert
        if key not in self._rows:  # all tensors of the layer's experts ask for the same
            self._rows[key] = self._locate(replica, expert)
        return self._rows[key]

    def _locate(self, replica: int, expert: int | None) -> RowLocations:
        if expert is not None and not (type(expert) is int and 0 <= expert < self.experts):
            raise DumpError(f"rows of expert {str(expert)[:40]} of {self.experts}: the dump is damaged")
        out = []
        owners = [(p, c) for p, (c, _) in sorted(self.choices.items()) if c.get("dp", 0) == replica]
        for at in coordinates(self._tokens, self.sizes):
            place = next((p for p, c in owners if all(c.get(a, 0) == n for a, n in at.items())), None)
            if place is None:
                raise DumpError(f"no router's decision of the rank at {at} of replica {replica}")
            out.append(self._of(place, expert))
        return RowLocations(*(torch.cat(entries) for entries in zip(*out, strict=True)))

    def sent(self, edp: int, ep: int, expert: int | None = None) -> int:
        """How many rows the ranks with these coordinates got, or of one expert."""
        return sum(len(rows) for sources in self._from(edp, ep, expert) for rows in sources)

    def _of(self, place: ExpertCoords, expert: int | None) -> RowLocations:
        """The location of the rows of one rank's own tokens."""
        edp, source, etp = place
        coords, choice = self.choices[place]
        experts, tokens = choice.pairs
        slots = choice.slot[tokens, experts]
        if expert is not None:
            tokens = tokens[experts == expert]
            experts, slots = torch.full_like(tokens, expert), torch.zeros_like(tokens)
        row = torch.cat([self._from(edp, ep, expert)[etp][source] for ep in range(self.sizes.get("ep", 1))])
        where = choice.token_positions(coords, self.sizes)[tokens]
        ep = experts // (self.experts // self.sizes.get("ep", 1))
        return RowLocations(torch.full_like(ep, edp), ep, row, where, slots)

    def _from(self, edp: int, ep: int, expert: int | None) -> list[list[Tensor]]:
        """By `etp` and `ep` of the source, the location of its rows on the ranks with these coordinates."""
        key = edp, ep, expert
        if key not in self._sent:
            sizes = self.sizes.get("ep", 1), self.sizes.get("etp", 1)
            places = [(edp, e, t) for e in range(sizes[0]) for t in range(sizes[1])]
            missing = [p for p in places if p not in self.choices]
            if missing:
                raise DumpError(f"no router's decision of the rank at (edp, ep, etp)={missing[0]}")
            sources = [self.choices[p][1] for p in places]
            counts = torch.stack([c.chosen.sum(0) for c in sources]).view(*sizes, self.experts)
            experts = select_experts(self.experts, sizes[0], ep, expert)
            self._sent[key] = rows_by_source(counts[:, :, experts], sources[0].etp_outer)
        return self._sent[key]


def scatter_rows_to_tokens(
    rows: RowLocations,
    fetch: Callable[[int, int, Tensor], Tensor],
    shape: tuple[int, int],
    slots: int,
    some: tuple[int, int],
) -> Tensor:
    """`[s, b, slots, ...]`: rows by token, and zeros.

    Args:
        rows: the location of the rows.
        fetch: gives some rows, whole over `etp`, of the ranks at coordinates `edp`, `ep`.
        shape: `(s, b)` of the tokens.
        slots: for each token.
        some: the coordinates of ranks that have rows, if none is wanted.
    """
    ranks = rows.ranks() or [(*some, torch.zeros(len(rows.row), dtype=torch.bool))]
    out: Tensor | None = None
    for edp, ep, on_rank in ranks:
        values = fetch(edp, ep, rows.row[on_rank])
        if out is None:
            out = values.new_zeros((shape[0] * shape[1], slots, *values.shape[1:]))
        out[rows.token[on_rank], rows.slot[on_rank]] = values
    assert out is not None
    return out.view(*shape, *out.shape[1:])


def get_expert_coords(coords: Coords) -> ExpertCoords:
    """A rank's coordinates as layers of experts have them."""
    return coords.get("edp", 0), coords.get("ep", 0), coords.get("etp", 0)


def _get_choice_kind(choice: ExpertChoice) -> tuple[Any, ...]:
    """What all ranks' decisions have in common."""
    return choice.chosen.shape[1], choice.shape, choice.slots, choice.stream.dims[:2], choice.etp_outer
