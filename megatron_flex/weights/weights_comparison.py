"""Whether two sets of weights are the same: their digests compared, and each parameter that differs named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from megatron_flex.compare.compared_result import ComparedResult, TableRow
from megatron_flex.conversion import Heads
from megatron_flex.conversion.conversion_plan import VOCABULARIES
from megatron_flex.errors import FlexError, list_some
from megatron_flex.weights.difference_causes import Explainer, WeightDifference
from megatron_flex.weights.parameter_digest import VOCABULARY_ROWS, ParameterDigest, ParameterForm
from megatron_flex.weights.parameter_parts import list_parts
from megatron_flex.weights.weight_sources import WeightSource, open_source
from megatron_flex.weights.weights_digest import WeightsDigest, digest_source, read_digest
from megatron_flex.wording import count_words

MAX_ROWS = 20  # of the table


@dataclass(frozen=True)
class WeightsComparison(ComparedResult):
    """The result of comparing two sets of weights.

    Attributes:
        a: what A was read from.
        b: what B was read from.
        compared: the number of parameters that both have.
        differences: those that differ, in the order of the model.
        missing: parameters that only one of the two has.
        converted: the number of parameters that were compared in the narrower of two dtypes.
        uncompared: of a vocabulary that is padded in a file of digests, the last rows, which have no checksum
            of their own; a line for each parameter.
    """

    a: str
    b: str
    compared: int
    differences: tuple[WeightDifference, ...]
    missing: tuple[str, ...] = ()
    converted: int = 0
    uncompared: tuple[str, ...] = ()
    HEADS: ClassVar[tuple[str, ...]] = ("parameter", "cause", "evidence")

    @property
    def exit_status(self) -> int:
        """0 if all parameters are equal, 1 if some differ."""
        return int(bool(self.differences))

    def summary(self) -> list[str]:
        """Return the result in lines, the verdict first."""
        count = count_words(self.compared, "parameter")
        lines = [f"equal: {count} of {self.a} and {self.b}"]
        if self.differences:
            causes = Counter(difference.cause for difference in self.differences)
            named = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
            lines = [f"differs: {len(self.differences)} of {count} of {self.a} (A) and {self.b} (B): {named}"]
        if self.converted:
            lines.append(f"{count_words(self.converted, 'parameter')} compared in the narrower of two dtypes")
        lines += self.uncompared
        if self.missing:
            lines.append(f"only in one of the two: {list_some(self.missing, most=8)}")
        return lines

    def table_rows(self, most: int = MAX_ROWS) -> list[TableRow]:
        """Return a row for each of the first parameters that differ."""
        return [
            TableRow((d.name, d.cause, d.text), True, number == 0)
            for number, d in enumerate(self.differences[:most])
        ]

    def _content(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "compared": self.compared,
            "converted": self.converted,
            "missing": self.missing,
            "uncompared": self.uncompared,
            "differences": [difference.to_json() for difference in self.differences],
        }


def compare_weights(a: Any, b: Any, *, allow_missing: bool = False) -> WeightsComparison:
    """Compare two sets of weights in any layouts, parameter by parameter, bit for bit.

    Names and shapes are compared before any value is read. Where the dtypes differ, both are rounded to the
    narrower one; a padded vocabulary is compared without its padding. A file of digests has neither: of its
    parameters with another dtype the sampled entries are compared.

    Args:
        a: a folder of Hugging Face, a dump, a Megatron checkpoint of the format torch_dist, a file of
            digests, a `WeightsDigest`, or a model of transformers.
        b: likewise.
        allow_missing: accept parameters that only one of the two has.

    Returns:
        The parameters that differ, each with its cause.

    Raises:
        FlexError: a source cannot be read, or the two are weights of different architectures.

    Examples:
        >>> from megatron_flex.weights import compare_weights
        >>> compare_weights("llama", "llama").differences
        ()
    """
    sides = [_open_side(a), _open_side(b)]
    try:
        one, other = sides
        heads = _agree_on_heads(one, other)
        all_forms = [_list_forms(side, heads) for side in sides]
        missing = _check_architectures(one, other, all_forms, allow_missing)
        forms_a, forms_b = all_forms
        names = [name for name in forms_a if name in forms_b]
        read_forms = [
            {name: _limit(name, limited[name], other[name]) for name in names}
            for limited, other in ((forms_a, forms_b), (forms_b, forms_a))
        ]
        digests = [
            side if isinstance(side, WeightsDigest) else digest_source(side, heads, forms)
            for side, forms in zip(sides, read_forms, strict=True)
        ]
        converted = sum(forms_a[name].dtype != forms_b[name].dtype for name in names)
    finally:
        for side in sides:
            if not isinstance(side, WeightsDigest):
                side.close()
    explainer = Explainer(digests[0].parameters, heads)
    pairs = ((name, digests[0].parameters[name], digests[1].parameters[name]) for name in names)
    uncompared = _list_uncompared(*(digest.parameters for digest in digests))
    differences = [d for pair in pairs if (d := explainer.explain(*pair)) is not None]
    return WeightsComparison(
        digests[0].source, digests[1].source, len(names), tuple(differences), missing, converted, uncompared
    )


Side = WeightsDigest | WeightSource
Forms = Mapping[str, ParameterForm]


def _open_side(source: Any) -> Side:
    if isinstance(source, WeightsDigest):
        return source
    if isinstance(source, str | PathLike) and Path(source).is_file():
        return read_digest(source)
    return open_source(source)


def _where(side: Side) -> str:
    return side.source if isinstance(side, WeightsDigest) else side.where


def _agree_on_heads(a: Side, b: Side) -> Heads | None:
    """The heads of attention, which both must have alike if both know them."""
    if a.heads and b.heads and a.heads != b.heads:
        raise FlexError(
            f"{_where(a)} has {a.heads.queries} heads in {a.heads.groups} groups, and {_where(b)} "
            f"{b.heads.queries} in {b.heads.groups}: give weights of one architecture"
        )
    return a.heads or b.heads


def _list_forms(side: Side, heads: Heads | None) -> Forms:
    """The shape and dtype of each part of a parameter."""
    if isinstance(side, WeightsDigest):
        return side.forms
    return {name: part.form for name, part in list_parts(side.forms, heads).items()}


def _check_architectures(a: Side, b: Side, forms: Sequence[Forms], allow_missing: bool) -> tuple[str, ...]:
    """The parameters that only one of the two has; names and shapes must be of one architecture."""
    forms_a, forms_b = forms
    for name, form in forms_a.items():
        other = forms_b.get(name, form).shape
        rows_only = name in VOCABULARIES and other[1:] == form.shape[1:]
        if other != form.shape and other != form.shape[::-1] and not rows_only:
            raise FlexError(
                f"{name} has shape {form.shape} in {_where(a)} and {other} in {_where(b)}: give weights of "
                "one architecture"
            )
    only_a = [name for name in forms_a if name not in forms_b]
    missing = [*only_a, *(name for name in forms_b if name not in forms_a)]
    if missing and (not allow_missing or len(missing) == len(forms_a) + len(forms_b)):
        which, lacks = (a, b) if only_a else (b, a)
        more = f", and {len(missing) - 1} more are in one of the two only" if len(missing) > 1 else ""
        raise FlexError(
            f"{missing[0]} is in {_where(which)} and not in {_where(lacks)}{more}: give weights of one "
            "architecture, or --allow-missing"
        )
    return tuple(missing)


def _list_uncompared(a: Mapping[str, ParameterDigest], b: Mapping[str, ParameterDigest]) -> tuple[str, ...]:
    """The rows of vocabularies of two lengths that are in a block with padding."""
    lines = []
    for name in VOCABULARIES:
        shapes = [digests[name].shape for digests in (a, b) if name in digests]
        if len(shapes) == 2 and shapes[0] != shapes[1] and shapes[0][1:] == shapes[1][1:]:
            rows = min(shapes)[0]
            if rest := rows % VOCABULARY_ROWS:
                lines.append(
                    f"{name}: {count_words(rest, 'row')} before the padding not compared; give weights "
                    "instead of the file of digests that has the padding"
                )
    return tuple(lines)


def _limit(name: str, form: ParameterForm, other: ParameterForm) -> ParameterForm:
    """What is read of a parameter: without the rows that pad its vocabulary, in the narrower dtype."""
    padded = name in VOCABULARIES and form.shape[1:] == other.shape[1:]
    shape = min(form.shape, other.shape) if padded else form.shape
    return ParameterForm(shape, other.dtype if form.dtype.itemsize > other.dtype.itemsize else form.dtype)
