"""The plan of a conversion: for each parameter of the full model the tensors that make it up, all validated.

A plan is made of names and shapes alone, on every rank for all stages, so that all ranks find the same
mistakes before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_flex.conversion.architectures import (
    OUTPUT_WEIGHT,
    WORD_EMBEDDINGS,
    HuggingFaceArchitecture,
    WeightRule,
)
from megatron_flex.conversion.checkpoints import Index, TensorForm
from megatron_flex.conversion.parameter_names import canonical_names
from megatron_flex.conversion.rearrangement import Heads, RowRun, divide_rows, find_runs
from megatron_flex.errors import FlexError, LayoutError, suggest_nearest

VOCABULARIES = (WORD_EMBEDDINGS, OUTPUT_WEIGHT)  # whose rows Megatron pads
FLOATS = ("F64", "F32", "F16", "BF16")
FIELDS = re.compile(
    r"(?<=\blayers\.)(?P<layer>\d+)|(?<=\blocal_experts\.)(?P<expert>\d+)|(?P<kind>weight|bias)$"
)
ENTRY = re.compile(r"(.+)\[(\d+)\]")
ENTRY_FIELD = "[{expert}]"  # at the end of a tensor's name in a rule: an entry of its first dim
FIELD = re.compile(r"\\{(layer|expert|kind)\\}")  # a field in a tensor's name after re.escape
FIELD_PATTERNS = {"layer": r"(?P<layer>\d+)", "expert": r"(?P<expert>\d+)", "kind": "(?P<kind>weight|bias)"}


class TensorPart(NamedTuple):
    """A tensor of Hugging Face, or one entry of its first dim, as rows.

    Attributes:
        name: the tensor's name.
        entry: the entry of its first dim; None for the tensor itself.
        shape: the shape of the rows, `[rows, ...]`.
        transposed: whether rows are columns of the stored matrix.
    """

    name: str
    entry: int | None
    shape: tuple[int, ...]
    transposed: bool

    def locate(self, rows: slice, rest: tuple[slice, ...]) -> Index:
        """The index of a block in the stored tensor."""
        block = (*rest, rows) if self.transposed else (rows, *rest)
        return block if self.entry is None else (self.entry, *block)


class PlannedParameter(NamedTuple):
    """A parameter of Megatron, and the tensors that make it up.

    Attributes:
        name: its global name.
        parts: the tensors.
        runs: where its rows come from; rows after the last run are padding.
        shape: its full shape, padding included.
    """

    name: str
    parts: tuple[TensorPart, ...]
    runs: tuple[RowRun, ...]
    shape: tuple[int, ...]


class ConversionPlan(NamedTuple):
    """All parameters of a full model, and the tensors that none of them needs.

    Attributes:
        parameters: by global name.
        unused: names of tensors that the architecture leaves out.
    """

    parameters: Mapping[str, PlannedParameter]
    unused: tuple[str, ...]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of which a part is not an entry."""
        out: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters.values():
            for part in parameter.parts:
                out[part.name] = part.shape[::-1] if part.transposed else part.shape
        return out


class PlanMaker:
    """Matches the parameters of a full model with tensors of Hugging Face.

    Args:
        architecture: the entry of the table.
        heads: the heads of its attention.
        tied: whether the configuration ties the output layer to the embedding.
        layers: the number of layers in the configuration.
        vocabulary: the rows of the embedding in the configuration.

    Attributes:
        heads: as given.
    """

    def __init__(
        self, architecture: HuggingFaceArchitecture, heads: Heads, tied: bool, layers: int, vocabulary: int
    ) -> None:
        self._architecture, self.heads, self._tied = architecture, heads, tied
        self._layers, self._vocabulary = layers, vocabulary
        self._rules: dict[str, list[WeightRule]] = {}
        for rule in architecture.rules:
            if rule.tied in (None, tied):
                self._rules.setdefault(rule.ours, []).append(rule)

    def match(
        self, shapes: Mapping[str, tuple[int, ...]], forms: Mapping[str, TensorForm], where: str
    ) -> ConversionPlan:
        """The plan for tensors that exist.

        Args:
            shapes: the full shape of each parameter by its global name, padding included.
            forms: the shapes and dtypes of all tensors.
            where: where these are, for messages.

        Raises:
            FlexError: a tensor is missing, superfluous, of a wrong shape, or quantized.
        """
        strip = (
            ""
            if any(name.startswith(self._architecture.prefix) for name in forms)
            else self._architecture.prefix
        )
        planned: dict[str, PlannedParameter] = {}
        for name, plain in canonical_names(shapes).items():
            candidates = [
                self._named(rule, fields, strip) for rule, fields in self._rules_for(name, plain, where)
            ]
            rule_and_parts = next((c for c in candidates if all(n in forms for n, _ in c[1])), None)
            if rule_and_parts is None:
                lacking = next(n for n, _ in candidates[0][1] if n not in forms)
                raise FlexError(
                    f"{lacking} is missing in {where}: {name} is made of it{suggest_nearest(lacking, forms)}"
                )
            planned[name] = self._planned(name, plain, shapes[name], *rule_and_parts, forms)
        used = {part.name for parameter in planned.values() for part in parameter.parts}
        unused = [name for name in forms if name not in used]
        for name in unused:
            if not self._left_out(name):
                raise FlexError(
                    f"{name} of {where} has no counterpart among the parameters of the Megatron model"
                )
        return ConversionPlan(planned, tuple(unused))

    def list_shapes(self, forms: Mapping[str, TensorForm]) -> dict[str, tuple[int, ...]]:
        """The full shapes of the parameters that some tensors make up, named as a GPTModel has them.

        Args:
            forms: the shapes and dtypes of all tensors.
        """
        prefix = self._architecture.prefix
        strip = "" if any(name.startswith(prefix) for name in forms) else prefix
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in (rule for rules in self._rules.values() for rule in rules):
            first, entry = rule.theirs[0].removeprefix(strip), ""
            if first.endswith(ENTRY_FIELD):
                first, entry = first.removesuffix(ENTRY_FIELD), ENTRY_FIELD
            pattern = re.compile(FIELD.sub(lambda m: FIELD_PATTERNS[m[1]], re.escape(first)))
            for match in filter(None, map(pattern.fullmatch, forms)):
                count = forms[match[0]].shape[0] if entry else 1
                for number in range(count):
                    fields = match.groupdict() | ({"expert": str(number)} if entry else {})
                    _, parts = self._named(rule, fields, strip)
                    if all(part in forms for part, _ in parts):
                        rows = [_as_rows(part, at, forms[part], rule).shape for part, at in parts]
                        if all(rows):
                            joined = (sum(shape[0] for shape in rows), *rows[0][1:])
                            shapes.setdefault(rule.ours.format(**fields), joined)
        return shapes

    def write(self, shapes: Mapping[str, tuple[int, ...]]) -> ConversionPlan:
        """The plan for tensors that are to be made; `shapes` as for `match`.

        Raises:
            FlexError: a parameter has no counterpart.
        """
        planned = {}
        for name, plain in canonical_names(shapes).items():
            rule, fields = self._rules_for(name, plain, "Hugging Face")[0]
            rows = self._vocabulary if plain in VOCABULARIES else shapes[name][0]
            counts = self._divide(name, rule, rows)
            _, names = self._named(rule, fields, "")
            forms = {
                part: TensorForm(_stored((count, *shapes[name][1:]), rule.transposed), FLOATS[0])
                for (part, _), count in zip(names, counts, strict=True)
            }
            planned[name] = self._planned(name, plain, shapes[name], rule, names, forms)
        return ConversionPlan(planned, ())

    def _rules_for(self, name: str, plain: str, where: str) -> list[tuple[WeightRule, dict[str, str]]]:
        """The rules for a parameter, with the values of their fields."""
        fields: dict[str, str] = {}
        for match in FIELDS.finditer(plain):
            fields.update({k: v for k, v in match.groupdict().items() if v is not None})
        general = FIELDS.sub(lambda m: f"{{{m.lastgroup}}}", plain)
        literal = general.removesuffix("{kind}") + fields.get("kind", "")
        rules = [*self._rules.get(general, ()), *(self._rules.get(literal, ()) if literal != general else ())]
        if not rules:
            raise FlexError(f"{name} of the Megatron model has no counterpart in {where}")
        return [(rule, fields) for rule in rules]

    def _named(
        self, rule: WeightRule, fields: Mapping[str, str], strip: str
    ) -> tuple[WeightRule, tuple[tuple[str, int | None], ...]]:
        """The names of a rule's tensors, and the entries of their first dims."""
        out: list[tuple[str, int | None]] = []
        for pattern in rule.theirs:
            name = pattern.format(**fields).removeprefix(strip)
            match = ENTRY.fullmatch(name)
            out.append((name, None) if match is None else (match[1], int(match[2])))
        return rule, tuple(out)

    def _divide(self, name: str, rule: WeightRule, rows: int) -> tuple[int, ...]:
        try:
            return divide_rows(rule.join, rows, self.heads)
        except LayoutError as error:
            raise FlexError(f"{name}: {error}") from error

    def _planned(
        self,
        name: str,
        plain: str,
        shape: tuple[int, ...],
        rule: WeightRule,
        names: Sequence[tuple[str, int | None]],
        forms: Mapping[str, TensorForm],
    ) -> PlannedParameter:
        """One parameter, whose tensors have the shapes that it needs."""
        vocabulary = plain in VOCABULARIES
        parts = tuple(_as_rows(part, entry, forms[part], rule) for part, entry in names)
        rows = min(shape[0], parts[0].shape[0] if parts[0].shape else 0) if vocabulary else shape[0]
        counts = self._divide(name, rule, rows)
        for part, count in zip(parts, counts, strict=True):
            form = forms[part.name]
            if vocabulary and part.shape[1:] == shape[1:] and part.shape[0] > shape[0]:
                raise FlexError(
                    f"{part.name} has {part.shape[0]} rows, and {name} only {shape[0]}: build the Megatron "
                    "model with a vocabulary of at least as many"
                )
            if part.shape != (count, *shape[1:]):
                needed = _stored((count, *shape[1:]), part.transposed)
                stored = form.shape if part.entry is None else form.shape[1:]
                raise FlexError(f"{part.name} has shape {stored}; {name} of shape {shape} needs {needed}")
            if form.dtype not in FLOATS:
                raise FlexError(
                    f"{part.name} has dtype {form.dtype}: convert it to one of {', '.join(FLOATS)}"
                )
        try:
            runs = find_runs(rule.join, rows, self.heads)
        except LayoutError as error:
            raise FlexError(f"{name}: {error}") from error
        return PlannedParameter(name, parts, runs, shape)

    def _left_out(self, name: str) -> bool:
        """Whether the architecture leaves a tensor out: no parameter, or a copy of the embedding."""
        tied = {
            n for rule in self._architecture.rules if rule.tied not in (None, self._tied) for n in rule.theirs
        }
        patterns = (p.replace("{num_hidden_layers}", str(self._layers)) for p in self._architecture.unused)
        return name in (tied if self._tied else ()) or any(re.fullmatch(p, name) for p in patterns)


def check_entries(plan: ConversionPlan, forms: Mapping[str, TensorForm]) -> None:
    """Validate that a tensor with an entry for each expert has no more entries than there are experts.

    Raises:
        FlexError: it has more.
    """
    counts: dict[str, int] = {}
    for part in (part for parameter in plan.parameters.values() for part in parameter.parts):
        if part.entry is not None:
            counts[part.name] = max(counts.get(part.name, 0), part.entry + 1)
    for name, count in counts.items():
        if forms[name].shape[0] != count:
            raise FlexError(
                f"{name} has {forms[name].shape[0]} entries, and the Megatron model {count} experts"
            )


def _as_rows(name: str, entry: int | None, form: TensorForm, rule: WeightRule) -> TensorPart:
    shape = form.shape if entry is None else form.shape[1:]
    transposed = rule.transposed and len(shape) == 2
    return TensorPart(name, entry, shape[::-1] if transposed else shape, transposed)


def _stored(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return shape[::-1] if transposed and len(shape) == 2 else shape


def blocks_of(parameter: PlannedParameter) -> Iterator[tuple[TensorPart, RowRun]]:
    """The runs of a parameter's rows with their tensors."""
    for run in parameter.runs:
        yield parameter.parts[run.part], run
