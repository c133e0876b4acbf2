"""The sources of a DumpArray: the activations of a site over all samples, and a parameter or its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.json_form import MAX_INTEGER
from megatron_flex.dump.reader.sample_plan import (
    MicrobatchSamples,
    SamplePlan,
    SamplePlanner,
    StoredTensorKey,
    StoredTensorShards,
)
from megatron_flex.dump.reader.shard_files import LocatedShard
from megatron_flex.dump.reader.tensor_assembly import (
    AssembledTensor,
    StoredTensor,
    group_shards,
    has_all_shards,
)
from megatron_flex.dump.reader.weighted_cache import WeightedCache
from megatron_flex.dump.run_folders import IterationKey
from megatron_flex.errors import DumpError
from megatron_flex.layout import DimIndex, Layout, RegionIndex, Sizes, compact_index, inverse_order

if TYPE_CHECKING:
    from megatron_flex.dump.reader.dump_reader import OpenDump

MAX_CACHED_SHARDS = 1 << 17  # shards of plans that are kept
PIECE_BYTES = 16 << 20  # of an array, which one thread reads at a time; each takes about 1 ms more


class StoredSequence(NamedTuple):
    """A sequence of a microbatch.

    Attributes:
        iteration: number, and which run of the schedule in it.
        microbatch: its number on the replica.
        replica: the data parallel coordinate.
        number: of the sequence in the iteration.
        sample: the sample of the microbatch that has it.
        tokens: its tokens among those of the sample that are kept.
        positions: their positions in the sequence.
        source: the microbatch.
    """

    iteration: IterationKey
    microbatch: int
    replica: int
    number: int
    sample: int
    tokens: range
    positions: Tensor
    source: ActivationSource


class ActivationSource:
    """The tensors of a site, in order of samples.

    Args:
        dump: that has them.
        which: the tensor.
        passes: the iterations.
        shards: what ranks wrote of the tensor, if another source of it knows.
    """

    def __init__(
        self,
        dump: OpenDump,
        which: StoredTensorKey,
        passes: list[IterationKey],
        shards: StoredTensorShards | None = None,
    ) -> None:
        self.dump, self.which, self.iteration_keys, self.name = dump, which, passes, which.name
        self._shards = shards or StoredTensorShards(dump, which)
        self._planner = SamplePlanner(dump, which, self._shards)
        self._plans: WeightedCache[IterationKey, SamplePlan] = WeightedCache(MAX_CACHED_SHARDS)

    def __reduce__(self) -> tuple[object, ...]:
        return ActivationSource, (self.dump, self.which, self.iteration_keys)

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.dump.path

    @cached_property
    def like(self) -> SamplePlan:
        """The first iteration, which the others must be like."""
        if not self.iteration_keys:
            raise DumpError(f"{self.name}: no iteration of {self.dump.path} is complete", path=self.dump.path)
        return self.plan(self.iteration_keys[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like.shape

    @cached_property
    def dims(self) -> tuple[str, ...]:
        like = self.like
        tokens = [] if like.token is None else ["token"]
        front = "microbatch" if like.sample is None else "sample"
        return (front, *tokens, *(like.longest.dims[d] for d in like.rest))

    @property
    def dtype(self) -> torch.dtype:
        return self.like.longest.dtype

    @property
    def stored_layout(self) -> tuple[Layout, Sizes]:
        """How ranks held it, in the first iteration, and the mesh."""
        return self.like.longest.layout, self.like.written.run.sizes

    def plan(self, which: IterationKey) -> SamplePlan:
        """The order of the samples of an iteration.

        Raises:
            DumpError: the site has nothing in it.
        """
        return self._plans.get(
            which, lambda: self._planner.plan(self.dump.stored_iteration(which)), lambda plan: plan.weight
        )

    def among(self, passes: list[IterationKey]) -> ActivationSource:
        if passes == self.iteration_keys:
            return self
        for which in passes:
            self.dump.stored_iteration(which)
        return ActivationSource(self.dump, self.which, passes, self._shards)

    def labels(self, which: IterationKey) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of the samples, and the positions of the tokens: `[token]` or `[sample, token]`."""
        plan = self.plan(which)
        numbers = [n for block in plan.blocks for n in block.numbers]
        samples = None if plan.sample is None else torch.tensor(numbers, dtype=torch.int64)
        if plan.token is None:
            return samples, None
        if plan.drawn:
            table = [list(plan.positions(n)) for n in numbers]  # of the longest, where lengths differ
            return samples, torch.tensor(table, dtype=torch.int64).reshape(plan.shape[:2])
        return samples, torch.tensor(list(plan.positions(0)), dtype=torch.int64)

    def is_ragged(self, which: IterationKey) -> bool:
        """Whether microbatches have tensors of different lengths."""
        return self.plan(which).ragged

    def token_counts(self, which: IterationKey) -> list[int] | None:
        """How many of the tokens each sample has; None if all have all."""
        plan = self.plan(which)
        if plan.token is None or not plan.ragged:
            return None
        counts: list[int] = []
        for block in plan.blocks:
            tensor = self._planner.tensor(plan, block)
            counts += [len(plan.positions(n, tensor)) for n in block.numbers]
        return None if all(n == plan.shape[1] for n in counts) else counts

    def request(self, which: IterationKey, microbatch: int, replica: int) -> str | None:
        """The request that a microbatch of a replica answered, if it did."""
        shards = self._shards.by_microbatch(self.dump.stored_iteration(which), replica).get(microbatch, [])
        return next((entry.request for _, entry, _, _ in shards if entry.request is not None), None)

    def microbatch_arrays(self) -> Iterator[tuple[IterationKey, int, int, ActivationSource]]:
        """Iteration, microbatch, replica, and a source of that alone."""
        for which in self.iteration_keys:
            written = self.dump.stored_iteration(which)
            for replica in written.run.replicas:
                for microbatch in sorted(self._shards.by_microbatch(written, replica)):
                    yield which, microbatch, replica, self._only(which, microbatch, replica)
                if self.plan(which).joined:
                    break

    def _only(self, which: IterationKey, microbatch: int, replica: int) -> ActivationSource:
        """A source of one microbatch of one replica."""
        only = replace(self.which, only=(microbatch, replica))
        return ActivationSource(self.dump, only, [which], self._shards)

    @property
    def packed(self) -> bool:
        """Whether the first iteration has packed sequences."""
        return any(d.sequences for d in self.like.longest.layout.dims)

    def sequences(self) -> Iterator[StoredSequence]:
        """The sequences of all iterations, in order of samples; a sample that is not packed is a sequence."""
        for which in self.iteration_keys:
            plan, number = self.plan(which), 0
            for block in plan.blocks:
                source = self._only(which, block.microbatch, block.replica)
                layout, positions = source.like.longest.layout, source.labels(which)[1]
                if positions is None:
                    raise DumpError(f"{self.name} has no dim of tokens, and so no sequences")
                spans = next((d.sequences for d in layout.dims if d.sequences), ())
                given = not spans and self._planner.selection.samples is not None
                for row, span in enumerate(spans or [(0, MAX_INTEGER)] * len(block.kept)):
                    sample_positions = positions if positions.ndim == 1 else positions[0 if spans else row]
                    first, last = torch.searchsorted(
                        sample_positions, torch.tensor(span)
                    ).tolist()  # they ascend
                    yield StoredSequence(
                        which,
                        block.microbatch,
                        block.replica,
                        block.numbers[row] if given else number,
                        0 if spans else row,
                        range(first, last),
                        sample_positions[first:last] - span[0],
                        source,
                    )
                    number += 1

    # -- reading ---------------------------------------------------------------------------------------

    def list_reads(
        self, which: IterationKey, where: RegionIndex, out: Tensor
    ) -> Iterator[Callable[[], object]]:
        """Functions that read the requested entries of one iteration, each a piece of them.

        Args:
            which: the iteration.
            where: samples, tokens (if it has some), features.
            out: where they go; values are converted to its dtype.

        Raises:
            DumpError: a file is gone or damaged; this iteration has another shape than the first.
        """
        plan = self._plan_like_first(which)
        for block, places in plan.among(where[0]):
            tensor = self._planner.tensor(plan, block)
            # samples that have tokens of their own are read one by one
            for group in [[place] for place in places] if plan.drawn else [places]:
                at = compact_index([a for a, _ in group])
                items = [item for _, item in group]
                read = partial(self._read_block, plan, tensor, block, items)
                if not isinstance(at, range):
                    yield partial(_read_scattered, partial(read, where[1:]), out, at)
                    continue
                into = out[at.start : at.stop : at.step]
                if plan.token is None:
                    yield partial(read, where[1:], into)
                    continue
                for tokens in _split_range(len(where[1]), into.nbytes):
                    yield partial(read, (where[1][tokens], *where[2:]), into[:, tokens])

    def find(self, which: IterationKey, where: RegionIndex) -> Tensor | None:
        """Return the requested entries of one iteration without a copy, if one shard has all of them.

        Args:
            which: the iteration.
            where: as for `read`.

        Returns:
            A view of a file, which the caller does not write to; None if there is none.

        Raises:
            DumpError: as in `read`.
        """
        plan = self._plan_like_first(which)
        first = None if plan.drawn else next(plan.among(where[0]), None)
        if first is None or len(first[1]) < len(where[0]):
            return None
        block, places = first
        tensor = self._planner.tensor(plan, block)
        if not isinstance(tensor, AssembledTensor):
            return None
        indices, order = _locate_block(plan, tensor, block, [item for _, item in places], where[1:])
        view = tensor.find(indices)
        if view is None:
            return None
        view = view.permute(order)
        return view if plan.sample is not None else view[None]

    def _plan_like_first(self, which: IterationKey) -> SamplePlan:
        """The plan of an iteration that has the shape and dtype of the first one."""
        plan = self.plan(which)
        if plan is not self.like and (plan.shape != self.shape or plan.longest.dtype != self.dtype):
            raise DumpError(
                f"{self.name}: {list(plan.shape)} {plan.longest.dtype} in {plan.written.describe()}, and "
                f"{list(self.shape)} {self.dtype} in iteration {self.iteration_keys[0][0]}: read one by one "
                "with .at(number), or what was written at a time with .microbatch_arrays()"
            )
        return plan

    def _read_block(
        self,
        plan: SamplePlan,
        tensor: StoredTensor,
        block: MicrobatchSamples,
        items: list[int],
        where: RegionIndex,
        out: Tensor,
    ) -> None:
        """Read samples of a block, counted among those that are kept."""
        indices, order = _locate_block(plan, tensor, block, items, where)
        if isinstance(tensor, AssembledTensor) and plan.sample is not None:
            tensor.region(indices, out.permute(inverse_order(order)))
        else:
            out.copy_(tensor.region(indices).permute(order))


def _read_scattered(read: Callable[[Tensor], None], out: Tensor, at: Sequence[int]) -> None:
    """Read samples whose places in `out` are not evenly spaced."""
    samples = out.new_empty(len(at), *out.shape[1:])
    read(samples)
    out[torch.tensor(at)] = samples


def _split_range(length: int, nbytes: int) -> list[slice]:
    """Split a dim so that the pieces of a tensor have about `PIECE_BYTES` each.

    Args:
        length: of the dim.
        nbytes: of the tensor.
    """
    pieces = max(1, min(length, nbytes // PIECE_BYTES))
    return [slice(length * n // pieces, length * (n + 1) // pieces) for n in range(pieces)]


def _locate_block(
    plan: SamplePlan, tensor: StoredTensor, block: MicrobatchSamples, items: list[int], where: RegionIndex
) -> tuple[list[DimIndex], list[int]]:
    """Samples of a block: the entries of each dim of its tensor, and the order of dims that a reader gets.

    Args:
        plan: the plan of the iteration.
        tensor: the block's tensor.
        block: the block.
        items: its samples, counted among those that are kept.
        where: tokens (if it has some), features.
    """
    sample, token = plan.sample, plan.token
    indices: list[DimIndex] = [range(0)] * len(tensor.shape)
    front = []
    if sample is not None:
        indices[sample] = compact_index([block.kept[i] for i in items])
        front.append(sample)
    if token is not None:
        indices[token] = plan.locate_tokens(block.numbers[items[0]], where[0], tensor)
        where = where[1:]
        front.append(token)
    for dim, index in zip(plan.rest, where, strict=True):
        indices[dim] = index
    return indices, [*front, *plan.rest]


class ParameterSource:
    """A parameter in each iteration: of which rank does not matter, as long as all of it is found.

    Args:
        dump: that has it.
        name: of the parameter.
        kind: `parameter` or `parameter_gradient`.
        stage: the pipeline stage that has it.
        passes: the iterations.
    """

    def __init__(self, dump: OpenDump, name: str, kind: str, stage: int, passes: list[IterationKey]) -> None:
        self.dump, self.name, self.kind, self.stage, self.iteration_keys = dump, name, kind, stage, passes

    def __reduce__(self) -> tuple[object, ...]:
        return ParameterSource, (self.dump, self.name, self.kind, self.stage, self.iteration_keys)

    @property
    def folder(self) -> Path:
        return self.dump.path

    @cached_property
    def _like(self) -> AssembledTensor:
        if not self.iteration_keys:
            raise DumpError(f"{self.name}: no iteration of the dump is complete")
        return self._assembled(self.iteration_keys[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._like.shape

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self._like.dims)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def stored_layout(self) -> tuple[Layout, Sizes]:
        """How ranks held it, in the first iteration, and the mesh."""
        return self._like.layout, self._like.sizes

    def among(self, passes: list[IterationKey]) -> ParameterSource:
        for which in passes:
            self.dump.stored_iteration(which)
        return ParameterSource(self.dump, self.name, self.kind, self.stage, passes)

    def labels(self, which: IterationKey) -> tuple[Tensor | None, Tensor | None]:
        """A parameter has neither samples nor tokens."""
        return None, None

    def is_ragged(self, which: IterationKey) -> bool:
        """A parameter has no microbatches."""
        return False

    def token_counts(self, which: IterationKey) -> list[int] | None:
        """A parameter has no tokens."""
        return None

    def request(self, which: IterationKey, microbatch: int, replica: int) -> str | None:
        """A parameter belongs to no request."""
        return None

    @property
    def packed(self) -> bool:
        """A parameter has no tokens."""
        return False

    def sequences(self) -> Iterator[StoredSequence]:
        """A parameter has no sequences.

        Raises:
            DumpError: always.
        """
        raise DumpError(f"{self.name} is a parameter and has no sequences")

    def microbatch_arrays(self) -> Iterator[tuple[IterationKey, int, int, ParameterSource]]:
        """Each iteration by itself."""
        for which in self.iteration_keys:
            yield which, 0, 0, self.among([which])

    def list_reads(
        self, which: IterationKey, where: RegionIndex, out: Tensor
    ) -> Iterator[Callable[[], object]]:
        """Functions that read the requested entries of one iteration into `out`, each a piece of them."""
        tensor = self._assembled_like_first(which)
        if not where:
            yield partial(tensor.region, where, out)
            return
        for rows in _split_range(len(where[0]), out.nbytes):
            yield partial(tensor.region, (where[0][rows], *where[1:]), out[rows])

    def find(self, which: IterationKey, where: RegionIndex) -> Tensor | None:
        """The requested entries of one iteration without a copy, as in `ActivationSource.find`."""
        return self._assembled_like_first(which).find(where)

    def _assembled_like_first(self, which: IterationKey) -> AssembledTensor:
        """An iteration, which must have the shape and dtype of the first one."""
        tensor = self._like if which == self.iteration_keys[0] else self._assembled(which)
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise DumpError(
                f"{tensor.where}: {list(tensor.shape)} {tensor.dtype}, and {list(self.shape)} {self.dtype} "
                "in the first: read them one by one with .at(number)"
            )
        return tensor

    def _assembled(self, which: IterationKey) -> AssembledTensor:
        written = self.dump.stored_iteration(which)
        where = f"{self.name} ({self.kind}), {written.describe()}"
        located: list[LocatedShard] = []
        for replica in written.run.replicas:
            located += self.dump.entries(written, self.name, self.kind, self.stage, replica)
            if located:
                layout, shards = group_shards(located, written.run.sizes, where)
                if has_all_shards(layout, shards, written.run.sizes):
                    break
        if not located:
            raise DumpError(f"{where}: was not dumped; .at(...) selects iterations that have it")
        if not has_all_shards(layout, shards, written.run.sizes):
            raise DumpError(f"{where}: ranks wrote only some of its shards")
        return AssembledTensor(self.dump.files, layout, written.run.sizes, shards, where)
