"""Statistics at work on this rank: what is added up in a step, and who gets the sums."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives import BackgroundReduction, PendingReduction, Route
from megatron_flex.errors import FlexError, FlexWarning, HookError
from megatron_flex.layout import Layout, name_batch_first
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.parameter_selection import CALL_HAS_NO_GRADIENTS, ParameterSelection
from megatron_flex.runtime.measuring.counting import select_counted, select_counted_part
from megatron_flex.runtime.sinking import make_sink_hooks
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.moments import COUNT, MomentSums
from megatron_flex.statistics.sink import Sink
from megatron_flex.statistics.table import HEAD_WIDTH, HEAD_ITERATION, HEAD_MICROBATCHES, HEAD_RANKS, MomentEntry, MomentTable

MAX_NAMES = 8  # names in one warning


class StatisticsSelection(NamedTuple):
    """What statistics are of.

    Attributes:
        values: sites, in model order.
        gradients: sites, in model order, of whose gradients they are.
        exact: the names of sites that were named as they are, and not by a pattern.
        parameters: of whose gradients they are.
    """

    values: tuple[Site, ...]
    gradients: tuple[Site, ...]
    exact: frozenset[str]
    parameters: ParameterSelection | None

    def entries(self) -> list[MomentEntry]:
        """All that is measured, in order."""
        back = {s.name for s in self.gradients}
        out = []
        for site in self.values:
            out.append(MomentEntry(site.name, "value", site.stage))
            if site.name in back:
                out.append(MomentEntry(site.name + GRADIENT_SUFFIX, "gradient", site.stage))
        if self.parameters is not None:
            of = self.parameters.survey
            out += [MomentEntry(n + GRADIENT_SUFFIX, "parameter_gradient", of.stages(n)[0]) for n in self.parameters.names]
        return out


class StatisticsSink:
    """Statistics at work on this rank.

    Attributes:
        statistics: the settings.
        hooks: those that stand for it.
        active: whether this step is measured.
        first: whether no step has been measured to its end.
    """

    def __init__(
        self, statistics: Statistics, wanted: StatisticsSelection, mesh: Mesh, clock: Clock, adding: BackgroundReduction, sink: Sink
    ) -> None:
        self.statistics, self.wanted, self.mesh, self.clock = statistics, wanted, mesh, clock
        self.active, self.first = False, True
        words = f"statistics in {statistics.path}"
        self.hooks = make_sink_hooks(self, words, wanted.values, wanted.gradients, statistics.tags)
        self._adding, self._sink = adding, sink
        entries = wanted.entries()
        inside = [a for a in mesh if a.name != "pp"]
        ranks, self._rank = 1, 0
        for axis in inside:
            ranks, self._rank = ranks * axis.size, self._rank * axis.size + axis.coord
        self._table = MomentTable(tuple(entries), ranks, statistics.histogram)
        self._place = {(e.kind, e.name): n for n, e in enumerate(entries)}
        self._sums: dict[int, MomentSums] = {}
        self._unknown: set[int] = set()
        self._posted: tuple[int, PendingReduction] | None = None
        self._step, self._number = -1, -1
        self._passed = torch.zeros(len(entries), dtype=torch.bool)
        self._said: set[str] = set()

    @property
    def sends(self) -> list[int]:
        """The bytes of each of its all-reduces in a step that is measured."""
        return self._table.sends

    # -- steps -----------------------------------------------------------------------------------------

    def begins(self, mesh: Mesh, called: bool) -> bool:
        """A step starts that the selection of groups takes; returns whether it is measured.

        Args:
            mesh: of the ranks that are in it.
            called: whether it is a call of the model by itself.

        Raises:
            FlexError: on all ranks: gradients of parameters are wanted of such a call.
        """
        number = self.clock.iteration
        if not torch.is_grad_enabled() or number % self.statistics.every:
            return False
        if called and mesh["dp"].size != self.mesh["dp"].size:
            self._say(
                "called",
                "calls of the model by themselves are not measured where there are several data parallel "
                "ranks, which need not call it equally often; make them in `with flex.step():`",
            )
            return False
        if called and self.wanted.parameters is not None:
            raise FlexError(CALL_HAS_NO_GRADIENTS)
        self.active, self._step, self._number = True, self.clock.step, number
        self._sums.clear()
        return True

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still come once the model was called."""
        return self.active and bool(self.wanted.gradients)

    def end_overdue_step(self) -> None:
        """Another step begins, and the backward pass that was waited for has not come."""
        if self.active:
            self._say(
                "late",
                f"the call of iteration {self._number} is measured without gradients: another one began "
                "before its backward pass; take such calls together in `with flex.step():`",
            )
            self.ends(False)

    def ends(self, failed: bool) -> None:
        """A step is over, measured or not. All ranks of the mesh call it alike, unless theirs `failed`.

        Raises:
            FlexError: on all ranks: gradients of parameters cannot be had.
            HookError: on all ranks: they were not in the same step.
        """
        active, self.active = self.active, False
        if failed:
            self._sums.clear()
            return
        before, self._posted = self._posted, None
        if active:
            if self.wanted.parameters is not None:
                self._measure(self.wanted.parameters)
            self._posted = self._number, self._post()
            self.first = False
        if before is not None:
            self._deliver(*before)

    def _measure(self, parameters: ParameterSelection) -> None:
        for found in parameters.found():
            if found.site.stage != parameters.survey.stages(found.name)[0]:
                continue  # a copy of what the first stage counts
            over = parameters.over(found.site)
            if found.part is not None:
                over = parameters.apart(over)
            place = self._place["parameter_gradient", found.name + GRADIENT_SUFFIX]
            try:
                mine = select_counted_part(found.local.detach(), found.part, found.layout, self.mesh, over)
            except FlexError as error:
                self._unknown.add(place)
                self._say(found.name, f"the gradient of {found.name} is not measured: {error}")
                continue
            self._add(place, mine, 1.0)

    def _add(self, place: int, values: Tensor, factor: float) -> None:
        if place not in self._sums:
            self._sums[place] = MomentSums(values.device, self.statistics.histogram)
        self._sums[place].add(values, factor)

    def _post(self) -> PendingReduction:
        counts = self.mesh.is_first(a.name for a in self.mesh if a.name != "dp")
        head = [0.0] * HEAD_WIDTH
        head[HEAD_RANKS], head[HEAD_ITERATION] = 1.0, float(self._number)
        head[HEAD_MICROBATCHES] = float(self.clock.microbatches if counts else 0)
        vector = self._table.pack(self._sums, self._unknown, head, self._rank)
        maxima = self._table.maxima(self._sums, vector)
        self._sums.clear()
        return self._adding.post(vector, maxima)

    def _deliver(self, number: int, posted: PendingReduction) -> None:
        vector, maxima = posted.wait()
        ranks = len(self._adding.axis.ranks)
        if vector[HEAD_RANKS] != ranks or vector[HEAD_ITERATION] != ranks * number:
            raise HookError(
                f"ranks were in different iterations when that of {number} was measured, one of them "
                "perhaps after an error that it went on from; let all ranks skip a step or none"
            )
        rows = vector[HEAD_WIDTH:].view(-1, self._table.width)
        self._passed |= rows[:, COUNT] > 0
        if self._sink.wanted:
            self._sink.write(number, self._table.measured(number, vector, maxima))

    def close(self, failed: bool) -> None:
        """Wait for what was posted, unless something `failed` and it is not there."""
        if self.active:
            self.ends(failed)
        before, self._posted = self._posted, None
        if before is not None and (not failed or before[1].there()):
            self._deliver(*before)
        self._sink.close()
        if not failed and not self.first:
            self._tell()

    def _tell(self) -> None:
        """Say what never passed."""
        absent = [e.name for e, p in zip(self._table.entries, self._passed.tolist(), strict=True) if not p]
        absent = [n for n in absent if n not in self._said]
        if absent and self.mesh.is_first(a.name for a in self.mesh):
            more = f" and {len(absent) - MAX_NAMES} more" if len(absent) > MAX_NAMES else ""
            words = ", ".join(absent[:MAX_NAMES]) + more
            self._say("quiet", f"in the steps that were measured nothing passed at {words}")

    # -- on the way of a tensor ------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Count this rank's part of a tensor; see `Taker.take`."""
        name = key.site.removesuffix(GRADIENT_SUFFIX)
        place = self._place["gradient" if key.site.endswith(GRADIENT_SUFFIX) else "value", key.site]
        if not self.active or key.step != self._step:
            self._say(
                "late",
                f"gradients of step {key.step} came when it was over, and are not measured; take calls whose "
                "backward passes come later, or twice, together in `with flex.step():`",
            )
            return ""
        over = None
        if route is not None:
            layout, over = route.layout, [self.mesh["etp"]]
            if not route.here:
                return ""
        elif not any(d.name for d in layout.dims):
            layout = name_batch_first(layout)
        try:
            self._add(place, select_counted(local.detach(), layout, self.mesh, over), factor)
        except FlexError as error:  # other ranks go on, so this one does
            self._unknown.add(place)
            return "" if self.omits_site(name, str(error)) else str(error)
        return ""

    def omits_site(self, name: str, why: str) -> bool:
        """Whether a place that cannot be measured is left out, with a warning; else it is an error.

        It is one in the first step, at whose end all ranks ask each other, where a person named the place.
        """
        if self.first and name in self.wanted.exact:
            return False
        self._say(name, f"{name} is left out of the statistics: {why}")
        return True

    def _say(self, what: str, text: str) -> None:
        """Warn, once."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, FlexWarning, stacklevel=2)
