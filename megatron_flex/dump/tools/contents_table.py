"""The runs and tensors of a dump as tables; tensors of layers and experts that are alike are one row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_flex.document import Document, Note, Row, Table
from megatron_flex.dump.schema import ITERATION_NUMBERS, MEGATRON
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.mesh import describe_sizes
from megatron_flex.progress import format_bytes
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.wording import count_words, format_series

if TYPE_CHECKING:
    from megatron_flex.dump.tools.dump_contents import DumpContents, RunRow, TensorRow

NAME_NUMBER = re.compile(r"\.\d+(?=\.|:|#|$)")


def describe_contents(contents: DumpContents, path: str, every: bool) -> Document:
    """Runs, then sites and parameters.

    Args:
        contents: what the dump has.
        path: of the dump; empty if it is not known.
        every: a row for each layer, even if layers are alike.
    """
    iterations = count_words(len(contents.iterations), "complete iteration")
    head = f"{count_words(len(contents.runs), 'run')}, {iterations}, {format_bytes(contents.nbytes)}"
    tables = []
    for kind in ("site", "parameter"):
        groups = _pair_gradients([t for t in contents.tensors if t.kind == kind])
        if groups:
            tables.append(
                _tensor_table(groups if every else _fold_numbers(groups), kind, contents.iterations)
            )
    megatron = any(run.framework == MEGATRON for run in contents.runs)
    return Document(
        "DumpContents",
        [
            Note(f"{path}: {head}" if path else head),
            Table(
                (">run", "framework", "mesh", ">ranks", "complete", "incomplete", ">size"),
                [Row(_run_cells(run)) for run in contents.runs],
            ),
            *(Note(f"run {run.number}: {run.damage}", "bad") for run in contents.runs if run.damage),
            *(Note(f"note: {note}", "note") for note in contents.notes),
            *([Note(ITERATION_NUMBERS, "dim")] if megatron else []),
            *tables,
            *(Note(tensor.problem, "bad") for tensor in contents.tensors if tensor.problem),
        ],
    )


def _run_cells(run: RunRow) -> list[str]:
    return [
        str(run.number),
        run.framework or ("(no manifest)" if run.damage else ""),
        "" if run.damage else describe_sizes(run.mesh),
        str(run.ranks),
        format_series(run.whole),
        format_series(run.incomplete),
        format_bytes(run.nbytes),
    ]


class _TensorGroup(NamedTuple):
    """Tensors that are alike, and their gradients.

    Attributes:
        title: their name, such as `decoder.layers.{0–31}.mlp.linear_fc1`.
        tensor: one of them.
        nbytes: of all.
        gradients: bytes of all gradients; None without.
    """

    title: str
    tensor: TensorRow
    nbytes: int
    gradients: int | None


def _tensor_form(t: TensorRow) -> tuple[object, ...]:
    return tuple(t.dims), tuple(t.shape), t.dtype, tuple(t.iterations)


def _pair_gradients(tensors: Sequence[TensorRow]) -> list[_TensorGroup]:
    """A gradient is in the row of its tensor, unless it has another form."""
    by_name = {t.name: t for t in tensors}
    out = []
    for t in tensors:
        values = (
            by_name.get(t.name.removesuffix(GRADIENT_SUFFIX)) if t.name.endswith(GRADIENT_SUFFIX) else None
        )
        if values is not None and _tensor_form(values) == _tensor_form(t):
            continue
        gradient = by_name.get(t.name + GRADIENT_SUFFIX)
        same = gradient is not None and _tensor_form(gradient) == _tensor_form(t)
        out.append(
            _TensorGroup(t.name, t, t.nbytes, gradient.nbytes if same and gradient is not None else None)
        )
    return out


def _fold_numbers(rows: Sequence[_TensorGroup]) -> list[_TensorGroup]:
    """Rows that differ in one number of their names become one: first the experts of a layer, then layers."""
    return _fold_number(_fold_number(rows, -1), 0)


def _fold_number(rows: Sequence[_TensorGroup], which: int) -> list[_TensorGroup]:
    """Fold rows over one of the numbers in their names; a folded row is where its first tensor was."""
    groups: dict[tuple[object, ...], list[tuple[int, _TensorGroup]]] = {}
    for row in rows:
        numbers = list(NAME_NUMBER.finditer(row.title))
        head, number, tail = row.title, -1, ""
        if numbers:
            start, end = numbers[which].span()
            head, number, tail = row.title[:start], int(row.title[start + 1 : end]), row.title[end:]
        key = (head, number < 0, tail, _tensor_form(row.tensor), row.gradients is None, row.tensor.problem)
        groups.setdefault(key, []).append((number, row))
    return [_join_rows(str(key[0]), str(key[2]), members) for key, members in groups.items()]


def _join_rows(head: str, tail: str, members: Sequence[tuple[int, _TensorGroup]]) -> _TensorGroup:
    """One row for tensors whose names are `head`, a number and `tail`."""
    (first, row), *others = members
    if not others:
        return row
    numbers = [number for number, _ in members]
    steps = numbers == list(range(first, first + len(numbers)))
    span = f"{first}–{numbers[-1]}" if steps else ",".join(map(str, numbers))
    sizes = [member.gradients for _, member in members if member.gradients is not None]
    return _TensorGroup(
        f"{head}.{{{span}}}{tail}",
        row.tensor,
        sum(member.nbytes for _, member in members),
        sum(sizes) if sizes else None,
    )


def _tensor_table(groups: Sequence[_TensorGroup], kind: str, complete: Sequence[int]) -> Table:
    differ = any(list(group.tensor.iterations) != list(complete) for group in groups)
    gradients = any(group.gradients is not None for group in groups)
    columns = [kind, "shape", "dtype", *(["iterations"] * differ), ">size", *([">gradients"] * gradients)]
    rows = []
    for group in groups:
        tensor = group.tensor
        size = "–" if group.gradients is None else format_bytes(group.gradients)
        rows.append(
            Row(
                [
                    group.title,
                    format_shape(tensor.dims, tensor.shape),
                    tensor.dtype,
                    *([format_series(tensor.iterations)] * differ),
                    format_bytes(group.nbytes),
                    *([size] * gradients),
                ]
            )
        )
    return Table(columns, rows)
