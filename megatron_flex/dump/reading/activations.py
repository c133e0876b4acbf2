"""What passed at a site, over all samples of the global batch, as a source of an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_flex.dump.numbering import first_sample
from megatron_flex.dump.reading.array import Pass
from megatron_flex.dump.reading.assembling import Assembled, gathered
from megatron_flex.dump.reading.folders import REPLICAS, Written
from megatron_flex.dump.reading.picking import Selection
from megatron_flex.dump.reading.routed import Routed, Routings
from megatron_flex.dump.reading.shards import Found
from megatron_flex.dump.selection import SAMPLE, TOKEN, Picked, Sampled, pick, positions_of
from megatron_flex.errors import DumpError
from megatron_flex.layout import Coords, Index, Layout, Where, compact

if TYPE_CHECKING:
    from megatron_flex.dump.reading.opened import OpenDump


@dataclass(slots=True)
class Block:
    """One microbatch of one replica.

    Attributes:
        microbatch: its number on the replica.
        replica: the data parallel coordinate.
        kept: the samples of it that the dump keeps, counted within it.
        numbers: of these, in the global batch; of the block itself where the tensor has no samples.
    """

    microbatch: int
    replica: int
    kept: list[int]
    numbers: list[int]


@dataclass(slots=True)
class Plan:
    """How the samples of an iteration lie in blocks, as the first replica tells it.

    Attributes:
        written: the iteration.
        blocks: in the order of samples.
        starts: the place of each block's first sample among all, and the end.
        counts: samples of each microbatch, kept or not.
        assembled: the tensors of the first replica that were put together on the way.
        joined: whether all replicas are in one tensor.
    """

    written: Written
    blocks: list[Block]
    starts: list[int]
    counts: dict[int, int]
    first: Assembled | Routed
    joined: bool
    tensors: dict[tuple[int, int], Assembled | Routed] = field(default_factory=dict)


class Activations:
    """The tensors of a site, in order of samples.

    Args:
        dump: that has them.
        name: of the site, as people write it.
        site: of the site.
        kind: `value` or `gradient`.
        call: the pass through the site within a microbatch.
        stage: the pipeline stage that has it.
        passes: the iterations.
        only: one microbatch and replica of each, instead of all.
    """

    def __init__(
        self,
        dump: OpenDump,
        name: str,
        site: str,
        kind: str,
        call: int,
        stage: int,
        passes: list[Pass],
        only: tuple[int, int] | None = None,
    ) -> None:
        self.dump, self.name, self.site, self.kind, self.call, self.stage = (
            dump,
            name,
            site,
            kind,
            call,
            stage,
        )
        self.passes, self.only = passes, only
        self._plans: dict[Pass, Plan] = {}
        self._routings = Routings(dump, site, stage, call)

    # -- what it is ------------------------------------------------------------------------------------

    @cached_property
    def _like(self) -> Plan:
        if not self.passes:
            raise DumpError(f"{self.name}: no iteration of the dump is whole")
        return self.plan(self.passes[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one iteration."""
        return self._shape(self._like)

    def _shape(self, plan: Plan) -> tuple[int, ...]:
        token, rest = self._token(plan.first), self._rest(plan.first)
        out = [plan.starts[-1]]
        if token is not None:
            out.append(len(self._positions(plan, plan.blocks[0].numbers[0] if plan.blocks[0].numbers else 0)))
        return tuple(out + [plan.first.shape[d] for d in rest])

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of its dims."""
        one = self._like.first
        names = ["microbatch" if one.dim(SAMPLE) is None else "sample"]
        names += ["token"] if self._token(one) is not None else []
        return tuple(names + [one.dims[d] for d in self._rest(one)])

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self._like.first.dtype

    @property
    def layout(self) -> str:
        """In words."""
        return self._like.first.layout.describe(self._like.written.run.sizes)

    def among(self, passes: list[Pass]) -> Activations:
        """The same over other iterations."""
        if passes == self.passes:
            return self
        for which in passes:
            self.dump.written(which)
        return Activations(
            self.dump, self.name, self.site, self.kind, self.call, self.stage, passes, self.only
        )

    def labels(self, which: Pass) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of the samples, and the positions of the tokens: `[token]` or `[sample, token]`."""
        plan = self.plan(which)
        numbers = [n for block in plan.blocks for n in block.numbers]
        samples = None if plan.first.dim(SAMPLE) is None else torch.tensor(numbers, dtype=torch.int64)
        if self._token(plan.first) is None:
            return samples, None
        if self._per_sample(plan):
            return samples, torch.tensor([self._positions(plan, n) for n in numbers], dtype=torch.int64)
        return samples, torch.tensor(list(self._positions(plan, 0)), dtype=torch.int64)

    def pieces(self) -> Iterator[tuple[Pass, int, int, Activations]]:
        """Iteration, microbatch, replica, and a source of that alone."""
        for which in self.passes:
            written = self.dump.written(which)
            for replica in written.run.replicas:
                for microbatch in sorted(self._found(written, replica)):
                    only = microbatch, replica
                    args = self.dump, self.name, self.site, self.kind, self.call, self.stage, [which], only
                    source = Activations(*args)
                    plan = source.plan(which)
                    yield which, microbatch, replica, source
                    if plan.joined:
                        return

    # -- which tokens and samples ----------------------------------------------------------------------

    @cached_property
    def _selection(self) -> Selection:
        """The same for all runs of a dump."""
        return Selection.of(self.dump.manifest.settings)

    def _token(self, one: Assembled | Routed) -> int | None:
        """The dim of tokens; a mean over them leaves none."""
        return None if self._selection.mean else one.dim(TOKEN)

    def _rest(self, one: Assembled | Routed) -> list[int]:
        return [d for d in range(len(one.shape)) if d not in (one.dim(SAMPLE), self._token(one))]

    def _per_sample(self, plan: Plan) -> bool:
        return isinstance(self._selection.tokens, Sampled) and plan.first.dim(SAMPLE) is not None

    def _positions(self, plan: Plan, number: int) -> Sequence[int]:
        """The positions of the tokens that are kept of a sample."""
        token = plan.first.dim(TOKEN)
        assert token is not None
        length, tokens = plan.first.shape[token], self._selection.tokens
        if isinstance(tokens, Sampled) and not self._per_sample(plan):
            tokens = None
        return positions_of(tokens, length, plan.written.iteration, number)

    # -- where they are --------------------------------------------------------------------------------

    def plan(self, which: Pass) -> Plan:
        """How the samples of an iteration lie in blocks.

        Raises:
            DumpError: the site has nothing in it.
        """
        if which not in self._plans:
            if len(self._plans) > 256:
                self._plans.clear()
            self._plans[which] = self._planned(self.dump.written(which))
        return self._plans[which]

    def _planned(self, written: Written) -> Plan:
        run = written.run
        replica = run.replicas[0] if self.only is None else self.only[1]
        found = self._found(written, replica)
        if self.only is not None:
            found = {m: c for m, c in found.items() if m == self.only[0]}
        if not found:
            raise DumpError(
                f"{self.name}: nothing passed there in {written.describe()}; .at(...) chooses iterations that have it"
            )
        replicas, order = len(run.replicas), str(run.manifest.settings.get("order", "interleaved"))
        tensors: dict[tuple[int, int], Assembled | Routed] = {}
        counts: dict[int, int] = {}
        for microbatch in sorted(found):
            one = tensors[microbatch, replica] = self._assembled(written, microbatch, replica)
            sample = one.dim(SAMPLE)
            counts[microbatch] = 1 if sample is None else one.shape[sample]
        first = next(iter(tensors.values()))
        joined = REPLICAS in first.layout.axes or replicas == 1
        blocks = []
        many = self._microbatches(written, replica) or max(counts) + 1
        for microbatch, count in counts.items():
            for r in [replica] if joined or self.only is not None else run.replicas:
                across = 1 if joined else replicas
                begin = first_sample(order, microbatch, 0 if joined else r, across, many, count) or 0
                blocks.append(self._block(first, microbatch, r, begin, count))
        blocks.sort(
            key=lambda b: (b.microbatch, b.replica) if order == "interleaved" else (b.replica, b.microbatch)
        )
        if len(set(counts.values())) > 1 and not any(
            f[1].picked for several in found.values() for f in several
        ):
            self._renumber(first, blocks, counts)
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + len(block.kept))
        return Plan(written, blocks, starts, counts, first, joined, tensors)

    def _block(self, one: Assembled | Routed, microbatch: int, replica: int, begin: int, count: int) -> Block:
        """The samples of a block that are kept."""
        if one.dim(SAMPLE) is None:
            return Block(microbatch, replica, [0], [begin])
        kept = [i for i in range(count) if self._selection.keeps(begin + i)]
        return Block(microbatch, replica, kept, [begin + i for i in kept])

    def _renumber(self, one: Assembled | Routed, blocks: list[Block], counts: dict[int, int]) -> None:
        """Number samples one after the other, where microbatches have different numbers of them."""
        at = 0
        for place, block in enumerate(blocks):
            count = counts[block.microbatch]
            blocks[place] = self._block(one, block.microbatch, block.replica, at, count)
            at += count

    def _microbatches(self, written: Written, replica: int) -> int:
        for rank in written.run.ranks(self.stage, replica):
            for path in written.paths(rank):
                return self.dump.files.open(path).part.index.microbatches
        return 0

    def _numbers(self, written: Written, microbatch: int, replica: int, count: int) -> list[int] | None:
        """The numbers in the global batch of the samples of a microbatch."""
        run, many = written.run, self._microbatches(written, replica)
        order = str(run.manifest.settings.get("order", "interleaved"))
        begin = first_sample(order, microbatch, replica, len(run.replicas), many, count)
        return None if begin is None else list(range(begin, begin + count))

    def _found(self, written: Written, replica: int) -> dict[int, list[Found]]:
        """What the ranks of a replica wrote, by microbatch."""
        out: dict[int, list[Found]] = {}
        several = self.dump.entries(written, self.site, self.kind, self.stage, replica)
        if not several or several[0][1].route is not None:
            several = self._routings.entries(written, self.kind)
        for found in several:
            if found[1].call == self.call:
                out.setdefault(found[1].microbatch, []).append(found)
        return out

    def _assembled(self, written: Written, microbatch: int, replica: int) -> Assembled | Routed:
        where = f"{self.name}, {written.describe()}, microbatch {microbatch} of data parallel rank {replica}"
        found = list(self._of(written, microbatch, replica))
        if found and REPLICAS in found[0][2].axes:
            found = [f for r in written.run.replicas for f in self._of(written, microbatch, r)]
        if not found:
            raise DumpError(f"{where}: nothing passed there, and on other ranks something did")
        run = written.run
        if found[0][1].route is not None:
            numbers = partial(self._numbers, written, microbatch, replica)
            args = written, microbatch, replica, found, where, self._selection, numbers
            return self._routings.tensor(*args)
        layout, shards = gathered(found, run.sizes, where)

        def picking(layout: Layout, shape: Sequence[int], coords: Coords) -> Picked | None:
            tokens = None if self._selection.mean else self._selection.tokens
            sample = next((i for i, d in enumerate(layout.dims) if d.name == SAMPLE), None)
            numbers = None
            if sample is not None:
                numbers = self._numbers(written, microbatch, replica, shape[sample])
            return pick(
                tokens, self._selection.samples, layout, shape, run.sizes, coords, written.iteration, numbers
            )

        return Assembled(self.dump.files, layout, run.sizes, shards, where, picking)

    def _of(self, written: Written, microbatch: int, replica: int) -> Iterator[Found]:
        yield from self._found(written, replica).get(microbatch, [])

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, which: Pass, where: Where) -> Tensor:
        """The entries wanted of one iteration.

        Args:
            which: the iteration.
            where: samples, tokens (if it has some), features.

        Raises:
            DumpError: a file is gone or damaged; this iteration has another shape than the first.
        """
        plan = self.plan(which)
        if plan is not self._like and (self._shape(plan) != self.shape or plan.first.dtype != self.dtype):
            raise DumpError(
                f"{self.name}: {list(self._shape(plan))} {plan.first.dtype} in {plan.written.describe()}, and "
                f"{list(self.shape)} {self.dtype} in iteration {self.passes[0][0]}: read iterations one by one with "
                ".at(number), or .pieces()"
            )
        out = torch.empty([len(i) for i in where], dtype=plan.first.dtype)
        for number, block in enumerate(plan.blocks):
            start, stop = plan.starts[number], plan.starts[number + 1]
            pairs = [(at, i - start) for at, i in enumerate(where[0]) if start <= i < stop]
            if not pairs:
                continue
            one = self._tensor(plan, block)
            groups = [pairs]
            if self._per_sample(plan) and self._token(plan.first) is not None:
                groups = [[pair] for pair in pairs]
            for group in groups:
                at = compact([a for a, _ in group])
                found = self._read_block(plan, one, block, [i for _, i in group], where[1:])
                if isinstance(at, range):
                    out[at.start : at.stop : at.step] = found
                else:
                    out[torch.tensor(at)] = found
        return out

    def _read_block(self, plan: Plan, one: Assembled | Routed, block: Block, items: list[int], where: Where) -> Tensor:
        """Samples of a block, counted among those that are kept."""
        sample, token, rest = one.dim(SAMPLE), self._token(one), self._rest(one)
        wanted: list[Index] = [range(0)] * len(one.shape)
        front = []
        if sample is not None:
            wanted[sample] = compact([block.kept[i] for i in items])
            front.append(sample)
        if token is not None:
            positions = self._positions(plan, block.numbers[items[0]])
            where_token, where = where[0], where[1:]
            wanted[token] = compact([positions[t] for t in where_token])
            front.append(token)
        for dim, index in zip(rest, where, strict=True):
            wanted[dim] = index
        found = one.region(wanted).permute([*front, *rest])
        return found if sample is not None else found[None].expand(len(items), *found.shape)

    def _tensor(self, plan: Plan, block: Block) -> Assembled | Routed:
        """The tensor of a block, which must be as the first replica's."""
        key = block.microbatch, block.replica
        if key not in plan.tensors:
            plan.tensors[key] = self._assembled(plan.written, *key)
        one = plan.tensors[key]
        sample = one.dim(SAMPLE)
        count = 1 if sample is None else one.shape[sample]
        like = plan.first
        others = [one.shape[d] for d in range(len(one.shape)) if d != sample]
        if [like.shape[d] for d in range(len(like.shape)) if d != like.dim(SAMPLE)] != others:
            raise DumpError(
                f"{one.where}: {list(one.shape)}, and {list(like.shape)} elsewhere in the iteration: they make no "
                "one array; read them with .pieces()"
            )
        if count != plan.counts[block.microbatch]:
            raise DumpError(
                f"{one.where}: {count} samples, and {plan.counts[block.microbatch]} on the first data parallel "
                "rank: they cannot be numbered; read them with .pieces()"
            )
        return one
