"""Experts' tensors of a dump, whose rows lie where routers sent them: led home to their tokens when read.

A rank writes its rows as they are, and which experts its own tokens go to. From all ranks' decisions follows
whose each row is, by the rules that a live read goes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.layouts import from_json, to_json
from megatron_flex.errors import DumpError
from megatron_flex.layout import (
    Choice,
    Coords,
    Layout,
    Sizes,
    assemble,
    coordinates,
    held,
    padded_shape,
    rows_from,
)

BITS = (1, 2, 4, 8, 16, 32, 64, 128)
Place = tuple[int, int, int]  # coordinates on `edp`, `ep`, `etp`


def pack(chosen: Tensor) -> Tensor:
    """`[tokens, experts]` of bools as bits: `[tokens, bytes]`. Nothing waits for a device."""
    tokens, experts = chosen.shape
    width = -(-experts // len(BITS))
    padded = chosen.new_zeros((tokens, width * len(BITS)), dtype=torch.uint8)
    padded[:, :experts] = chosen
    weights = torch.tensor(BITS, dtype=torch.uint8, device=chosen.device)
    return (padded.view(tokens, width, len(BITS)) * weights).sum(2, dtype=torch.uint8)


def unpack(packed: Tensor, experts: int) -> Tensor:
    """The inverse of `pack`."""
    weights = torch.tensor(BITS, dtype=torch.uint8)
    return (packed[:, :, None] & weights).ne(0).flatten(1)[:, :experts].contiguous()


def choice_to_json(choice: Choice) -> dict[str, Any]:
    """What an entry of a decision says beside its bits."""
    return {
        "experts": choice.chosen.shape[1],
        "shape": list(choice.shape),
        "slots": choice.slots,
        "stream": to_json(Layout(choice.stream.dims[:2])),
        "etp_outer": choice.etp_outer,
    }


def choice_from_json(told: Any, packed: Tensor) -> Choice:
    """The decision that `choice_to_json` and `pack` told.

    Raises:
        DumpError: it is none.
    """
    try:
        experts, (sequence, batch) = int(told["experts"]), (int(n) for n in told["shape"])
        stream, slots = from_json(told["stream"]), int(told["slots"])
        if packed.shape != (sequence * batch, -(-experts // len(BITS))) or len(stream.dims) != 2:
            raise DumpError(f"bits of shape {tuple(packed.shape)} for {sequence * batch} tokens: damaged")
        return Choice(unpack(packed, experts), (sequence, batch), slots, stream, bool(told["etp_outer"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DumpError(f"no decision of a router: {error!r}; the dump is damaged") from error


class Home(NamedTuple):
    """A tensor of experts in one data parallel replica, by token.

    Attributes:
        whole: `[s, b, slots, ...]`; or of one expert `[t, ...]`, in the order of tokens.
        tokens: of one expert, which token each row belongs to, counted by sequence and then by batch.
        shape: `(s, b)` of the replica's tokens.
    """

    whole: Tensor
    tokens: Tensor | None
    shape: tuple[int, int]

    def dense(self) -> Tensor:
        """`[s, b, ...]`, with zeros for the tokens that an expert does not get."""
        if self.tokens is None:
            return self.whole
        out = self.whole.new_zeros((self.shape[0] * self.shape[1], *self.whole.shape[1:]))
        out[self.tokens] = self.whole
        return out.view(*self.shape, *self.whole.shape[1:])

    def chosen(self) -> Tensor:
        """`[s, b]`: of one expert, whether it gets the token."""
        out = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool)
        out[slice(None) if self.tokens is None else self.tokens] = True
        return out.view(self.shape)


class Routing:
    """What the routers of all ranks decided, in one call of one layer.

    Args:
        choices: each rank's coordinates and decision; of all ranks that hold the layer.
        sizes: the mesh.

    Raises:
        DumpError: decisions that no layer makes, or too few.
    """

    def __init__(self, choices: Iterable[tuple[Coords, Choice]], sizes: Sizes) -> None:
        self.sizes = sizes
        self.choices = {place_of(coords): (coords, choice) for coords, choice in choices}
        found = {c.chosen.shape[1] for _, c in self.choices.values()}
        self.experts = next(iter(found), 0)
        if len(found) != 1 or not self.experts or self.experts % sizes.get("ep", 1):
            raise DumpError(f"routers choose among {sorted(found)} experts on {sizes.get('ep', 1)} ranks")
        self._from = cache(self._rows_from)

    def home(
        self,
        rows: Mapping[Place, Tensor],
        layout: Layout,
        home: Layout,
        replica: int,
        expert: int | None = None,
    ) -> Home:
        """Lead the rows of a tensor home.

        Args:
            rows: by the place of a rank the rows of its experts, as it wrote them; where ranks along `etp`
                hold the same, of one of them; none of ranks that do not have the expert.
            layout: of those over `etp`.
            home: how the tensors at home make the whole.
            replica: the data parallel replica whose tokens are wanted.
            expert: if given, the rows are those of this expert alone.

        Raises:
            DumpError: rows are missing, or fewer than the routers sent.
        """
        owners = [p for p, (c, _) in sorted(self.choices.items()) if c.get("dp", 0) == replica]
        parts: list[Tensor] = []
        tokens: list[Tensor] = []
        for coords in coordinates(home, self.sizes):
            place = next((p for p in owners if _fits(self.choices[p][0], coords)), None)
            if place is None:
                raise DumpError(f"no router's decision of the rank at {coords} of replica {replica}")
            whole, choice = self.choices[place]
            came = self._of_rank(place, rows, layout, expert)
            parts.append(choice.by_token(came) if expert is None else came)
            if expert is not None:
                tokens.append(choice.positions(expert, whole, self.sizes))
        choice = self.choices[owners[0]][1]
        sequence, batch = padded_shape(choice.stream, choice.shape, self.sizes)
        made = assemble(home, parts, self.sizes)
        if expert is None:
            return Home(made, None, (sequence, batch))
        numbers = assemble(Layout(home.dims[:1]), tokens, self.sizes)
        order = numbers.argsort()
        return Home(made[order], numbers[order], (sequence, batch))

    def _of_rank(
        self, place: Place, rows: Mapping[Place, Tensor], layout: Layout, expert: int | None
    ) -> Tensor:
        """The rows of a rank's own tokens, by expert and then by token."""
        edp, source, etp = place
        pieces = []
        for ep in range(self.sizes.get("ep", 1)):
            wanted = self._from(edp, ep, expert)[etp][source]
            if len(wanted):
                pieces.append(self._summed(rows, layout, edp, ep, wanted))
        if pieces:
            return torch.cat(pieces)
        some = next(iter(rows), None)
        if some is None:
            raise DumpError("no rank wrote rows; parts of the dump are missing")
        return self._summed(rows, layout, some[0], some[1], torch.empty(0, dtype=torch.int64))

    def _summed(
        self, rows: Mapping[Place, Tensor], layout: Layout, edp: int, ep: int, wanted: Tensor
    ) -> Tensor:
        """Some rows that are at a rank of `ep`, whole over `etp`. Summands are added in fp32."""
        pieces = []
        for coords in coordinates(layout, self.sizes):
            etp = coords.get("etp")
            places = range(self.sizes.get("etp", 1)) if etp is None else (etp,)
            shard = next((rows[edp, ep, t] for t in places if (edp, ep, t) in rows), None)
            if shard is None:
                raise DumpError(f"no rows of the ranks at edp={edp}, ep={ep}; parts of the dump are missing")
            if len(wanted) and int(wanted.max()) >= len(shard):
                raise DumpError(f"{len(shard)} rows at edp={edp}, ep={ep}, and routers sent more: damaged")
            pieces.append(shard[wanted])
        dtype = pieces[0].dtype
        if layout.partial and dtype.itemsize < 4:
            pieces = [p.float() for p in pieces]
        return assemble(layout, pieces, self.sizes).to(dtype)

    def _rows_from(self, edp: int, ep: int, expert: int | None) -> list[list[Tensor]]:
        """By `etp` and `ep` of the source, where its rows lie at the ranks with these coordinates."""
        sizes = self.sizes.get("ep", 1), self.sizes.get("etp", 1)
        places = [(edp, e, t) for e in range(sizes[0]) for t in range(sizes[1])]
        missing = [p for p in places if p not in self.choices]
        if missing:
            raise DumpError(f"no router's decision of the rank at (edp, ep, etp)={missing[0]}")
        counts = torch.stack([self.choices[p][1].chosen.sum(0) for p in places]).view(*sizes, self.experts)
        mine = held(self.experts, sizes[0], ep, expert)
        return rows_from(counts[:, :, mine], self.choices[places[0]][1].etp_outer)


def place_of(coords: Coords) -> Place:
    """A rank's place as layers of experts have it."""
    return coords.get("edp", 0), coords.get("ep", 0), coords.get("etp", 0)


def _fits(coords: Coords, wanted: Coords) -> bool:
    return all(coords.get(axis, 0) == at for axis, at in wanted.items())
