"""The statistics of a session on this rank: the entries that this rank counts, the sums of a step, and the
header of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import (
    BackgroundReduction,
    PendingReduction,
    Route,
    gather_reports,
)
from megatron_flex.dump import layout_to_json, list_replica_axes
from megatron_flex.errors import FlexError, HookError, LayoutError, describe_error
from megatron_flex.layout import Dim, Layout, count_parts, is_partial, name_batch_first, spans
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.debug.error_origin import format_user_line
from megatron_flex.runtime.dump_sink import collect_versions
from megatron_flex.runtime.edit_failures import StepFailure, raise_on_all_ranks
from megatron_flex.runtime.hooks import explain_unmeasurable, make_sink_hooks
from megatron_flex.runtime.parameter_selection import CALL_HAS_NO_GRADIENTS, ParameterSelection
from megatron_flex.runtime.sink_cycle import STATISTICS_PURPOSE, SinkCycle, StepStart
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.statistics import MeasuredSite, Statistics, StatisticsHeader
from megatron_flex.statistics.moments import (
    COUNT,
    FAILED,
    HEAD_ITERATION,
    HEAD_MICROBATCHES,
    HEAD_RANKS,
    HEAD_WIDTH,
    MomentEntry,
    MomentSums,
    MomentTable,
)
from megatron_flex.statistics.statistics_records import Sink

PARTIAL_SUM = "each rank holds a partial sum there, {}; name a site after the reduction"


def select_counted(local: Tensor, layout: Layout, mesh: Mesh, over: Sequence[Axis] | None = None) -> Tensor:
    """The entries of a local tensor that this rank counts, in any order of dims.

    Ranks that hold the same entries divide them among each other. Nothing is communicated.

    Args:
        local: the shard.
        layout: the layout of the shard.
        mesh: the run's axes.
        over: the axes along which ranks may hold the same entries; None for those of a site.

    Raises:
        LayoutError: the tensor does not fit the layout, or is a partial sum.
    """
    _check_countable(local, layout, mesh)
    for index, dim in enumerate(layout.dims):
        unpadded = _find_unpadded(dim, local.shape[index], mesh)
        if unpadded is not None:
            local = torch.cat([local.narrow(index, *k) for k in unpadded], index)
    divisor, number = divide_copies(layout, mesh, over)
    if divisor == 1 or not local.ndim:
        return local if number == 0 else local.new_empty(0)
    lengths = list(local.shape)
    at = next((d for d, n in enumerate(lengths) if n and n % divisor == 0), lengths.index(max(lengths)))
    first, last = (lengths[at] * n // divisor for n in (number, number + 1))
    return local.narrow(at, first, last - first)


def select_counted_part(
    local: Tensor, part: tuple[int, int] | None, layout: Layout, mesh: Mesh, over: Sequence[Axis]
) -> Tensor:
    """As `select_counted`, for a tensor of which this rank holds only the flat range `part`. Arguments as for
    `select_counted`.
    """
    if part is None:
        return select_counted(local, layout, mesh, over)
    _check_countable(local, layout, mesh)
    real: Tensor | None = None  # only the entries that are not padding in any dim
    for index, dim in enumerate(layout.dims):
        unpadded = _find_unpadded(dim, local.shape[index], mesh)
        if unpadded is not None:
            is_real = torch.zeros(local.shape[index], dtype=torch.bool, device=local.device)
            for start, length in unpadded:
                is_real[start : start + length] = True
            is_real = is_real.view([-1 if d == index else 1 for d in range(local.ndim)])
            real = is_real if real is None else real & is_real
    flat = local.reshape(-1)[slice(*part)]
    flat = flat if real is None else flat[real.expand(local.shape).reshape(-1)[slice(*part)]]
    divisor, number = divide_copies(layout, mesh, over)
    return flat[len(flat) * number // divisor : len(flat) * (number + 1) // divisor]


def divide_copies(layout: Layout, mesh: Mesh, over: Sequence[Axis] | None = None) -> tuple[int, int]:
    """The number of ranks that divide the entries they all hold, and this rank's index among them."""
    divisor, number = 1, 0
    for _, size, coord in list_replica_axes(mesh, layout, over=over):
        divisor, number = divisor * size, number * size + coord
    return divisor, number


def _check_countable(local: Tensor, layout: Layout, mesh: Mesh) -> None:
    if is_partial(layout, mesh.sizes):
        raise LayoutError(PARTIAL_SUM.format(layout.describe(mesh.sizes)))
    if local.is_complex():
        raise LayoutError(f"it is of {local.dtype}, which has no order")
    if local.ndim != len(layout.dims):
        raise LayoutError(f"a tensor of shape {tuple(local.shape)} does not fit {layout.describe()}")


def _find_unpadded(dim: Dim, length: int, mesh: Mesh) -> list[tuple[int, int]] | None:
    """The ranges of entries that are not padding, as starts and lengths; None if all entries are real."""
    if dim.keep is None and (dim.uneven or not dim.sequences):
        return None
    at = tuple((c.axis, mesh[c.axis].size, mesh[c.axis].coord) for c in dim.cuts)
    return _list_unpadded(dim, length, at)


@lru_cache(256)
def _list_unpadded(
    dim: Dim, length: int, at: tuple[tuple[str, int, int], ...]
) -> list[tuple[int, int]] | None:
    """The parts of a dim without padding, on the rank with these sizes and coordinates of the axes."""
    sizes, coords = {a: n for a, n, _ in at}, {a: c for a, _, c in at}
    full = length * count_parts(dim, sizes)
    real = dim.sequences or ([(0, dim.keep)] if dim.keep is not None and dim.keep < full else ())
    if not real or sum(stop - start for start, stop in real) == full:
        return None
    out, offset, ends = [], 0, [last for _, last in real]
    for start, stop in spans(dim, full, coords, sizes):
        for first, last in real[bisect_right(ends, start) :]:
            if first >= stop:
                break
            low, high = max(start, first), min(stop, last)
            out.append((offset + low - start, high - low))
        offset += stop - start
    return out or [(0, 0)]


class StatisticsSelection(NamedTuple):
    """The sites and parameters that statistics measure.

    Attributes:
        values: the sites to measure, in model order.
        gradients: the sites whose gradients are measured, in model order.
        exact: the names that the user gave literally, and not by a pattern.
        parameters: the parameters whose gradients are measured.
    """

    values: tuple[Site, ...]
    gradients: tuple[Site, ...]
    exact: frozenset[str]
    parameters: ParameterSelection | None

    def digest(self) -> str:
        """A text of a few characters, which differs where other tensors are measured."""
        names = " ".join(e.name for e in self.entries())
        return sha256(names.encode()).hexdigest()[:16]

    def entries(self) -> list[MomentEntry]:
        """All measured entries, in order."""
        back = {s.name for s in self.gradients}
        out = []
        for site in self.values:
            out.append(MomentEntry(site.name, "value", site.stage))
            if site.name in back:
                out.append(MomentEntry(site.name + GRADIENT_SUFFIX, "gradient", site.stage))
        if self.parameters is not None:
            of = self.parameters.parameter_index
            out += [
                MomentEntry(n + GRADIENT_SUFFIX, "parameter_gradient", of.stages(n)[0])
                for n in self.parameters.names
            ]
        return out


class StatisticsSink:
    """Active statistics on this rank.

    Attributes:
        settings: the statistics.
        hooks: the hooks that feed the sink.
        cycle: the steps that are measured.
    """

    def __init__(
        self,
        statistics: Statistics,
        selection: StatisticsSelection,
        mesh: Mesh,
        clock: Clock,
        adding: BackgroundReduction,
        sink: Sink,
    ) -> None:
        self.settings, self.selection, self.mesh, self.clock = statistics, selection, mesh, clock
        self.cycle = SinkCycle(STATISTICS_PURPOSE, mesh, clock, selection.exact)
        words = f"statistics in {statistics.path}"
        self.hooks = make_sink_hooks(self, words, selection.values, selection.gradients, statistics.groups)
        self._adding, self._sink = adding, sink
        entries = selection.entries()
        inside = [a for a in mesh if a.name != "pp"]
        ranks, self._rank = 1, 0
        for axis in inside:
            ranks, self._rank = ranks * axis.size, self._rank * axis.size + axis.coord
        self._table = MomentTable(tuple(entries), ranks, statistics.histogram)
        self._place = {(e.kind, e.name): n for n, e in enumerate(entries)}
        self._sums: dict[int, MomentSums] = {}
        self._unknown: set[int] = set()
        self._posted: tuple[int, PendingReduction] | None = None
        self._failure: StepFailure | None = None  # an error of this rank, sent with its sums
        self._spoiled: StepFailure | None = None  # why sums of this step lack a tensor
        self._passed = torch.zeros(len(entries), dtype=torch.bool)

    @property
    def sends(self) -> list[int]:
        """The bytes of each all-reduce in a measured step."""
        return self._table.sends

    # -- steps -----------------------------------------------------------------------------------------

    def due(self, start: StepStart) -> bool:
        """Begin a step that the selection of groups includes; return whether the step is measured.

        Raises:
            FlexError: on all ranks: the statistics ask for gradients of parameters in a call outside a
                schedule.
        """
        if not torch.is_grad_enabled() or self.clock.iteration % self.settings.every:
            return False
        if start.called and start.mesh["dp"].size != self.mesh["dp"].size:
            self.cycle.warn_once(
                "called",
                "calls outside a step are not measured with several data parallel ranks, which may call the "
                "model a different number of times; make the calls in `with flex.step():`",
            )
            return False
        if start.called and self.selection.parameters is not None:
            raise FlexError(CALL_HAS_NO_GRADIENTS)
        self.cycle.begin()
        self._sums.clear()
        return True

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still arrive after the call of the model."""
        return self.cycle.active and bool(self.selection.gradients)

    def flush(self, failed: bool, mesh: Mesh) -> None:
        """End a step, measured or not: its sums are on their way, and those of the step before are written.

        All ranks of the mesh make the same call, unless the step `failed` there.

        Raises:
            FlexError: on all ranks: gradients of parameters are not available.
            HookError: on all ranks: the ranks were in different steps, or one could not measure the last
                step.
        """
        active, self.cycle.active = self.cycle.active, False
        if failed:
            self._sums.clear()
            self._spoiled = None
            return
        before, self._posted = self._posted, None
        failure, self._failure = self._failure, None
        if active:
            self._posted = self.cycle.iteration, self._measured()
            self.cycle.complete()
        if before is not None:
            self._deliver(*before, failure)

    def fail(self, failure: StepFailure) -> None:
        """The sums of the step lack a tensor: an error flag goes with them."""
        self._spoiled = failure

    def _measured(self) -> PendingReduction:
        """Start the reduction of this rank's sums; after an error send the error flag, as the others still
        reduce.
        """
        spoiled, self._spoiled = self._spoiled, None
        try:
            if spoiled is not None:
                raise RuntimeError(spoiled.message) from spoiled.error
            if self.selection.parameters is not None:
                self._measure(self.selection.parameters)
            vector, maxima = self._packed(0.0)
        except FlexError:  # raised on all ranks
            raise
        except Exception as error:  # sent with the sums, and raised on all ranks
            words = f"statistics in {self.settings.path} could not measure iteration {self.cycle.iteration}"
            message = f"{words}: {describe_error(error)} in {format_user_line(error)}"
            self._failure = StepFailure(message, error)
            self._sums.clear()
            vector, maxima = self._packed(1.0)
        self._sums.clear()
        return self._adding.post(vector, maxima)

    def _measure(self, parameters: ParameterSelection) -> None:
        for parameter in parameters.local_gradients():
            if parameter.site.stage != parameters.parameter_index.stages(parameter.name)[0]:
                continue  # a copy that the first stage counts
            over = parameters.copy_axes(parameter.site)
            if parameter.part is not None:
                over = parameters.same_part_axes(over)
            row = self._place["parameter_gradient", parameter.name + GRADIENT_SUFFIX]
            try:
                counted = select_counted_part(
                    parameter.local.detach(), parameter.part, parameter.layout, self.mesh, over
                )
            except FlexError as error:
                self._unknown.add(row)
                self.cycle.warn_once(
                    parameter.name, f"the gradient of {parameter.name} is not measured: {error}"
                )
                continue
            self._add(row, counted, 1.0)

    def _add(self, row: int, values: Tensor, factor: float) -> None:
        if row not in self._sums:
            self._sums[row] = MomentSums(values.device, self.settings.histogram)
        self._sums[row].add(values, factor)

    def _packed(self, failed: float) -> tuple[Tensor, Tensor | None]:
        counts = self.mesh.is_first(a.name for a in self.mesh if a.name != "dp")
        head = [0.0] * HEAD_WIDTH
        head[HEAD_RANKS], head[HEAD_ITERATION], head[FAILED] = 1.0, float(self.cycle.iteration), failed
        head[HEAD_MICROBATCHES] = float(self.clock.microbatches if counts else 0)
        vector = self._table.pack(self._sums, self._unknown, head, self._rank)
        return vector, self._table.maxima(self._sums, vector)

    def _deliver(self, number: int, posted: PendingReduction, failure: StepFailure | None) -> None:
        vector, maxima = posted.wait()
        ranks = len(self._adding.axis.ranks)
        if vector[HEAD_RANKS] != ranks or vector[HEAD_ITERATION] != ranks * number:
            raise HookError(
                f"ranks were in different iterations when {number} was measured, perhaps because one of them "
                "skipped a step after an error; let all ranks skip a step, or none"
            )
        if vector[FAILED]:
            raise_on_all_ranks(failure, self.mesh)
        rows = vector[HEAD_WIDTH:].view(-1, self._table.width)
        self._passed |= rows[:, COUNT] > 0
        if self._sink.reads_statistics:
            self._sink.write(number, self._table.measured(number, vector, maxima))

    def deliver_last(self) -> None:
        """Write the last measured step, without waiting for the next one to end. Collective, between steps.

        Raises:
            HookError: as for `flush`.
        """
        before, self._posted = self._posted, None
        failure, self._failure = self._failure, None
        if before is not None:
            self._deliver(*before, failure)

    def close(self, failed: bool) -> None:
        """Wait for reductions in progress, unless the session `failed` and they may never end."""
        if self.cycle.active:
            self.flush(failed, self.mesh)
        before, self._posted = self._posted, None
        try:
            if before is not None and not failed:
                self._deliver(*before, self._failure)
            elif before is not None and before[1].there() and not before[1].wait()[0][FAILED]:
                self._deliver(*before, None)
        finally:
            self._sink.close()
        if not failed and self.mesh.is_first(a.name for a in self.mesh):
            measured = zip(self._table.entries, self._passed.tolist(), strict=True)
            self.cycle.warn_of_absent(e.name for e, passed in measured if not passed)

    # -- recording -------------------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Count this rank's shard of a tensor; see `TensorSink.take`."""
        name = key.site.removesuffix(GRADIENT_SUFFIX)
        row = self._place["gradient" if key.site.endswith(GRADIENT_SUFFIX) else "value", key.site]
        if not self.cycle.belongs(key):
            return ""
        if why := explain_unmeasurable(local):
            self._unknown.add(row)
            self.cycle.warn_omitted(name, why)
            return ""
        over = None
        if route is not None:
            layout, over = route.layout, [self.mesh["etp"]]
            if not route.has_rows:
                return ""
        elif not any(d.name for d in layout.dims):
            layout = name_batch_first(layout)
        try:
            self._add(row, select_counted(local.detach(), layout, self.mesh, over), factor)
        except Exception as error:  # other ranks continue, so this rank does too
            self._unknown.add(row)
            return "" if self.cycle.omits_site(name, describe_error(error)) else describe_error(error)
        return ""

    @property
    def needs_dim_names(self) -> bool:
        """Nothing depends on them: statistics are of all entries; see `TensorSink.needs_dim_names`."""
        return False


def open_on_all_ranks(opened: Callable[[], Sink], mesh: Mesh) -> Sink:
    """Open what receives the numbers on this rank. Collective: an error on one rank is raised on all.

    Raises:
        FlexError: on all ranks: the folder cannot be written on one of them.
    """
    sink, why = None, ""
    try:
        sink = opened()
    except FlexError as error:
        why = str(error)
    problems = [text for _, text in gather_reports(why or None, mesh)]
    if problems or sink is None:
        if sink is not None:
            sink.close()
        raise FlexError("; ".join(dict.fromkeys(problems)))
    return sink


def make_header(
    statistics: Statistics,
    framework: str,
    mesh: Mesh,
    sites: Sequence[Site],
    parameters: Sequence[ParameterSite] = (),
    model: Mapping[str, Any] | None = None,
) -> StatisticsHeader:
    """Make the header of a run, with the fields that every rank knows.

    Args:
        statistics: the settings.
        framework: the adapter's name.
        mesh: the axes of the run.
        sites: the measured sites, in model order.
        parameters: the parameters whose gradients are measured.
        model: what a comparison needs to know of the model: `dtype`, `hidden_size`, `num_layers`, `layers`.
    """
    measured: list[Site | ParameterSite] = [*sites, *parameters]
    return StatisticsHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=collect_versions(),
        framework=framework,
        axes=dict(mesh.sizes),
        sites=tuple(MeasuredSite(p.name, layout_to_json(p.layout), tuple(p.shape)) for p in measured),
        settings={**statistics.to_json(), "model": dict(model or {})},
    )
