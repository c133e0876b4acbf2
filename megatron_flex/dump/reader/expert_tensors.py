"""One tensor of experts of one microbatch on one replica, by token, from the rows that all ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_flex.dump.expert_routing import ExpertRouting, choice_from_json, scatter_rows_to_tokens
from megatron_flex.dump.json_form import pick_known
from megatron_flex.dump.reader.shard_files import (
    LocatedShard,
    PartFiles,
    parse_layout_text,
)
from megatron_flex.dump.reader.tensor_assembly import AssembledTensor, group_shards
from megatron_flex.dump.run_folders import StoredIteration
from megatron_flex.dump.schema import ROUTING, RowsRoute
from megatron_flex.dump.token_selection import SAMPLE_DIM, TOKEN_DIM, find_dim
from megatron_flex.errors import DumpError
from megatron_flex.layout import Dim, DimIndex, Layout, Sizes

if TYPE_CHECKING:
    from megatron_flex.dump.reader.dump_reader import OpenDump

TOKEN_SAMPLE_DIMS = Dim(TOKEN_DIM), Dim(SAMPLE_DIM)


class ExpertTensor:
    """A tensor of experts, with its rows in the order of their tokens.

    It is `[s, b, slots, ...]`, and of one expert `[s, b, ...]`; zeros where a token has no row. Regions are
    read as they are asked for.

    Attributes:
        layout: of the tensor by token.
        dtype: of the tensor.
        shape: of the full tensor.
        where: what it is, for errors.
    """

    def __init__(
        self,
        files: PartFiles,
        located: Sequence[LocatedShard],
        routing: ExpertRouting,
        token_layout: Layout,
        replica: int,
        sizes: Sizes,
        where: str,
    ) -> None:
        self.where, self.routing = where, routing
        expert = pick_known(RowsRoute, located[0][1].route or {}).expert
        self._single_expert = expert is not None
        self._slots = 1 if self._single_expert else routing.slots
        self._rows = routing.rows(replica, expert)
        self._ranks = _assemble_by_rank(files, located, sizes, where)
        self._check_row_counts(expert)
        first_rows = next(iter(self._ranks.values()))
        self.dtype = first_rows.dtype
        dims = (*TOKEN_SAMPLE_DIMS, *token_layout.dims[1:]) if self._single_expert else token_layout.dims
        dims = (replace(dims[0], sequences=routing.sequences), *dims[1:])
        slots = () if self._single_expert else (routing.slots,)
        self.shape = *routing.shape, *slots, *first_rows.shape[1:]
        self.layout = Layout(dims)
        if len(self.shape) != len(self.layout.dims):
            raise DumpError(
                f"{where}: rows of shape {first_rows.shape[1:]} in {token_layout.describe()}: the dump is "
                "damaged"
            )

    def _check_row_counts(self, expert: int | None) -> None:
        """Refuse a rank whose number of rows is not what routers sent it."""
        for (edp, ep), rows in self._ranks.items():
            sent = self.routing.sent(edp, ep, expert)
            if rows.shape[0] != sent:
                raise DumpError(
                    f"{self.where}: {rows.shape[0]} rows at edp={edp}, ep={ep}, and routers sent {sent}: "
                    "the dump is damaged"
                )

    def dim(self, name: str) -> int | None:
        """The first dim of that name."""
        return find_dim(self.layout, name)

    @property
    def dims(self) -> list[str]:
        """The names of its dims."""
        return [d.name or f"d{i}" for i, d in enumerate(self.layout.dims)]

    def region(self, indices: Sequence[DimIndex]) -> Tensor:
        """The requested entries of each dim.

        Raises:
            DumpError: a rank's rows are missing or damaged.
        """
        tokens, samples, *rest = indices
        (length, batch), slots = self.routing.shape, [0] if self._single_expert else list(rest[0])
        features = rest if self._single_expert else rest[1:]
        unique_tokens, at_token = torch.tensor(list(tokens), dtype=torch.int64).unique(return_inverse=True)
        unique_samples, at_sample = torch.tensor(list(samples), dtype=torch.int64).unique(return_inverse=True)
        place = torch.full((length, batch), -1)
        place[unique_tokens[:, None], unique_samples] = torch.arange(
            len(unique_tokens) * len(unique_samples)
        ).view(len(unique_tokens), len(unique_samples))
        place = place.flatten()
        rows = self._rows.among(place >= 0)
        rows = rows._replace(token=place[rows.token])

        def fetch(edp: int, ep: int, which: Tensor) -> Tensor:
            if (edp, ep) not in self._ranks:
                raise DumpError(
                    f"{self.where}: no rank at edp={edp}, ep={ep} wrote the rows that routers sent it"
                )
            return self._ranks[edp, ep].region([which.tolist(), *features])

        shape = len(unique_tokens), len(unique_samples)
        dense = scatter_rows_to_tokens(rows, fetch, shape, self._slots, next(iter(self._ranks)))
        dense = dense[at_token[:, None], at_sample][:, :, slots]
        return dense[:, :, 0] if self._single_expert else dense


class ExpertTensorReader:
    """The tensors of one site of experts.

    Args:
        dump: that has them.
        site: its name.
        stage: the pipeline stage that has it.
        call: the pass through it within a microbatch.
    """

    def __init__(self, dump: OpenDump, site: str, stage: int, call: int) -> None:
        self.dump, self.site, self.stage, self.call = dump, site, stage, call

    def entries(self, written: StoredIteration, kind: str, site: str = "") -> list[LocatedShard]:
        """What ranks of all replicas wrote: rows of any replica's tokens are on any."""
        located = [
            f
            for r in written.run.replicas
            for f in self.dump.entries(written, site or self.site, kind, self.stage, r)
        ]
        return [f for f in located if f[1].route is not None and f[1].call == self.call]

    def tensor(
        self,
        written: StoredIteration,
        microbatch: int,
        replica: int,
        located: Sequence[LocatedShard],
        where: str,
    ) -> ExpertTensor:
        """The tensor of a microbatch of a replica, by token.

        Args:
            written: the iteration.
            microbatch: its number.
            replica: the data parallel coordinate.
            located: what ranks wrote of it.
            where: what it is, for errors.
        """
        routing = self._routing(written, microbatch, str(pick_known(RowsRoute, located[0][1].route or {}).of))
        token_layout = parse_layout_text(json.dumps(self.dump.site_records[self.site].layout))
        sizes = written.run.sizes
        return ExpertTensor(self.dump.files, located, routing, token_layout, replica, sizes, where)

    def _routing(self, written: StoredIteration, microbatch: int, layer: str) -> ExpertRouting:
        def make() -> ExpertRouting:
            choices = []
            for part, entry, _, coords in self.entries(written, ROUTING, layer):
                if entry.microbatch == microbatch:
                    every = tuple(range(n) for n in part.where[entry.tensor][1])
                    choices.append(
                        (coords, choice_from_json(entry.route, self.dump.files.read(part, entry, every)))
                    )
            return ExpertRouting(choices, written.run.sizes)

        key = (written.iteration, written.run_of), self.stage, layer, self.call, microbatch
        return self.dump.routings.get(key, make, lambda routing: routing.weight)


def _assemble_by_rank(
    files: PartFiles, located: Sequence[LocatedShard], sizes: Sizes, where: str
) -> Mapping[tuple[int, int], AssembledTensor]:
    """The rows at the ranks of each pair of coordinates `edp`, `ep`, whole over `etp`."""
    groups: dict[tuple[int, int], list[LocatedShard]] = {}
    for shard in located:
        coords = shard[3]
        groups.setdefault((coords.get("edp", 0), coords.get("ep", 0)), []).append(shard)
    out = {}
    for at, several in sorted(groups.items()):
        layout, shards = group_shards(several, sizes, where)
        out[at] = AssembledTensor(files, layout, sizes, shards, where)
    return out
