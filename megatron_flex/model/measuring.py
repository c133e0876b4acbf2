"""Statistics as FlexModel takes them."""

from __future__ import annotations

from megatron_flex.adapters import training_writers
from megatron_flex.errors import HookError
from megatron_flex.layout import is_partial
from megatron_flex.model.choosing import SinkPurpose, select_sink_sites, warn_left_out
from megatron_flex.runtime import Session
from megatron_flex.runtime.dumps import select_parameters
from megatron_flex.runtime.measuring import StatisticsSelection, make_header
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.statistics import Statistics, open_writers
from megatron_flex.statistics.sink import Sink

STATISTICS_PURPOSE = SinkPurpose("the statistics", "measured")


class Measures:
    """What FlexModel does with statistics."""

    session: Session

    def register_statistics(self, statistics: Statistics, sink: Sink | None = None) -> None:
        """Measure tensors from the next training step on. Every rank calls it alike.

        What passes is measured as it is before edits at the same place; steps that are run without gradients
        (evaluation) are not measured. Of places that a pattern matches, those are left out, with a warning,
        that the configuration hides, or at which ranks hold summands, of which no rank can measure the sum.

        Args:
            statistics: the settings.
            sink: where the numbers go instead of files and the framework's writers; they arrive on every
                rank, when the step behind theirs ends.

        Raises:
            SiteError: a pattern matches nothing.
            HookError: a name, or all that a pattern matches, cannot be measured; on all ranks, if they have
                different statistics.
            FlexError: on all ranks: they cannot be written there.
        """
        session = self.session
        session.check_open()
        values, exact = select_sink_sites(session, statistics.sites, STATISTICS_PURPOSE, self._why_unmeasurable)
        gradients = self._gradients(values, exact) if statistics.gradients else ()
        parameters = select_parameters(session.survey, statistics.parameters, STATISTICS_PURPOSE.what)
        wanted = StatisticsSelection(values, gradients, exact, parameters)

        def opened() -> Sink:
            return self._writers(statistics, wanted) if sink is None else sink

        for hook in session.sinks.measuring.add(statistics, wanted, opened).hooks:
            session.add(hook)

    def remove_statistics(self, statistics: Statistics) -> None:
        """Take statistics out, once all are written. Every rank calls it alike, between steps.

        Raises:
            FlexError: they are not registered.
        """
        for hook in self.session.sinks.measuring.remove(statistics).hooks:
            self.session.remove(hook)

    def _writers(self, statistics: Statistics, wanted: StatisticsSelection) -> Sink:
        """The files, on the first rank, and the framework's writers, where they are."""
        session, found = self.session, wanted.parameters
        parameters = [] if found is None else [found.survey.sites[n][0] for n in found.names]
        header = make_header(statistics, session.adapter.name, session.mesh, wanted.values, parameters)
        first = session.mesh.is_first(a.name for a in session.mesh)
        return open_writers(statistics, header, first, training_writers)

    def _why_unmeasurable(self, site: Site) -> str:
        if not site.inferred and is_partial(site.layout, self.session.mesh.sizes):
            sums = ", ".join(site.layout.partial)
            return f"ranks along {sums} hold summands, and no rank their sum; measure :output instead"
        return ""

    def _gradients(self, values: tuple[Site, ...], exact: frozenset[str]) -> tuple[Site, ...]:
        """The sites whose gradients can be measured."""
        out, barred = [], {}
        for site in values:
            turned = site.layout.gradient()
            if site.fixed:
                continue
            if not site.inferred and is_partial(turned, self.session.mesh.sizes):
                why = f"ranks hold summands of it ({turned.describe(self.session.mesh.sizes)})"
                if site.name in exact:
                    raise HookError(f"the gradient at {site.name} cannot be measured: {why}; measure another")
                barred[site.name + GRADIENT_SUFFIX] = why
            else:
                out.append(site)
        warn_left_out(barred, STATISTICS_PURPOSE)
        return tuple(out)
