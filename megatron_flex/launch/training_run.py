"""What runs beside a training: edits, dumps and statistics of a model, from its first step to its last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_flex.launch.agreeing import job_mesh, run_or_raise_on_all
from megatron_flex.launch.resolving import DUMP_TAG, STATISTICS_TAG, ResolvedSettings, resolve_settings
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.hook_control import Control
from megatron_flex.model import FlexModel

TAGS_OFF_IN_EVALUATION = {DUMP_TAG, STATISTICS_TAG}  # the groups that evaluations do not count for


class Running:
    """What settings ask for, beside one training. Every rank makes one and calls it alike.

    Attributes:
        settings: what is wanted.
        flex: the model with its hooks; None before `attach` and after `finish` or `abort`.
        found: what the settings mean, once that is known.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.flex: FlexModel | None = None
        self.found: ResolvedSettings | None = None
        self._control: Control | None = None
        self._trained = False
        self._before_evaluation: Any = None

    def prepare(self) -> ResolvedSettings:
        """Find what the settings name, before there is a model. Collective over the job.

        Raises:
            FlexError: on all ranks: something is not there, or cannot be.
        """
        self.found = run_or_raise_on_all(job_mesh(), lambda: resolve_settings(self.settings))
        return self.found

    def attach(self, chunks: Any, write: bool = True) -> FlexModel:
        """Put hooks on a model that is built and has its weights. Collective over the job.

        Args:
            chunks: the model, or the list of its virtual pipeline chunks.
            write: whether dumps and statistics are opened, too.

        Raises:
            FlexError: on all ranks: what the settings ask for cannot be; nothing stays in the model then.
        """
        self.abort()
        found = self.found or self.prepare()
        self.found = None  # edits may keep what they saw: a model that is built anew gets new ones
        flex = FlexModel(chunks)
        try:
            run_or_raise_on_all(flex.session.mesh, lambda: _add_edit_hooks(flex, found))
            if write:
                for dump in found.dumps:
                    flex.register_dump(dump)
                for statistics in found.statistics:
                    flex.register_statistics(statistics)
                if self.settings.verify:
                    flex.verify(self.settings.verify)
                if self.settings.control is not None:
                    self._control = Control(flex, self.settings.control)
        except BaseException:
            flex.session.close(failed=True)
            raise
        self.flex, self._trained = flex, False
        return flex

    def step_begins(self, iteration: int | None = None) -> None:
        """A training step begins; `iteration` as the loop counts, from 0, None if it does not."""
        self._trained = True
        if self.flex is not None:
            self.flex.session.clock.told = iteration
        if self._control is not None:
            self._control.step_begins(iteration)

    def step_ends(self) -> None:
        """It is over: its backward passes and the optimizer's update are done."""

    def evaluation(self, on: bool) -> None:
        """Evaluation begins, or is over: meanwhile edits count, and nothing is dumped or measured.

        In a run that only evaluates all of it counts.
        """
        if self.flex is None or not self._trained:
            return
        registry = self.flex.session.registry
        if on:
            self._before_evaluation = before = registry.selection
            if not before.complement:
                registry.selection = replace(before, without=before.without | TAGS_OFF_IN_EVALUATION)
        elif self._before_evaluation is not None:
            registry.selection, self._before_evaluation = self._before_evaluation, None

    def finish(self) -> None:
        """Take everything out, and wait until all is written. Collective; nothing if nothing stands.

        Raises:
            FlexError: on all ranks: a hook never fired, or something could not be written. The model is
                restored even so.
        """
        flex, self.flex = self._close_control(), None
        if flex is not None:
            flex.restore()

    def abort(self) -> None:
        """Take everything out of a training that failed, perhaps on this rank only: nobody is waited for.

        What was dumped whole stays.
        """
        flex, self.flex = self._close_control(), None
        if flex is not None:
            flex.session.close(failed=True)

    def _close_control(self) -> FlexModel | None:
        if self._control is not None:
            self._control.close()
            self._control = None
        return self.flex


def _add_edit_hooks(flex: FlexModel, found: ResolvedSettings) -> None:
    for hook in found.edits:
        flex.session.add(hook)
