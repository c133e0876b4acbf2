"""The result of comparing two dumps, for people, scripts, terminals and notebooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.compared_result import MAX_SHOWN, ComparedResult, TableRow, describe_result
from megatron_flex.compare.structural_tests import Outcome
from megatron_flex.compare.tensor_pairs import DifferenceSums
from megatron_flex.document import MAX_TABLE_ROWS, Table
from megatron_flex.document import Row as DocumentRow
from megatron_flex.errors import name_ranks
from megatron_flex.wording import count_words

Verdict = Literal[
    "equal", "not distinguishable from round-off", "diverges", "incomplete", "cannot be compared"
]
INDISTINGUISHABLE: Verdict = "not distinguishable from round-off"
INCOMPARABLE: Verdict = "cannot be compared"
INCOMPLETE: Verdict = "incomplete"
ROWS_HINT = "found.rows has all of them, found.table(N) and `megatron-flex compare --rows N` show N"


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the greatest difference.

    Attributes:
        iteration: the framework's iteration number.
        sample: its number in the global batch; None where a tensor has no samples.
        token: its position in the sequence; None where it has no tokens.
        index: the index along the other dims.
        a: the value in A.
        b: the value in B.
        ranks_a: the ranks of A that held it, with their coordinates as text.
        ranks_b: likewise.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> worst = compare("dumps/run", "dumps/changed").first.worst
        >>> worst.sample, worst.token, worst.index, worst.ranks_a
        (0, 0, (4,), ('rank 0',))
    """

    iteration: int
    sample: int | None
    token: int | None
    index: tuple[int, ...]
    a: float
    b: float
    ranks_a: tuple[str, ...] = ()
    ranks_b: tuple[str, ...] = ()

    def place(self) -> str:
        """Return the element's position as text.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> compare("dumps/run", "dumps/changed").first.worst.place()
            'sample 0, token 0, [4]'
        """
        texts = [f"{n} {v}" for n, v in (("sample", self.sample), ("token", self.token)) if v is not None]
        return ", ".join([*texts, *([str(list(self.index))] if self.index else [])])


@dataclass(frozen=True, slots=True)
class Row:
    """One site in one iteration.

    Attributes:
        name: the name of the site or parameter, with `.grad` for a gradient and `#1` for a second call.
        kind: `value`, `gradient`, `parameter_gradient`, `parameter`.
        iteration: the framework's iteration number.
        count: number of compared entries.
        relative: norm of the difference over the greater of the two norms.
        cosine: of the angle between the two.
        max_abs: the greatest difference.
        error: the statistic of the test that is nearest to its bound, or exceeds it by most: of the norm
            `relative`, of the peak `max_abs` over the greatest entry, for integers the fraction that differs;
            or one that is pooled over entries.
        tolerance: its bound: given, derived or measured.
        equal: whether every entry is the same.
        worst: the element with the greatest difference; None where all are equal.
        test: the test: `norm`, `peak`, `tolerance`, `factor`, `rows`, `offset`, `block`,
            `narrower dtype`, `copy`.
        evidence: what a pooled test found, as one line; empty where it found nothing.
        floor: the smallest relative error that would be a divergence.
        factor_floor: the smallest deviation of a constant factor from 1 that would be one.
        not_finite: entries that were not compared, as one of the two is not finite; if `diverges` is false,
            both are NaN, the same infinity, or overflowed.
        rerouted: entries that were not compared by themselves, as near ties of routers reach their tokens.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> row = compare("dumps/run", "dumps/changed").first
        >>> row.name, row.kind, round(row.relative, 3)
        ('decoder.layers.3:input', 'value', 0.333)
    """

    name: str
    kind: str
    iteration: int
    count: int
    relative: float
    cosine: float
    max_abs: float
    error: float
    tolerance: float
    equal: bool
    worst: Worst | None
    test: str = "norm"
    evidence: str = ""
    floor: float = 0.0
    factor_floor: float = 0.0
    not_finite: int = 0
    rerouted: int = 0

    @property
    def diverges(self) -> bool:
        """Whether the error is above the tolerance."""
        return not self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error over its tolerance: above 1 is a divergence."""
        return Outcome(self.test, self.error, self.tolerance).excess

    @property
    def is_evidence(self) -> bool:
        """Whether a pair of finite entries was compared."""
        return self.count > self.not_finite


def make_row(
    item: ComparedTensor,
    sums: DifferenceSums,
    outcome: Outcome,
    worst: Worst | None,
    iteration: int = 0,
    floors: tuple[float, float] = (0.0, 0.0),
    rerouted: int = 0,
) -> Row:
    """The row of a tensor.

    Args:
        item: the tensor.
        sums: over its entries.
        outcome: the test that is nearest to its bound, or exceeds it by most.
        worst: the element with the greatest difference.
        iteration: the framework's iteration number.
        floors: the smallest relative difference and the smallest constant factor that would be a divergence.
        rerouted: entries that were not compared by themselves.
    """
    return Row(
        item.name,
        item.kind,
        iteration,
        sums.count,
        sums.relative,
        sums.cosine,
        sums.greatest,
        outcome.statistic,
        outcome.bound,
        sums.equal,
        None if sums.equal else worst,
        outcome.test,
        outcome.evidence,
        *floors,
        sums.count - sums.finite,
        rerouted,
    )


@dataclass(frozen=True, slots=True)
class ReplicaMismatch:
    """A replicated tensor that differs between ranks of one run.

    Attributes:
        dump: `A` or `B`.
        name: the name of the site or parameter.
        iteration: the framework's iteration number.
        microbatch: the ranks' microbatch.
        ranks: those whose copies differ from the one that was written.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> compare("dumps/run", "dumps/changed").replicas  # ranks agree with each other
        ()
    """

    dump: str
    name: str
    iteration: int
    microbatch: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"replicas differ in {self.dump}: {self.name}, iteration {self.iteration}, microbatch "
            f"{self.microbatch}: other bits on {name_ranks(self.ranks)} than on the rank that wrote it"
        )


@dataclass(frozen=True, slots=True)
class Power:
    """The differences that the tests of one iteration would have detected.

    Attributes:
        iteration: the framework's iteration number.
        kind: `value`, `gradient`, `parameter_gradient`, `parameter`.
        tensors: their number.
        relative: the smallest relative difference of a tensor that would be a divergence; the median.
        worst: of the tensor for which it is greatest.
        factor: the smallest deviation of a constant factor from 1, the median; NaN if none was estimated.
    """

    iteration: int
    kind: str
    tensors: int
    relative: float
    worst: float
    factor: float

    def __str__(self) -> str:
        if not self.relative and not self.worst:
            return f"iteration {self.iteration}: a {_describe_kind(self.kind)} with one other bit"
        factor = "" if math.isnan(self.factor) else f", a constant factor of 1 +- {self.factor:.1g}"
        return (
            f"iteration {self.iteration}: a {_describe_kind(self.kind)} with a relative difference of "
            f"{self.relative:.1g} ({self.worst:.1g} for the least sensitive tensor){factor}"
        )


@dataclass(frozen=True, repr=False)
class Comparison(ComparedResult):
    """The result of comparing two dumps.

    Attributes:
        a: the first dump, as text.
        b: the second dump.
        rows: every site in every common iteration, in execution order: iteration by iteration
            parameters at the start of the step, values, gradients backwards, gradients of parameters.
        replicas: replicas that differ within one of the runs, in the same order.
        hints: the pattern of the first divergence.
        notes: tensors that could not be compared, and other information.
        missing: what was left out: sites and iterations of only one of the dumps, and tensors
            that could not be aligned.
        allow_missing: whether that is allowed.
        incomparable: why the two cannot be compared at all: other tokens, or no finite entry; empty if they
            can.
        remedy: what makes numbers finite that are not finite in either run.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> print(compare("dumps/run", "dumps/changed"))
        diverges: first at decoder.layers.3:input (value), iteration 0
        ...
    """

    HEADS = (
        "site",
        ">iteration",
        ">relative",
        ">tolerance",
        ">cosine",
        ">max abs",
        "worst element",
        ">A",
        ">B",
    )

    a: str
    b: str
    rows: Sequence[Row]
    replicas: Sequence[ReplicaMismatch] = ()
    hints: Sequence[str] = ()
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    allow_missing: bool = False
    incomparable: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if not self.incomparable and not any(r.is_evidence for r in self.rows):
            empty = "no compared tensor has a finite entry in both runs"
            object.__setattr__(self, "incomparable", "; ".join(filter(None, [empty, self.remedy])))

    @property
    def first(self) -> Row | None:
        """The first site, in execution order, that differs by more than its tolerance."""
        return next((r for r in self.rows if r.diverges), None)

    @property
    def verdict(self) -> Verdict:
        """`equal` if every entry is the same; `diverges` if a test exceeds its bound, or replicas differ.

        `not distinguishable from round-off` says that whatever differs is below what can be detected: see
        `floor` of the rows. `incomplete` says that nothing diverges of what both have, and that only one of
        them has a site or an iteration, which `allow_missing` did not allow: see `missing`.
        """
        if self.incomparable:
            return INCOMPARABLE
        if self.first is not None or self.replicas:
            return "diverges"
        if self.incomplete:
            return INCOMPLETE
        return self._common_verdict

    @property
    def _common_verdict(self) -> Verdict:
        """The verdict about the tensors that both have, if none diverges."""
        return "equal" if all(r.equal and r.is_evidence for r in self.rows) else INDISTINGUISHABLE

    @property
    def causes(self) -> list[str]:
        """The causes that the hints name, such as `reduction`, `mask` or `dropped tokens`."""
        named = (getattr(hint, "cause", "place") for hint in self.hints)
        return [cause for cause in dict.fromkeys(named) if cause != "place"]

    @property
    def exit_status(self) -> int:
        """0 if nothing is distinguishable from round-off, 1 if they diverge, 2 if they cannot be compared.

        They cannot if the tokens are others, or if only one has a site or an iteration without permission
        and what both have does not diverge.
        """
        if self.verdict == "diverges":
            return 1
        return 2 if self.incomplete or self.incomparable else 0

    @property
    def incomplete(self) -> bool:
        """Whether something is missing without permission."""
        return bool(self.missing) and not self.allow_missing

    def _content(self) -> dict[str, Any]:
        first = self.first
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "incomparable": self.incomparable,
            "remedy": self.remedy,
            "power": [asdict(p) for p in self.power()],
            "a": self.a,
            "b": self.b,
            "first": None if first is None else asdict(first),
            "hints": list(self.hints),
            "causes": self.causes,
            "replicas": [asdict(r) for r in self.replicas],
            "notes": list(self.notes),
            "missing": list(self.missing),
            "incomplete": self.incomplete,
            "rows": [{**asdict(r), "diverges": r.diverges} for r in self.rows],
        }

    def shown(self, most: int = MAX_SHOWN) -> list[Row]:
        """Return the most informative rows: around the first divergence, or those nearest to their tolerance.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> for row in compare("dumps/run", "dumps/changed").shown(most=3):
            ...     print(row.name, row.equal)
            decoder.layers.2:output True
            decoder.layers.3:input False
            decoder.layers.3.input_layernorm:output False
        """
        if len(self.rows) <= most:
            return list(self.rows)
        first = self.first
        if first is not None:
            at = list(self.rows).index(first)
            begin = max(0, min(at - most // 3, len(self.rows) - most))
            return list(self.rows[begin : begin + most])
        worst = sorted(self.rows, key=lambda r: -r.excess)[:most]
        return [r for r in self.rows if r in worst]

    def summary(self) -> list[str]:
        """Return the result as lines of text, the verdict first.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> compare("dumps/run", "dumps/run").summary()[:3]
            ['equal: all entries of 124 tensors are the same', 'A: dumps/run (one rank; 2 iterations)', 'B:
             dumps/run (one rank; 2 iterations)']
        """
        first = self.first
        verdict = self._describe_agreement() if first is None else self._describe_divergence(first)
        runs = [f"A: {self.a}", f"B: {self.b}", *map(str, self.replicas[:3])]
        if len(self.replicas) > 3:
            runs.append(f"and {len(self.replicas) - 3} more replicas")
        after = self._describe_power() if first is None else self._left_out()
        qualified = [*self._describe_no_evidence(), *self._describe_other_weights()]
        return [*qualified, *verdict, *runs, *after, *self.notes]

    def _describe_agreement(self) -> list[str]:
        tested = [r for r in self.rows if r.is_evidence]
        worst = max(tested or self.rows, key=lambda r: r.excess)
        left_out = self._count_left_out()
        tensors = count_words(len(self.rows), "tensor")
        near = f"{worst.name}, {worst.test} {worst.error:.2g} of {worst.tolerance:.2g}"
        within: dict[str, str] = {
            "equal": f"equal: all entries of {tensors} are the same{left_out}",
            INDISTINGUISHABLE: f"{INDISTINGUISHABLE}: {len(tested)} tensors are within their bounds"
            f"{left_out}; nearest is {near}",
            INCOMPARABLE: f"{INCOMPARABLE}: {self.incomparable}",
            "diverges": f"diverges: replicas are out of step, while what was written of {len(self.rows)} "
            "tensors is within its tolerances",
        }
        if self.verdict == INCOMPLETE:
            return [*self._left_out(), f"  of what both have, {within[self._common_verdict]}"]
        return [within[self.verdict]]

    def _describe_divergence(self, first: Row) -> list[str]:
        lines = [f"{INCOMPARABLE}: {self.incomparable}"] if self.incomparable else []
        word = "differs" if self.incomparable else "diverges"
        lines += [
            f"{word}: first at {first.name} ({_describe_kind(first.kind)}), iteration {first.iteration}",
            f"  relative error {first.relative:.3g}, cosine {first.cosine:.4g}, greatest difference "
            f"{first.max_abs:.3g}; {first.test} {first.error:.3g}, bound {first.tolerance:.2g}",
        ]
        if first.evidence:
            lines.append(f"  {first.evidence}")
        worst = first.worst
        if worst is not None:
            lines.append(f"  worst at {worst.place()}: A {worst.a:.6g}, B {worst.b:.6g}")
            for name, ranks in (("A", worst.ranks_a), ("B", worst.ranks_b)):
                if ranks:
                    lines.append(f"  held in {name} by {'; '.join(ranks[:4])}{' ...' if ranks[4:] else ''}")
        return [*lines, *(f"  {hint}" for hint in self.hints)]

    def _describe_no_evidence(self) -> list[str]:
        """The tensors that show nothing, as no entry is finite in both runs, and the remedy."""
        empty = [r for r in self.rows if not r.is_evidence and r.not_finite]
        if not empty or self.incomparable:
            return []
        kinds = dict.fromkeys(_describe_kind(r.kind) for r in empty)
        return [
            f"no evidence: {len(empty)} of {count_words(len(self.rows), 'tensor')} have no finite entry in "
            f"both runs ({', '.join(kinds)}), first {empty[0].name}, iteration {empty[0].iteration}"
            + (f"; {self.remedy}" if self.remedy else "")
        ]

    def _count_left_out(self) -> str:
        """The entries and tensors that were not compared, as a part of the verdict's line."""
        empty = [r for r in self.rows if not r.is_evidence]
        broken = [r for r in self.rows if r.is_evidence and r.not_finite]
        rerouted = [r for r in self.rows if r.rerouted]
        out = []
        if empty:
            out.append(f"{len(empty)} have nothing to compare")
        if broken:
            count, tensors = sum(r.not_finite for r in broken), count_words(len(broken), "tensor")
            out.append(f"{count:,} entries of {tensors} are not finite and not compared")
        if rerouted:
            count, total = sum(r.rerouted for r in rerouted), sum(r.count for r in rerouted)
            out.append(
                f"{count:,} of {total:,} entries of {count_words(len(rerouted), 'tensor')} are of tokens "
                "that near ties of routers reach, and are not compared one by one"
            )
        return "".join(f", {text}" for text in out)

    def _describe_other_weights(self) -> list[str]:
        """Whether the two runs began with other weights: then all that follows compares two models."""
        begun = [r for r in self.rows if r.iteration == self.rows[0].iteration and r.kind == "parameter"]
        other = [r.name for r in begun if r.diverges]
        if not other:
            return []
        return [
            f"the weights differ: {len(other)} of {len(begun)} parameters at the start of iteration "
            f"{begun[0].iteration}, first {other[0]}; both runs must load one checkpoint, as "
            "megatron-flex two-layouts makes them, and nothing may change the weights after that"
        ]

    def power(self) -> list[Power]:
        """Return what would have been detected, by iteration and kind, in execution order.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> [power.kind for power in compare("dumps/run", "dumps/run", iterations=[0]).power()]
            ['parameter', 'value']
        """
        known: dict[tuple[int, str], list[Row]] = {}
        for row in self.rows:
            if row.is_evidence:
                known.setdefault((row.iteration, row.kind), []).append(row)
        out = []
        for (iteration, kind), rows in known.items():
            floors = sorted(r.floor for r in rows)
            factors = sorted(r.factor_floor for r in rows if r.factor_floor and math.isfinite(r.factor_floor))
            factor = factors[len(factors) // 2] if factors else math.nan
            out.append(Power(iteration, kind, len(rows), floors[len(floors) // 2], floors[-1], factor))
        return out

    def _describe_power(self) -> list[str]:
        """Lines about what would have been detected, for the first and the last iteration."""
        if all(r.equal for r in self.rows):
            return []
        shown = {self.rows[0].iteration, self.rows[-1].iteration}
        lines = [f"  {power}" for power in self.power() if power.iteration in shown]
        title = "the smallest differences that would have been detected (median over tensors):"
        return [title, *lines] if lines else []

    def _left_out(self) -> list[str]:
        """A line about missing tensors, if they are not allowed."""
        fix = "--allow-missing (allow_missing=True) accepts this"
        return [f"incomplete: some iterations or hook points are in one dump only (listed below); {fix}"] * (
            self.incomplete
        )

    def table_rows(self, most: int = MAX_SHOWN) -> list[TableRow]:
        """Return the rows of the table for `shown(most)`."""
        first = self.first
        return [TableRow(_format_cells(r), r.diverges, r is first) for r in self.shown(most)]

    def _repr_html_(self) -> str:
        """The summary, the table with as many rows as a notebook shows, and all replicas that differ."""
        rows, count = self.table_rows(MAX_TABLE_ROWS), len(self.rows)
        where = "around the first divergence" if self.first is not None else "nearest to their tolerance"
        rest = f"these {len(rows)} of {count:,} are {where}; {ROWS_HINT}"
        shown = describe_result(
            f"Comparison · {self.verdict}", self.summary(), self.HEADS, rows, count=count, rest=rest
        )
        if len(self.replicas) <= 3:
            return shown._repr_html_()
        several = f"{count_words(len(self.replicas), 'replica')} out of step"
        replicas = Table(
            ("",),
            [DocumentRow((str(replica),)) for replica in self.replicas],
            title=several,
            opened=False,
            rest="found.replicas has all",
            header=False,
        )
        return replace(shown, parts=[*shown.parts, replicas])._repr_html_()


def _format_cells(row: Row) -> tuple[str, ...]:
    """The cells of a table row, below HEADS."""
    worst = row.worst
    return (
        row.name,
        str(row.iteration),
        "nothing" if not row.is_evidence else "equal" if row.equal else f"{row.relative:.2e}",
        f"{row.tolerance:.1e}",
        f"{row.cosine:.6f}",
        f"{row.max_abs:.2e}",
        "" if worst is None else worst.place(),
        "" if worst is None else f"{worst.a:.6g}",
        "" if worst is None else f"{worst.b:.6g}",
    )


def _describe_kind(kind: str) -> str:
    return kind.replace("_", " ").replace("parameter gradient", "gradient of a parameter")
