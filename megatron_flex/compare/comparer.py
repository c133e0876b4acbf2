"""compare: two dumps in execution order, tensor by tensor, and replicas that differ within one of them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import (
    SAMPLE_AXIS,
    TOKEN_AXIS,
    ComparedDump,
    ComparedTensor,
    align_names,
    open_compared_dump,
)
from megatron_flex.compare.comparison import Comparison, ReplicaMismatch, Row, Worst, make_row
from megatron_flex.compare.cross_site_evidence import CrossSiteEvidence
from megatron_flex.compare.error_patterns import explain_divergence
from megatron_flex.compare.input_tokens import EMBEDDING, find_other_tokens, holds_token_ids
from megatron_flex.compare.noise_scale import SCORES
from megatron_flex.compare.overflow import suggest_remedy
from megatron_flex.compare.parameter_drift import ParameterDrift
from megatron_flex.compare.router_causes import RouterCauses
from megatron_flex.compare.routing_ties import (
    RouterPairs,
    RoutingTies,
    find_likely_ties,
    find_routing_ties,
    get_logits_item,
    get_router_item,
)
from megatron_flex.compare.shards import find_dim_shares, find_holders
from megatron_flex.compare.statistics_comparison import (
    StatisticsFiles,
    StatisticsOfDump,
    compare_statistics,
    find_statistics,
)
from megatron_flex.compare.structural_tests import estimate_factor
from megatron_flex.compare.tensor_pairs import (
    DifferenceSums,
    PairSums,
    TensorPair,
    align_arrays,
    sum_differences,
    sum_in_order,
)
from megatron_flex.compare.tensor_tests import TensorTester, TestedTensor
from megatron_flex.compare.tolerance import Tolerances, parse_layer_number, read_precision
from megatron_flex.compare.torch_threads import one_torch_thread
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.tools.dump_verification import ReplicaChecksums
from megatron_flex.errors import DumpError, FlexError, list_some, suggest_nearest
from megatron_flex.progress import progress as shown
from megatron_flex.progress import track
from megatron_flex.ranges import Span, check_nonnegative, normalize_spans, select_present
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.statistics_reader import OpenStatistics

AFTER_ATTENTION = (".self_attention:output", ":mid", ".pre_mlp_layernorm", ".mlp")
LAYER_ALONE = re.compile(r"\blayers\.\d+$")
MIN_SCORES, MAX_SCORES = 10.0, 1000.0  # attention scores that are suggested as a cause


def find_replica_mismatches(source: ComparedDump, iterations: Sequence[int]) -> list[ReplicaMismatch]:
    """Tensors whose replicas differ between ranks, in execution order.

    Only a dump made with `replicas=True` has the necessary checksums.

    Args:
        source: the dump.
        iterations: the iterations to check.
    """
    order = {i.name: n for n, i in enumerate(source.items())}
    out: list[ReplicaMismatch] = []
    for iteration in track(iterations, f"comparing the replicas of {source.label}", unit="iterations"):
        differing_ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
        for rank, _, entry in _read_replica_checksums(source, iteration).differing():
            grad = entry.kind in (GRADIENT, PARAMETER_GRADIENT) and not entry.site.endswith(GRADIENT_SUFFIX)
            differing_ranks[source.name(entry.site) + GRADIENT_SUFFIX * grad, entry.microbatch].add(rank)
        mismatches = [
            ReplicaMismatch(source.label, n, iteration, m, tuple(sorted(r)))
            for (n, m), r in differing_ranks.items()
        ]
        out += sorted(mismatches, key=lambda o: (order.get(o.name, len(order)), o.microbatch))
    return out


def _read_replica_checksums(source: ComparedDump, iteration: int) -> ReplicaChecksums:
    """Every checksum of an iteration."""
    written = source.dump.stored_iteration((iteration, 0))
    out = ReplicaChecksums(written.run.manifest)
    for rank in written.run.coords:
        for path in written.paths(rank):
            try:
                out.add(rank, source.dump.files.open(path).part)
            except OSError as error:
                raise DumpError(f"{path}: cannot be read: {error.strerror or error}", path=path) from error
    return out


ProgressFunction = Callable[[int, int, str], None]  # number done, total, and the next item


def compare(
    a: Any,
    b: Any,
    tolerance: float | Mapping[str, float] | None = None,
    tolerance_from: Any = None,
    *,
    allow_missing: bool = False,
    iterations: int | slice | Sequence[int | slice] | None = None,
    learning_rate: float | None = None,
    progress: ProgressFunction | None = None,
    block_bytes: int = COMPARE_BLOCK,
) -> Comparison:
    """Find the first site, in execution order, at which two dumps differ by more than round-off.

    The dumps may have different layouts. One may be of a GPTModel, and the other one of a HybridModel whose
    layers are pairs of attention and MLP: that one's names are then a GPTModel's. Tensors are aligned by
    site, iteration, sample and token. Tensors of only one dump are `missing`, which makes the exit status 2
    unless it is allowed. Each core, of at most eight, reads and sums blocks: one block of both dumps for each
    core, and one more, are in memory at a time. Meanwhile torch computes in one thread of the process.

    Args:
        a: a dump, or its path; or statistics, or their folder, of which only the numbers are compared.
        b: the other dump or statistics, or their path.
        tolerance: how far correct runs may differ, relative to the norm and to the greatest entry: for all
            sites, or by globs over their names. None: derived from dtype and depth.
        tolerance_from: a third dump, or its path, of a run that is correct up to round-off (another layout,
            inputs perturbed in the last digit): its difference from the nearer of the two, times a
            margin, is the tolerance of each site that it has.
        allow_missing: whether sites or iterations may be in only one of the dumps.
        iterations: the iterations to compare: numbers, which both must have, and slices or ranges of them;
            None for all that both have.
        learning_rate: of the optimizer, where parameters were not dumped: from it follows what they may
            differ by after some steps.
        progress: called before each tensor, instead of a bar in the terminal.
        block_bytes: maximum bytes of one block of a tensor, in fp64; an entry in fp32 takes half of that.

    Returns:
        The comparison; `first` is the first row that differs, or None.

    Raises:
        DumpError: a dump cannot be read, or the two have nothing in common.
        FlexError: a tolerance is not a number, is negative, or both kinds are given; both lack an iteration.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> compare("dumps/run", "dumps/run").first is None
        True
        >>> compare("dumps/run", "dumps/changed").first.name
        'decoder.layers.3:input'
    """
    _check_tolerance(tolerance, tolerance_from)
    if learning_rate is not None:
        check_nonnegative("learning_rate", learning_rate)
    only = None if iterations is None else normalize_spans("iterations", iterations)
    statistics = [find_statistics(source) for source in (a, b)]
    if any(side is not None for side in statistics):
        if tolerance is not None or tolerance_from is not None:
            raise FlexError(
                "tolerance and tolerance_from are for two dumps; statistics have bounds of their own"
            )
        return _compare_with_statistics((a, b), statistics, allow_missing, only, block_bytes)
    with (
        one_torch_thread(),
        open_compared_dump(a, "A") as dump_a,
        open_compared_dump(b, "B") as dump_b,
        open_compared_dump(tolerance_from, "C") as noise,
    ):
        align_names([dump_a, dump_b, noise])
        walk = _Comparer(dump_a, dump_b, noise, tolerance, block_bytes, only, learning_rate)
        return walk.run(progress, allow_missing)


def _compare_with_statistics(
    sources: Sequence[Any],
    statistics: Sequence[OpenStatistics | None],
    allow_missing: bool,
    only: Sequence[Span] | None,
    block_bytes: int,
) -> Comparison:
    """Compare statistics with statistics, or with a dump."""
    with ExitStack() as stack:
        opened: list[StatisticsFiles | ComparedDump] = []
        for source, label, its_statistics in zip(sources, "AB", statistics, strict=True):
            if its_statistics is not None:
                opened.append(StatisticsFiles(its_statistics, label))
            else:
                opened.append(stack.enter_context(open_compared_dump(source, label)))
        align_names(opened)
        sides: list[StatisticsFiles | StatisticsOfDump] = [
            StatisticsOfDump(side, block_bytes) if isinstance(side, ComparedDump) else side for side in opened
        ]
        return compare_statistics(*sides, allow_missing=allow_missing, only=only)


def _check_tolerance(tolerance: float | Mapping[str, float] | None, tolerance_from: Any) -> None:
    given_tolerance = tolerance.values() if isinstance(tolerance, Mapping) else [tolerance]
    for value in given_tolerance:
        if value is not None:
            check_nonnegative("tolerance", value)
    if tolerance_from is not None and not isinstance(tolerance, Mapping) and tolerance is not None:
        raise FlexError("tolerance and tolerance_from are both given; leave one of them out")


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The first tensor that diverges: the pair with the greatest difference, its sums and tests."""

    pair: TensorPair
    both: PairSums
    tested: TestedTensor
    ties: RoutingTies | None = None


@dataclass
class _Comparer:
    """A comparison in progress."""

    a: ComparedDump
    b: ComparedDump
    noise: ComparedDump | None
    given_tolerance: float | Mapping[str, float] | None
    most: int
    only: Sequence[Span] | None = None
    learning_rate: float | None = None
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    alone: list[list[ComparedTensor]] = field(default_factory=list)
    first: FirstDivergence | None = None
    explained: FirstDivergence | None = None  # the one whose pattern is that of the first

    def run(self, progress: ProgressFunction | None, allow_missing: bool) -> Comparison:
        items, iterations = self.items(), self.iterations()
        precisions = [read_precision(s.manifest, [s.array(i).dtype for i in items]) for s in (self.a, self.b)]
        tolerances = Tolerances(self.given_tolerance, self.order(), precisions)
        tester = TensorTester(
            self.a, self.b, tolerances, ParameterDrift(self.a, self.most), self.learning_rate
        )
        with shown("comparing", unit="tensors") as bar:
            rows = self.rows(items, iterations, tester, progress or bar.to)
        if not rows:
            raise DumpError(
                f"{self.a.path} and {self.b.path} have nothing in common: "
                f"{'; '.join([*self.missing, *self.notes])}"
            )
        replicas = [
            *find_replica_mismatches(self.a, iterations),
            *find_replica_mismatches(self.b, iterations),
        ]
        if tester.explained:
            self.notes.append(
                f"attention scores are so large that their round-off explains the differences of "
                f"{len(tester.explained)} tensors, first {tester.explained[0]}; less is detected after them"
            )
        hints = [*self.explain_first_divergence(rows), *self.suggest_scores(tester.tolerances, rows)]
        other_tokens = self.find_other_tokens()
        return Comparison(
            self.a.describe(),
            self.b.describe(),
            tuple(rows),
            tuple(replicas),
            tuple(hints),
            (*self.missing, *self.notes),
            tuple(self.missing),
            allow_missing,
            other_tokens,
            suggest_remedy(rows, tester.overflow.half),
        )

    def find_other_tokens(self) -> str:
        """Why the two runs did not read the same tokens; empty if they did, or it cannot be known."""
        if self.first is None:
            return ""
        pair = self.first.pair
        if pair.item.kind != VALUE or not pair.item.site.startswith(EMBEDDING):
            return ""
        tables = [i for i in self.b.items() if i.kind == PARAMETER and "word_embeddings" in i.site]
        return find_other_tokens(pair, tables[0] if tables else None, self.b)

    def rows(
        self,
        items: list[ComparedTensor],
        iterations: list[int],
        tester: TensorTester,
        report: ProgressFunction,
    ) -> list[Row]:
        """Compare all common tensors; record those that cannot be compared."""
        rows: list[Row] = []
        self.notes += [f"{s.label}: {reason}" for s in (self.a, self.b) for reason in s.dump.missing]
        skipped: dict[str, list[str]] = {}
        parameters = any(i.kind == PARAMETER for i in items)
        for step, iteration in enumerate(iterations):
            for side in (self.a, self.b):
                side.use_run_of(iteration)
            tester.begin(iteration, parameters)
            numbered = enumerate(items, step * len(items))
            aligned = self.align(numbered, len(iterations) * len(items), iteration, report, skipped)
            for pairs, both in sum_in_order(aligned, self.most):
                rows.append(self.row(pairs, both, tester))
        self.missing += [f"not compared: {list_some(names)}: {why}" for why, names in skipped.items()]
        return rows

    def align(
        self,
        items: Iterable[tuple[int, ComparedTensor]],
        total: int,
        iteration: int,
        report: ProgressFunction,
        skipped: dict[str, list[str]],
    ) -> Iterator[list[TensorPair]]:
        """Align both tensors of each item; `skipped` receives the names of others, by reason."""
        for number, item in items:
            report(number, total, item.name)
            pairs = self.pairs(item, iteration)
            if isinstance(pairs, str):
                skipped.setdefault(pairs, []).append(item.name)
            else:
                yield pairs

    # -- the common tensors --------------------------------------------------------------------------

    def order(self) -> list[str]:
        """Names of sites in execution order, from the run on fewer ranks, where stages do not interleave."""
        leader = min((self.a, self.b), key=lambda s: len(s.ranks))
        return leader.order

    def items(self) -> list[ComparedTensor]:
        """The common tensors, in execution order."""
        items_a, items_b = self.a.items(), self.b.items()
        leader, other = (items_a, items_b) if len(self.a.ranks) <= len(self.b.ranks) else (items_b, items_a)
        in_other = set(other)
        common = [i for i in leader if i in in_other]
        for dumped in (self.a, self.b):
            if reasons := dumped.manifest.left_out:
                first, why = next(iter(reasons.items()))
                more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
                self.notes.append(f"parameters that {dumped.label} does not have: {first}, which {why}{more}")
        for name, items, others in (("A", items_a, set(items_b)), ("B", items_b, set(items_a))):
            alone = [i for i in items if i not in others]
            self.alone.append(alone)
            if alone:
                self.missing.append(f"only in {name}: {list_some([i.name for i in alone])}")
            left_out = (self.a if name == "A" else self.b).left_out
            if left_out:
                self.notes.append(
                    f"left out of {name}, because a GPTModel does not have them: {list_some(left_out)}"
                )
        if not common:
            names = [i.name for i in items_b]
            close = suggest_nearest(items_a[0].name, names) if items_a and names else ""
            raise DumpError(
                f"{self.a.path} and {self.b.path} have no site in common: "
                f"{list_some([i.name for i in items_a])} and {list_some(names)}{close}"
            )
        return common

    def iterations(self) -> list[int]:
        iterations_a, iterations_b = set(self.a.iterations), set(self.b.iterations)
        if not iterations_a & iterations_b:
            raise DumpError(
                f"{self.a.path} and {self.b.path} have no iteration in common: "
                f"{list_some(sorted(iterations_a))} and {list_some(sorted(iterations_b))}"
            )
        if self.only is not None:
            both = f"both {self.a.path} and {self.b.path}"
            return select_present(self.only, sorted(iterations_a & iterations_b), both, DumpError)
        for name, iterations, others in (
            ("A", iterations_a, iterations_b),
            ("B", iterations_b, iterations_a),
        ):
            if iterations - others:
                self.missing.append(f"iterations only in {name}: {list_some(sorted(iterations - others))}")
        return sorted(iterations_a & iterations_b)

    def pairs(self, item: ComparedTensor, iteration: int) -> list[TensorPair] | str:
        """Both tensors, aligned; a text if they have nothing in common."""
        array_a, array_b = self.a.array(item), self.b.array(item)
        for source, array in ((self.a, array_a), (self.b, array_b)):
            if iteration not in array.iterations:
                return f"{source.label} does not have it in iteration {iteration}"
        pairs = align_arrays(item, iteration, array_a, array_b)
        if not isinstance(pairs, str):
            for pair in pairs if pairs[0].packed else pairs[:1]:
                self._note_selection(pair)
        return pairs

    def _note_selection(self, pair: TensorPair) -> None:
        for name, array in (("A", pair.a), ("B", pair.b)):
            for dim in (SAMPLE_AXIS, TOKEN_AXIS):
                place = pair.along(dim)
                if place is None or dim not in array.dims:
                    continue
                total, used = array.shape[array.dims.index(dim)], pair.shape[place]
                note = f"{used} of {total} {dim}s of {name} are compared, which both have"
                if used < total and note not in self.notes:
                    self.notes.append(note)

    # -- one tensor ------------------------------------------------------------------------------------

    def row(self, pairs: Sequence[TensorPair], both: PairSums, tester: TensorTester) -> Row:
        sums, pair = both.sums, both.worst
        item = pair.item
        reference = self.measured(item, pair.iteration)
        ties = self.ties(pairs, both, tester)
        tested = tester.test(pairs, both, reference, ties)
        if sums.broken and tested.worst.excess <= 1:
            sums = sums.without_overflows()
        worst = None if sums.equal else _make_worst(pair, sums)
        floors = tested.floor, tested.factor_floor
        row = make_row(item, sums, tested.worst, worst, pair.iteration, floors, tested.rerouted)
        if row.diverges and self._is_explained_by(pair):
            self.explained = FirstDivergence(pair, both, tested, ties)
        if row.diverges and self.first is None:
            self.first = FirstDivergence(pair, both, tested, ties)
            if row.worst is not None:
                worst = replace(
                    row.worst,
                    ranks_a=find_holders(self.a, pair, sums.worst),
                    ranks_b=find_holders(self.b, pair, sums.worst),
                )
                row = replace(row, worst=worst)
        return row

    def ties(self, pairs: Sequence[TensorPair], both: PairSums, tester: TensorTester) -> RoutingTies | None:
        """The tokens that were routed otherwise; None for tensors that are not a choice of experts."""
        logits = get_logits_item(pairs[0].item)
        if both.sums.equal or both.sums.broken:
            return None
        if logits is None:
            return self.likely_ties(pairs, both, tester)
        if logits not in self.a.items() or logits not in self.b.items():
            return None
        scored = self.pairs(logits, pairs[0].iteration)
        if isinstance(scored, str):
            return None
        routers = RouterPairs(pairs, scored, self.a.manifest.model, self.most)
        ties = find_routing_ties(routers, tester.rerouted)
        if ties is not None and ties.tied_tokens and not ties.others:
            self.notes.append(
                f"{pairs[0].item.name}, iteration {pairs[0].iteration}: {ties.tied_tokens} of "
                f"{ties.tokens} tokens have other experts, whose scores are tied within round-off"
            )
        return ties

    def likely_ties(
        self, pairs: Sequence[TensorPair], both: PairSums, tester: TensorTester
    ) -> RoutingTies | None:
        """The tokens that experts' results suggest were routed otherwise, where no router was dumped."""
        item, iteration = pairs[0].item, pairs[0].iteration
        router = get_router_item(item)
        if router is None or (router in self.a.items() and router in self.b.items()):
            return None
        if tester.tolerances.given(item) is not None:
            return None
        bounds, allowed = tester.bound_ties(item, both, sum(math.prod(p.shape[:-1]) for p in pairs))
        ties = find_likely_ties(pairs, bounds, allowed, tester.rerouted, self.most) if allowed else None
        if ties is not None:
            self.notes.append(
                f"{item.name}, iteration {iteration}: {ties.tied_tokens} of {ties.tokens} tokens differ by "
                f"more than the others, and up to {allowed} may have other experts, whose logits are tied "
                f"within round-off; dump {router.site.rpartition(':')[0]} to see it"
            )
        return ties

    def measured(self, item: ComparedTensor, iteration: int) -> PairSums | None:
        """The third run against the nearer of the two; None if it lacks this tensor."""
        noise = self.noise
        if noise is None or item not in noise.items():
            return None
        third = noise.array(item)
        if iteration not in third.iterations:
            return None
        against_third = []
        for source in (self.a, self.b):
            pairs = align_arrays(item, iteration, source.array(item), third)
            if not isinstance(pairs, str):
                against_third.append(sum_differences(pairs, self.most))
        return min(against_third, key=lambda f: f.sums.error, default=None)

    def _is_explained_by(self, pair: TensorPair) -> bool:
        """Whether the pattern of the first divergence is that of this divergent tensor.

        Other token ids are explained by their embeddings, whose vectors tell another order from other tokens.
        """
        if self.explained is None:
            return True
        return holds_token_ids(self.explained.pair) and pair.item.site.startswith(EMBEDDING)

    def explain_first_divergence(self, rows: list[Row]) -> Iterator[str]:
        """The pattern of the first divergence, and other errors there."""
        if self.explained is None:
            return
        pair, sums = self.explained.pair, self.explained.both.sums
        for side in (self.a, self.b):
            side.use_run_of(next(r.iteration for r in rows if r.diverges))
        shares = find_dim_shares((self.a, self.b), pair)
        axes = {**self.a.axis_sizes, **self.b.axis_sizes}
        profile, tested = self.explained.both.profile, self.explained.tested
        factor = estimate_factor(profile) if profile is not None else (0.0, math.inf)
        noise = min(tested.floor, 0.5)
        patterns, places = explain_divergence(pair, sums, shares, axes, self.most, noise, factor)
        exceeding = [o for o in tested.outcomes if o.excess > 1]
        constant = any(p.cause in ("constant factor", "same vector") for p in patterns)
        if not constant and any(o.test in ("norm", "peak") for o in exceeding):
            # A gradient that lacks the part of one rank differs mostly by a factor, and not only by it.
            exceeding = [o for o in exceeding if o.test != "factor"]
        evidence = [o.evidence for o in exceeding if o.evidence]
        if constant:
            evidence = [
                o.evidence for o in tested.outcomes if o.evidence and o.test not in ("factor", "rows")
            ]
        shown = [o for o in exceeding if o.test in ("factor", "offset", "narrower dtype")]
        identified = bool(shown) or any(h.cause != "place" for h in patterns)
        at_router = list(RouterCauses(self.a, self.b, rows, self.most).explain(pair, self.explained.ties))
        if at_router:  # a pattern of numbers beside it would be a second cause
            at = next(n for n, r in enumerate(rows) if r.diverges)
            rows[at] = replace(rows[at], evidence="")
        others = CrossSiteEvidence(self.a, self.b, rows, self.most)
        yield from at_router or others.explain(pair, sums, tested.floor, identified)
        yield from () if at_router else patterns
        yield from places
        if not at_router and not any(p.cause in ("zero", "order") for p in patterns):
            yield from (e for e in evidence if e not in patterns)
        module = pair.item.site.partition(":")[0]
        for this_run, other, alone in (("A", "B", self.alone[0]), ("B", "A", self.alone[1])):
            inside = [
                i for i in alone if i.site.startswith((f"{module}.", f"{module}:")) and i.kind == "value"
            ]
            again = [i for i in inside if i.call]
            if again:
                yield f"{len(again)} of its hook points ran more often in {this_run} than in {other}"
            elif inside:
                yield f"{len(inside)} of its hook points ran in {this_run} only"
        diverging = [
            r.name for r in rows if r.diverges and r.kind == PARAMETER and r.iteration == pair.iteration
        ]
        of_module = (
            [n for n in diverging if n.startswith(f"{module}.")] if pair.item.kind != PARAMETER else []
        )
        if of_module:
            yield f"parameters of it differ as well: {list_some(of_module)}; the weights are not the same"
        elif diverging and pair.item.kind != PARAMETER:
            yield f"parameters differ as well: {list_some(diverging)}"
        within = (i.site for side in (self.a, self.b) for i in side.items() if i.kind == pair.item.kind)
        if LAYER_ALONE.search(module) and not any(site.startswith(f"{module}.") for site in within):
            yield f"only the layer as a whole was dumped; with '{module}**' its parts are too"

    def suggest_scores(self, tolerances: Tolerances, rows: Sequence[Row]) -> Iterator[str]:
        """How large attention scores would explain the first divergence, where they are not in both dumps."""
        if self.first is None or self.first.tested.worst.test not in ("norm", "peak"):
            return
        item, sides = self.first.pair.item, (self.a, self.b)
        if item.kind not in (VALUE, GRADIENT) or parse_layer_number(item.site) is None:
            return
        heads = [side.manifest.model.get("num_attention_heads") for side in sides]
        if not all(heads) or any(i.site.endswith(SCORES) for side in sides for i in side.items()):
            return
        if any(not r.diverges for r in rows if _is_after_attention(r, self.first.pair)):
            return
        unit = max(p.get_unit() for p in tolerances.precisions)
        scores = self.first.tested.worst.statistic / (2 * unit)
        if MIN_SCORES <= scores <= MAX_SCORES:
            yield (
                f"attention scores that reach {float(f'{scores:.1g}'):.0f} or more would explain it by their "
                "round-off; dump '**.core_attention:scores' and ':probs' of both runs to see them"
            )


def _is_after_attention(row: Row, pair: TensorPair) -> bool:
    """Whether a row is of what attention of the same layer made."""
    layer, kind = parse_layer_number(row.name), pair.item.kind
    same = (row.kind, row.iteration, layer) == (kind, pair.iteration, parse_layer_number(pair.item.site))
    return same and kind == VALUE and any(part in row.name for part in AFTER_ATTENTION)


def _make_worst(pair: TensorPair, sums: DifferenceSums) -> Worst:
    numbers = [known[i] for known, i in zip(pair.numbers, sums.worst, strict=True)]
    sample, token = pair.along(SAMPLE_AXIS), pair.along(TOKEN_AXIS)
    rest = tuple(n for p, n in enumerate(numbers) if p not in (sample, token))
    return Worst(
        pair.iteration,
        None if sample is None else numbers[sample],
        None if token is None else numbers[token],
        rest,
        *sums.values,
    )
