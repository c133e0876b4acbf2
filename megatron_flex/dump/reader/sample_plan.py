"""The samples of an iteration: blocks of microbatches and replicas, and the tensor of each block."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from megatron_flex.dump.reader.expert_tensors import ExpertTensorReader
from megatron_flex.dump.reader.shard_files import LocatedShard
from megatron_flex.dump.reader.tensor_assembly import (
    AssembledTensor,
    StoredShard,
    StoredTensor,
    TokenMean,
    group_shards,
)
from megatron_flex.dump.reader.weighted_cache import WeightedCache
from megatron_flex.dump.run_folders import REPLICA_AXIS, DumpRun, IterationKey, StoredIteration
from megatron_flex.dump.schema import list_dim_names
from megatron_flex.dump.token_selection import (
    SAMPLE_DIM,
    TOKEN_DIM,
    EntrySelection,
    RandomTokens,
    SelectionSettings,
    find_dim,
    number_first_sample,
    select_entries,
    select_positions,
)
from megatron_flex.errors import DumpError
from megatron_flex.layout import Coords, DimIndex, Layout, compact_index

if TYPE_CHECKING:
    from megatron_flex.dump.reader.dump_reader import OpenDump

MAX_PICKED_SAMPLES = 1 << 14  # of a microbatch of which some were picked
MAX_KNOWN_SHARDS = 1 << 15  # of a tensor whose places are kept


@dataclass(frozen=True, slots=True)
class StoredTensorKey:
    """A tensor of a dump.

    Attributes:
        name: as people write it.
        site: the site.
        kind: `value` or `gradient`.
        call: the pass through the site within a microbatch.
        stage: the pipeline stage that has it.
        only: one microbatch of one replica, instead of all.
    """

    name: str
    site: str
    kind: str
    call: int
    stage: int
    only: tuple[int, int] | None = None


@dataclass(slots=True)
class MicrobatchSamples:
    """One microbatch of one replica.

    Attributes:
        microbatch: its number on the replica.
        replica: the data parallel coordinate.
        kept: the samples of it that the dump keeps, counted within it.
        numbers: of these, in the global batch; of the block itself where the tensor has no samples.
    """

    microbatch: int
    replica: int
    kept: Sequence[int]
    numbers: Sequence[int]


@dataclass
class SamplePlan:
    """The samples of an iteration in blocks, by the records of its first replica.

    Attributes:
        written: the iteration.
        selection: what the dump keeps.
        blocks: in the order of samples.
        counts: samples of each microbatch, kept or not.
        longest: the tensor of the first microbatch that has the most tokens.
        joined: whether all replicas are in one tensor.
        tensors: those that were put together so far.
        ragged: whether the tensors of blocks differ in more than the number of samples.
    """

    written: StoredIteration
    selection: SelectionSettings
    blocks: list[MicrobatchSamples]
    counts: dict[int, int]
    longest: StoredTensor
    joined: bool
    tensors: dict[tuple[int, int], StoredTensor] = field(default_factory=dict)
    ragged: bool = False

    @cached_property
    def starts(self) -> list[int]:
        """The place of each block's first sample among all, and the end."""
        out = [0]
        for block in self.blocks:
            out.append(out[-1] + len(block.kept))
        return out

    def among(self, samples: DimIndex) -> Iterator[tuple[MicrobatchSamples, list[tuple[int, int]]]]:
        """The blocks that have samples of these: their places among them, and in the block."""
        at: dict[int, list[tuple[int, int]]] = {}
        for place, sample in enumerate(samples):
            number = bisect_right(self.starts, sample) - 1
            at.setdefault(number, []).append((place, sample - self.starts[number]))
        for number, places in sorted(at.items()):
            yield self.blocks[number], places

    @property
    def weight(self) -> int:
        """About how much it holds."""
        return len(self.tensors) * prod(self.written.run.sizes.values()) // len(self.written.run.replicas)

    @cached_property
    def token(self) -> int | None:
        """The dim of tokens; a mean over them leaves none."""
        return None if self.selection.mean else self.longest.dim(TOKEN_DIM)

    @cached_property
    def sample(self) -> int | None:
        """The dim of samples."""
        return self.longest.dim(SAMPLE_DIM)

    @cached_property
    def rest(self) -> list[int]:
        """All others."""
        return [d for d in range(len(self.longest.shape)) if d not in (self.sample, self.token)]

    @cached_property
    def drawn(self) -> bool:
        """Whether each sample has tokens of its own."""
        return isinstance(self.selection.tokens, RandomTokens) and None not in (self.sample, self.token)

    def positions(self, number: int, of: StoredTensor | None = None) -> Sequence[int]:
        """The positions of the tokens that are kept of a sample of a tensor; None for the longest one."""
        token, tokens = self.token, self.selection.tokens
        assert token is not None
        if isinstance(tokens, RandomTokens) and not self.drawn:
            tokens = None
        length = (of or self.longest).shape[token]
        return select_positions(tokens, length, self.written.iteration, number)

    def locate_tokens(self, number: int, tokens: DimIndex, of: StoredTensor) -> DimIndex:
        """The entries of the dim of tokens, of a sample of a tensor, that are wanted of the longest one.

        Raises:
            DumpError: it is shorter and does not have all of them.
        """
        positions = self.positions(number, of)
        if _count_tokens(of) == _count_tokens(self.longest):
            return compact_index([positions[t] for t in tokens])
        if not is_prefix(positions, self.positions(number)) or max(tokens, default=-1) >= len(positions):
            raise DumpError(
                f"{of.where}: {len(positions)} tokens, and up to {self.shape[1]} elsewhere in the iteration: "
                "slice tokens that all have, or read .sequence_arrays() or .microbatch_arrays()"
            )
        return compact_index([positions[t] for t in tokens])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The selected samples, tokens and features."""
        tokens = []
        if self.token is not None:
            length, every = self.longest.shape[self.token], not self.drawn
            full = every and isinstance(self.selection.tokens, RandomTokens)
            tokens = [length if full else self.selection.count_kept_tokens(length)]
        return (self.starts[-1], *tokens, *(self.longest.shape[d] for d in self.rest))


class StoredTensorShards:
    """The shards of a tensor that ranks wrote, which all microbatches of an iteration ask for.

    Args:
        dump: that has them.
        which: the tensor; `only` is not used.
    """

    def __init__(self, dump: OpenDump, which: StoredTensorKey) -> None:
        self.dump, self.which = dump, which
        self.expert_reader = ExpertTensorReader(dump, which.site, which.stage, which.call)
        self._known: WeightedCache[tuple[IterationKey, int], dict[int, list[LocatedShard]]] = WeightedCache(
            MAX_KNOWN_SHARDS
        )
        self._tensors: WeightedCache[tuple[IterationKey, int, int], StoredTensor] = WeightedCache(
            MAX_KNOWN_SHARDS
        )

    def by_microbatch(self, written: StoredIteration, replica: int) -> Mapping[int, list[LocatedShard]]:
        """The shards that the ranks of a replica wrote, by microbatch; of experts, those of all replicas."""
        return self._known.get(
            ((written.iteration, written.run_of), replica),
            lambda: self._find(written, replica),
            lambda shards: sum(map(len, shards.values())),
        )

    def tensor(
        self, written: StoredIteration, microbatch: int, replica: int, make: Callable[[], StoredTensor]
    ) -> StoredTensor:
        """The tensor of a block: plans of all microbatches and plans of one alone have the same."""
        key = (written.iteration, written.run_of), microbatch, replica
        ranks = prod(written.run.sizes.values()) // len(written.run.replicas)
        return self._tensors.get(key, make, lambda _: ranks)

    def _find(self, written: StoredIteration, replica: int) -> dict[int, list[LocatedShard]]:
        out: dict[int, list[LocatedShard]] = {}
        which = self.which
        several = self.dump.entries(written, which.site, which.kind, which.stage, replica)
        if not several or several[0][1].route is not None:
            several = self.expert_reader.entries(written, which.kind)
        for located in several:
            if located[1].call == which.call:
                out.setdefault(located[1].microbatch, []).append(located)
        return out


class SamplePlanner:
    """Finds the blocks of iterations, and the tensors of blocks.

    Args:
        dump: that has them.
        which: the tensor.
        shards: what ranks wrote of it.
    """

    def __init__(self, dump: OpenDump, which: StoredTensorKey, shards: StoredTensorShards) -> None:
        self.dump, self.which, self._shards = dump, which, shards
        try:
            self.selection = SelectionSettings.from_settings(dump.manifest.settings)
        except DumpError as error:
            raise DumpError(f"{dump.path}: {error}", path=dump.path) from error

    def plan(self, written: StoredIteration) -> SamplePlan:
        """Return the samples of an iteration in blocks.

        Raises:
            DumpError: the site has nothing in it.
        """
        run, only = written.run, self.which.only
        replica = run.replicas[0] if only is None else only[1]
        shards = self._shards.by_microbatch(written, replica)
        if only is not None:
            shards = {m: several for m, several in shards.items() if m == only[0]}
        if not shards:
            raise self.dump.missing_activation_error(self.which.name, written, self.which.stage)
        tensors = {(m, replica): self._tensor(written, m, replica) for m in sorted(shards)}
        counts = {m: _count_samples(tensor) for (m, _), tensor in tensors.items()}
        first = next(iter(tensors.values()))
        joined = REPLICA_AXIS in first.layout.axes or len(run.replicas) == 1
        among = [replica] if joined or only is not None else run.replicas
        blocks = [
            self._block(first, m, r, self._first(written, m, 0 if joined else r, count, joined), count)
            for m, count in counts.items()
            for r in among
        ]
        in_order = (
            (lambda b: (b.microbatch, b.replica))
            if _get_sample_order(run) == "interleaved"
            else _get_replica_key
        )
        blocks.sort(key=in_order)
        if len(set(counts.values())) > 1 and only is None:
            self._renumber(first, blocks, counts)
        plan = SamplePlan(written, self.selection, blocks, counts, first, joined, tensors)
        if only is None:
            if TOKEN_DIM in map(str, self.dump.site_records[self.which.site].shape):
                for block in blocks:  # the run did not know the length, which may differ between replicas
                    with suppress(DumpError):  # raised where the block is read
                        self._find_tensor(plan, block)
            plan.longest = max(tensors.values(), key=_count_tokens)  # the first of several
            plan.ragged = len({tuple(_list_lengths(tensor, SAMPLE_DIM)) for tensor in tensors.values()}) > 1
        return plan

    def _find_tensor(self, plan: SamplePlan, block: MicrobatchSamples) -> StoredTensor:
        key = block.microbatch, block.replica
        if key not in plan.tensors:
            plan.tensors[key] = self._tensor(plan.written, *key)
        return plan.tensors[key]

    def tensor(self, plan: SamplePlan, block: MicrobatchSamples) -> StoredTensor:
        """The tensor of a block, which must be as the first replica's but for its length.

        Raises:
            DumpError: shards are missing, or it is not.
        """
        tensor, like = self._find_tensor(plan, block), plan.longest
        if _list_lengths(tensor, SAMPLE_DIM, TOKEN_DIM) != _list_lengths(like, SAMPLE_DIM, TOKEN_DIM):
            raise DumpError(
                f"{tensor.where}: {list(tensor.shape)}, and {list(like.shape)} elsewhere in the iteration: "
                "they make no one array; read them with .microbatch_arrays()"
            )
        if _count_samples(tensor) != plan.counts[block.microbatch]:
            raise DumpError(
                f"{tensor.where}: {_count_samples(tensor)} samples, and {plan.counts[block.microbatch]} on "
                "the first data parallel rank: they cannot be numbered; read them with .microbatch_arrays()"
            )
        return tensor

    def _block(
        self, tensor: StoredTensor, microbatch: int, replica: int, begin: int, count: int
    ) -> MicrobatchSamples:
        """The samples of a block that are kept."""
        if tensor.dim(SAMPLE_DIM) is None:
            return MicrobatchSamples(microbatch, replica, [0], [begin])
        indices = self.selection.kept(begin, count)
        if isinstance(indices, range):
            numbers: Sequence[int] = range(begin + indices.start, begin + indices.stop, indices.step)
        else:
            numbers = [begin + i for i in indices]
        return MicrobatchSamples(microbatch, replica, indices, numbers)

    def _renumber(
        self, tensor: StoredTensor, blocks: list[MicrobatchSamples], counts: dict[int, int]
    ) -> None:
        """Number samples one after the other, where microbatches have different numbers of them."""
        if self.selection.samples is not None or isinstance(self.selection.tokens, RandomTokens):
            raise DumpError(
                f"{self.which.name}: microbatches of {sorted(set(counts.values()))} samples, of which "
                "some were picked by number: they cannot be numbered; read them with .microbatch_arrays()"
            )
        at = 0
        for place, block in enumerate(blocks):
            count = counts[block.microbatch]
            blocks[place] = self._block(tensor, block.microbatch, block.replica, at, count)
            at += count

    def _first(
        self, written: StoredIteration, microbatch: int, replica: int, count: int, joined: bool
    ) -> int:
        """The number of the first sample of a block."""
        replicas = 1 if joined else len(written.run.replicas)
        numbering_replica = written.run.replicas[0] if self.which.only is None else self.which.only[1]
        many = self._microbatches(written, numbering_replica)
        number = number_first_sample(
            _get_sample_order(written.run), microbatch, replica, replicas, many, count
        )
        if number is not None:
            return number
        many = max(self._shards.by_microbatch(written, numbering_replica)) + 1
        return (replica * many + microbatch) * count

    def _microbatches(self, written: StoredIteration, replica: int) -> int:
        for rank in written.run.ranks(self.which.stage, replica):
            for path in written.paths(rank):
                return self.dump.files.open(path).part.index.microbatches
        return 0

    def _tensor(self, written: StoredIteration, microbatch: int, replica: int) -> StoredTensor:
        return self._shards.tensor(
            written, microbatch, replica, lambda: self._assemble(written, microbatch, replica)
        )

    def _assemble(self, written: StoredIteration, microbatch: int, replica: int) -> StoredTensor:
        """Put together the tensor of a block."""
        run, located = written.run, self._shards.by_microbatch(written, replica).get(microbatch, [])
        where = f"{self.which.name}, {written.describe()}, microbatch {microbatch} of replica {replica}"
        if located and REPLICA_AXIS in located[0][2].axes:  # the shards of one tensor are with all replicas
            located = [
                f for r in run.replicas for f in self._shards.by_microbatch(written, r).get(microbatch, [])
            ]
        if not located:
            raise DumpError(f"{where}: nothing was recorded there, unlike on other ranks")
        if located[0][1].route is not None:
            routed = self._shards.expert_reader.tensor(written, microbatch, replica, located, where)
            return (
                self._average_tokens(routed, written, microbatch, replica) if self.selection.mean else routed
            )
        layout, shards = group_shards(located, run.sizes, where)
        self._check_rows(layout, shards, where)

        def picking(layout: Layout, shape: Sequence[int], coords: Coords) -> EntrySelection | None:
            tokens, samples, numbers = self.selection.tokens, None, None
            sample = find_dim(layout, SAMPLE_DIM)
            if sample is not None:
                many, count = self._microbatches(written, replica), shape[sample]
                begin = number_first_sample(
                    _get_sample_order(run), microbatch, replica, len(run.replicas), many, count
                )
                numbers = None if begin is None else list(range(begin, begin + count))
                if self.selection.samples is not None and numbers is not None:
                    samples = frozenset(n for n in numbers if self.selection.keeps(n))
            tokens = None if self.selection.mean else tokens
            return select_entries(
                tokens, samples, layout, shape, run.sizes, coords, written.iteration, numbers
            )

        full: StoredTensor = AssembledTensor(self.dump.files, layout, run.sizes, shards, where, picking)
        if self.selection.mean and self._has_tokens(full):
            return self._average_tokens(full, written, microbatch, replica)
        return full

    def _check_rows(self, layout: Layout, shards: Mapping[tuple[int, ...], StoredShard], where: str) -> None:
        """Refuse picked shards that claim more rows than were written, before the rows are listed."""
        sample, token = find_dim(layout, SAMPLE_DIM), find_dim(layout, TOKEN_DIM)
        for shard in shards.values():
            part, entry = shard.pieces[0]
            if not entry.picked:
                continue
            stored, shape = part.where[entry.tensor][1], entry.shape
            samples = 1 if sample is None else shape[sample]
            cut = token is not None and bool(layout.dims[token].cuts)
            tokens = 1 if token is None or cut else self.selection.count_kept_tokens(shape[token])
            picks_samples = self.selection.samples is not None
            if samples > MAX_PICKED_SAMPLES or (
                not picks_samples and samples * tokens > max(stored[0], samples * cut)
            ):
                raise DumpError(
                    f"{part.path}: {entry.tensor[:80]} has {stored[0]} picked rows, and claims to be of "
                    f"shape {list(shape)}: the file is damaged ({where})",
                    path=part.path,
                )

    def _average_tokens(
        self, full: StoredTensor, written: StoredIteration, microbatch: int, replica: int
    ) -> TokenMean:
        begin, token = (
            self._first(written, microbatch, replica, _count_samples(full), False),
            full.dim(TOKEN_DIM),
        )
        assert token is not None

        def kept(sample: int) -> Sequence[int]:
            length = full.shape[token]
            return select_positions(self.selection.tokens, length, written.iteration, begin + sample)

        return TokenMean(full, kept, self.selection.dtype)

    def _has_tokens(self, full: StoredTensor) -> bool:
        """Whether the mean over tokens is still to be taken: it could not be while writing."""
        record = self.dump.site_records[self.which.site]
        return full.dim(TOKEN_DIM) is not None and (
            record.inferred or len(list_dim_names(record.layout)) == len(full.shape)
        )


def _count_samples(tensor: StoredTensor) -> int:
    sample = tensor.dim(SAMPLE_DIM)
    return 1 if sample is None else tensor.shape[sample]


def _count_tokens(tensor: StoredTensor) -> int:
    token = tensor.dim(TOKEN_DIM)
    return 0 if token is None else tensor.shape[token]


def _list_lengths(tensor: StoredTensor, *without: str) -> list[int]:
    """The lengths of all dims but some."""
    left_out = {tensor.dim(name) for name in without}
    return [n for d, n in enumerate(tensor.shape) if d not in left_out]


def is_prefix(few: Sequence[int], many: Sequence[int]) -> bool:
    """Whether `many` begins with all of `few`."""
    return len(few) <= len(many) and list(few) == list(many[: len(few)])


def _get_sample_order(run: DumpRun) -> str:
    return str(run.manifest.settings.get("order", "interleaved"))


def _get_replica_key(block: MicrobatchSamples) -> tuple[int, int]:
    return block.replica, block.microbatch
