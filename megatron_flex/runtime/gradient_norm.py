"""The gradient norm that a framework reports, against the norm of the full gradients.

A framework computes the norm from the shards on all ranks, each of which it must count once. A parameter that
is counted on every rank that holds a copy, or only on some of the ranks that hold its shards, scales every
update of a clipped training, and no tensor of the model shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Undo
from megatron_flex.collectives import gather_distinct, gather_reports, sum_along
from megatron_flex.errors import FlexError, list_some
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.edit_failures import format_ranks
from megatron_flex.runtime.full_parameters import ParameterIndex
from megatron_flex.runtime.parameter_selection import LocalParameterGradient, ParameterSelection
from megatron_flex.runtime.statistics_sink import select_counted_part

MAX_NAMES, MAX_CAUSES = 2, 3  # bounds the names of one cause, and the causes that explain a norm alike
ROUNDING = 2e-5  # of the squared norm: frameworks sum fp32 squares in another order
AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class ComparedNorm(NamedTuple):
    """A reported norm beside that of the full gradients.

    Attributes:
        norm: the reported norm.
        full: the norm of the full gradients.
        finding: the two norms, and what explains that they differ; empty if they agree.
        names: the parameters that are counted wrongly; empty if no cause explains the difference.
        ranks: the ranks that reported the norm.
    """

    norm: float
    full: float
    finding: str = ""
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class GradientSquares(NamedTuple):
    """The squared norm of the gradient of one parameter.

    Attributes:
        total: of the full gradient.
        first: for each axis that shards the parameter, of the shards at coordinate 0 of the axis.
        copies: for each axis of several ranks that does not shard it, how many ranks along it hold it.
        counts: how often the framework counts the gradient by its own rule, 1 if correctly.
    """

    total: float
    first: Mapping[str, float]
    copies: Mapping[str, int]
    counts: float = 1.0


class GradientNorms:
    """Measures the gradients whenever the framework computes their norm, until enough norms are compared.

    Attributes:
        left: the number of norms that are still to be compared; the same on all ranks.
    """

    def __init__(self, parameter_index: ParameterIndex, steps: float = inf) -> None:
        self._index, self.left = parameter_index, steps
        self._calls_left = 2 * steps  # of `compare`: a loop that reports no norm ends the comparison too
        self._selection = ParameterSelection(parameter_index, list(parameter_index.sites))
        self._measured: dict[str, list[float]] | None = None
        self._problem, self._precision = "", 0.0
        self._reported: tuple[float, float] | None = None  # the norm, and the scale of the gradients
        self._undo: Undo | None = parameter_index.adapter.storage.watch_gradient_norm(self)

    def stop(self) -> None:
        """Stop watching the framework."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    # -- NormListener ------------------------------------------------------------------------------------

    def norm_begins(
        self, without: Iterable[Any] = (), counts: Callable[[nn.Parameter], bool] | None = None
    ) -> None:
        """Measure this rank's part of all gradients."""
        skipped = {id(p) for p in without}
        self._reported, self._problem, self._precision = None, "", 0.0
        try:
            self._measured = dict(self._measure(skipped, counts))
        except FlexError as error:  # gradients that no rule reads; the norm is then not compared
            self._measured, self._problem = None, str(error)

    def norm_ends(self, norm: float | None, scale: float = 1.0) -> None:
        """Take down the norm; None where the framework skipped the update."""
        self._reported = None if norm is None or self._measured is None else (norm, scale)

    def compare(self, mesh: Mesh) -> list[ComparedNorm]:
        """The norm reported since the last call beside that of the full gradients. Collective over `mesh`.

        Every rank of the mesh makes the same calls. Returns, on all of them, one for each norm, as ranks may
        report different ones; none where no norm was reported, or a gradient cannot be read.
        """
        reported, self._reported = self._reported, None
        measured, self._measured = self._measured, None
        complete = not self._problem and not self._index.unknown
        answers = gather_distinct((reported, complete, self._precision), mesh)
        norms = dict.fromkeys(norm for norm, _, _ in answers if norm is not None)
        self._calls_left -= 1
        self.left = min(self.left - bool(norms), self._calls_left)
        if self.left <= 0:
            self.stop()
        if not norms or not all(whole for _, whole, _ in answers):
            return []
        squares = self._sum(measured or {}, mesh)
        rounding = max(ROUNDING, *(precision for *_, precision in answers))
        by_norm: dict[float, list[int]] = {norm * scale: [] for norm, scale in norms}
        if len(by_norm) > 1:
            for rank, (norm, scale) in gather_reports(reported, mesh):
                by_norm[norm * scale].append(rank)
        (_, scale), *_ = norms
        return [explain_norm(norm, squares, rounding, ranks, scale) for norm, ranks in by_norm.items()]

    def _measure(
        self, skipped: set[int], counts: Callable[[nn.Parameter], bool] | None
    ) -> Iterator[tuple[str, list[float]]]:
        """By name: the square of the entries that this rank measures, the same if the rank is the first along
        each axis, whether it holds the gradient, and whether the framework counts what it holds."""
        coords = self._index.mesh.coords
        for gradient in self._selection.local_gradients():
            parameter = gradient.site.parameter
            if parameter is None or id(parameter) in skipped:
                continue
            square = 0.0
            if (
                gradient.site.stage == self._index.stages(gradient.name)[0]
            ):  # not a copy, which the first stage measures
                square = self._square(gradient)
            first = (square * (coords.get(axis, 0) == 0) for axis in AXES)
            yield gradient.name, [square, *first, 1.0, float(counts is None or counts(parameter))]

    def _square(self, gradient: LocalParameterGradient) -> float:
        over = self._selection.copy_axes(gradient.site)
        over = over if gradient.part is None else self._selection.same_part_axes(over)
        local = gradient.local.detach()
        if local.is_floating_point():
            self._precision = max(self._precision, 4 * torch.finfo(local.dtype).eps)
        # The rows that pad a vocabulary have gradients too, which the update and the norm contain.
        padded = replace(gradient.layout, dims=tuple(replace(d, keep=None) for d in gradient.layout.dims))
        counted = select_counted_part(local, gradient.part, padded, self._index.mesh, over)
        return float(counted.double().square().sum())

    def _sum(self, measured: Mapping[str, Sequence[float]], mesh: Mesh) -> dict[str, GradientSquares]:
        names = list(self._index.sites)
        sums = torch.zeros(len(names), len(AXES) + 3, dtype=torch.float64)
        for row, name in enumerate(names):
            if name in measured:
                sums[row] = torch.tensor(measured[name], dtype=torch.float64)
        device = next((p.device for n in names for _, p in self._index.held(n)), torch.device("cpu"))
        sums = _sum_over(sums.to(device), mesh)
        replicas = self._index.mesh.sizes.get("dp", 1) if "dp" not in {a.name for a in mesh} else 1
        return {
            name: self._describe(name, [value * replicas for value in row])
            for name, row in zip(names, sums.tolist(), strict=True)
        }

    def _describe(self, name: str, row: Sequence[float]) -> GradientSquares:
        site, sizes = self._index.sites[name][0], self._index.mesh.sizes
        first = {a: value for a, value in zip(AXES, row[1:-2], strict=True) if a in site.layout.axes}
        first |= {axis: row[1 + AXES.index(axis)] for axis, _ in site.owner if axis in AXES}
        ours = ("etp", "edp") if "ep" in first or "etp" in site.layout.axes else ("tp", "cp", "dp")
        copies = {a: sizes.get(a, 1) for a in ours if a not in first and sizes.get(a, 1) > 1}
        stages = len(self._index.stages(name))
        copies |= {"pp": stages} if stages > 1 else {}
        # Data parallel copies are never in one norm: an optimizer has one of them, or parts of all.
        several = prod(copies.get(axis, 1) for axis in ("tp", "etp", "pp"))
        return GradientSquares(row[0], first, copies, row[-1] * several / row[-2] if row[-2] else 1.0)


def _sum_over(sums: Tensor, mesh: Mesh) -> Tensor:
    sum_along(sums, mesh, [axis.name for axis in mesh])
    return sums.cpu()


def explain_norm(
    norm: float,
    squares: Mapping[str, GradientSquares],
    rounding: float,
    ranks: Sequence[int] = (),
    scale: float = 1.0,
) -> ComparedNorm:
    """Compare a reported norm with the gradients.

    Args:
        norm: the reported norm, times `scale`.
        squares: the squared norms by parameter.
        rounding: the relative difference of squared norms that rounding explains.
        ranks: the ranks that reported the norm, if not all did.
        scale: the factor of the gradients, as a loss scale of fp16.
    """
    total = sum(s.total for s in squares.values())
    full = sqrt(total) / scale
    compared = ComparedNorm(norm / scale, full, ranks=tuple(ranks))
    room = rounding * max(total, norm * norm)
    miscounted = any(s.counts != 1 for s in squares.values())
    # Of gradients that are not finite there is no norm to compare.
    agree = not isfinite(total) or not isfinite(norm) or abs(norm * norm - total) <= room
    if agree and not miscounted:
        return compared
    where = f" on {format_ranks(ranks)}" if ranks else ""
    text = (
        f"the reported gradient norm is {norm / scale:.6g}{where}, and that of the full gradients {full:.6g}"
    )
    causes = _list_miscounted(squares) or [
        (names, cause)
        for names, change, cause in _list_causes(squares)
        if abs(change) > room and abs(total + change - norm * norm) <= room
    ]
    if not causes:
        return compared._replace(finding=text)
    joined = (" and " if miscounted else " or ").join(
        f"{list_some(names, MAX_NAMES)} {cause}" for names, cause in causes[:MAX_CAUSES]
    )
    return compared._replace(finding=f"{text}: {joined}", names=tuple(causes[0][0]))


def _list_miscounted(squares: Mapping[str, GradientSquares]) -> list[tuple[list[str], str]]:
    """The parameters that the framework's own rule counts wrongly, and how often it counts them."""
    by_count: dict[float, list[str]] = {}
    for name, square in squares.items():
        if square.counts != 1:
            by_count.setdefault(square.counts, []).append(name)
    return [
        (names, f"are counted {times:.3g} times" if times else "are not counted")
        for times, names in by_count.items()
    ]


def _list_causes(squares: Mapping[str, GradientSquares]) -> Iterator[tuple[list[str], float, str]]:
    """Names of parameters, the change of the squared norm if these are counted wrongly, and how they are."""
    groups: dict[str, list[str]] = {}
    for name in squares:
        groups.setdefault(NUMBER.sub("*", name), []).append(name)
    every = {"": list(squares)} if len(groups) > 1 else {}
    listed: set[tuple[tuple[str, ...], str]] = set()
    for names in (*every.values(), *groups.values()):
        for axis in AXES:
            for parameters, change, text in _list_causes_along(names, axis, squares):
                if parameters and (tuple(parameters), text) not in listed:
                    listed.add((tuple(parameters), text))
                    yield parameters, change, text
        if names is not every.get(""):
            yield names, -sum(squares[n].total for n in names), "are not counted"


def _list_causes_along(
    names: Sequence[str], axis: str, squares: Mapping[str, GradientSquares]
) -> Iterator[tuple[list[str], float, str]]:
    copied = [n for n in names if axis in squares[n].copies]
    if copied:
        count = squares[copied[0]].copies[axis]
        again = sum((squares[n].copies[axis] - 1) * squares[n].total for n in copied)
        yield copied, again, f"are counted {count} times, once on each rank along {axis}"
    sharded = [n for n in names if axis in squares[n].first]
    lost = sum(squares[n].first[axis] - squares[n].total for n in sharded)
    yield sharded, lost, f"are sharded over {axis}, and counted on its first rank only"
