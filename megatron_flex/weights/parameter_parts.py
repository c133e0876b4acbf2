"""The matrices that Megatron keeps in one parameter: queries, keys and values; gate and up.

Each has a digest of its own, `...linear_qkv.weight[q]`, because each may be wrong by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.conversion import GATE_UP, QUERY_KEY_VALUE, Heads, Join
from megatron_flex.conversion.rearrangement import RowRun, find_runs
from megatron_flex.errors import FlexError, LayoutError
from megatron_flex.weights.parameter_digest import ParameterForm, ReadRows

FUSED, FIRST_LINEAR, SECOND_WEIGHT = ".linear_qkv.", ".linear_fc1.", ".linear_fc2.weight"


class ParameterPart(NamedTuple):
    """A matrix in a parameter.

    Attributes:
        parameter: the name of the parameter.
        number: which of its parts it is; None if it is all of it.
        form: its shape and dtype.
        runs: its rows in the parameter, in the order of the part; empty if it is all of it.
    """

    parameter: str
    number: int | None
    form: ParameterForm
    runs: tuple[RowRun, ...] = ()

    def read(self, read: ReadRows, start: int, stop: int) -> Tensor:
        """Some rows of the part.

        Args:
            read: reads rows of the parameter.
            start: the first row.
            stop: the row after the last one.
        """
        if self.number is None:
            return read(start, stop)
        blocks = []
        for run in self.runs:
            first, last = max(start, run.origin), min(stop, run.origin + run.rows)
            if first < last:
                at = run.start - run.origin
                blocks.append(read(first + at, last + at))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def list_parts(forms: Mapping[str, ParameterForm], heads: Heads | None) -> dict[str, ParameterPart]:
    """The parts of all parameters, by name.

    Args:
        forms: the shapes and dtypes of the parameters, by the names that a GPTModel with the local spec has.
        heads: those of attention; None if they are not known: then queries, keys and values stay together.

    Raises:
        FlexError: the rows of a parameter do not divide so.
    """
    return {
        part: of_part for name, form in forms.items() for part, of_part in _split(name, form, forms, heads)
    }


def _split(
    name: str, form: ParameterForm, forms: Mapping[str, ParameterForm], heads: Heads | None
) -> Iterator[tuple[str, ParameterPart]]:
    join, labels = _find_join(name, form, forms, heads)
    if join is None:
        yield name, ParameterPart(name, None, form)
        return
    try:
        runs = find_runs(join, form.shape[0], heads or Heads(1, 1))
    except LayoutError as error:
        raise FlexError(f"{name}: {error}; give weights of one architecture") from error
    for number, label in enumerate(labels):
        chosen = sorted((run for run in runs if run.part == number), key=lambda run: run.origin)
        rows = sum(run.rows for run in chosen)
        shape = (rows, *form.shape[1:])
        yield (
            f"{name}[{label}]",
            ParameterPart(name, number, ParameterForm(shape, form.dtype), tuple(chosen)),
        )


def _find_join(
    name: str, form: ParameterForm, forms: Mapping[str, ParameterForm], heads: Heads | None
) -> tuple[Join | None, tuple[str, ...]]:
    """How a parameter is joined, and the names of its parts."""
    if FUSED in name and heads is not None and form.shape:
        return QUERY_KEY_VALUE, ("q", "k", "v")
    before, linear, _ = name.rpartition(FIRST_LINEAR)
    second = forms.get(f"{before}{SECOND_WEIGHT}") if linear else None
    # The activation of a gated MLP has half as many features as its first linear.
    if second is not None and len(second.shape) == 2 and form.shape[:1] == (2 * second.shape[1],):
        return GATE_UP, ("gate", "up")
    return None, ()
