"""The edits, dumps and statistics of one training run, from its first step to its last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_flex.collectives import run_or_raise_on_all
from megatron_flex.errors import FlexError
from megatron_flex.launch.gradient_norm_file import NormFile
from megatron_flex.launch.hook_control import Control
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.rank_errors import job_mesh
from megatron_flex.launch.run_report import RunReport, describe_end, describe_start
from megatron_flex.launch.settings_resolver import (
    DUMP_GROUP,
    STATISTICS_GROUP,
    ResolvedSettings,
    resolve_settings,
)
from megatron_flex.launch.weights_digest_file import DigestFile
from megatron_flex.model import FlexModel
from megatron_flex.wording import count_words

GROUPS_OFF_IN_EVALUATION = {DUMP_GROUP, STATISTICS_GROUP}  # groups that are inactive during evaluation


class TrainingRun:
    """Applies settings to one training run. Every rank creates one and makes the same calls.

    Args:
        settings: the settings.
        report: the file of the report, if the settings name none; None for no report.

    Attributes:
        settings: the settings.
        flex: the model with its hooks; None before `attach` and after `finish` or `abort`.
        resolved: the resolved settings; None until they are resolved.
        report: what the run reports.

    Examples:
        >>> from megatron_flex.launch import Settings, TrainingRun
        >>> from megatron_flex.launch.launch_settings import DumpSettings
        >>> dump = DumpSettings(path="dumps/new")
        >>> running = TrainingRun(Settings(sites=("decoder.layers.*",), dumps=(dump,)))
        >>> flex = running.attach(chunks)
        >>> for iteration in range(2):
        ...     running.step_begins(iteration)
        ...     train_step(chunks)
        ...     running.step_ends()
        >>> running.finish()
        >>> open_dump("dumps/new").iterations
        [0, 1]
    """

    def __init__(self, settings: Settings, report: Path | None = None) -> None:
        self.settings = settings
        self.report = RunReport(settings.report or report)
        self.flex: FlexModel | None = None
        self.resolved: ResolvedSettings | None = None
        self._control: Control | None = None
        self._norms: NormFile | None = None
        self._digest: DigestFile | None = None
        self._trained = False
        self._unverified = 0  # steps that are still to be verified
        self._before_evaluation: Any = None

    def prepare(self) -> ResolvedSettings:
        """Resolve the settings, before the model exists. Collective over the job.

        Returns:
            The dumps, statistics and edits that the settings define.

        Raises:
            FlexError: on all ranks: the settings name a missing object, or are invalid.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> from megatron_flex.launch.launch_settings import DumpSettings
            >>> dump = DumpSettings(path="dumps/new")
            >>> running = TrainingRun(Settings(sites=("decoder.layers.*",), dumps=(dump,)))
            >>> running.prepare().dumps
            (<Dump of decoder.layers.* to dumps/new>,)
        """
        self.resolved = run_or_raise_on_all(job_mesh(), lambda: resolve_settings(self.settings))
        return self.resolved

    def attach(self, chunks: Any, write: bool = True) -> FlexModel:
        """Register the hooks on a model that has its weights. Collective over the job.

        Args:
            chunks: the model, or the list of its virtual pipeline chunks.
            write: whether to open dumps, statistics, the search for values that are not finite, verification,
                the report, norms, the digest of weights and control.

        Returns:
            The model with its hooks.

        Raises:
            FlexError: on all ranks: the settings do not fit the model. The model is then restored.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.finish()
        """
        self.abort()
        resolved = self.resolved or self.prepare()
        self.resolved = None  # edits may have state: a rebuilt model gets new edits
        flex = FlexModel(chunks)
        try:
            run_or_raise_on_all(flex.session.mesh, lambda: _add_edit_hooks(flex, resolved))
            if write:
                for dump in resolved.dumps:
                    flex.register_dump(dump)
                for statistics in resolved.statistics:
                    flex.register_statistics(statistics)
                if resolved.nonfinite is not None:
                    flex.register_nonfinite(resolved.nonfinite)
                if self.settings.verify:
                    flex.verify(self.settings.verify)
                    self._unverified = self.settings.verify
                self.report.take_warnings()
                self.report.write_line(describe_start(flex, resolved, self.settings.verify))
                if self.settings.gradient_norms is not None:
                    self._norms = NormFile(flex, Path(self.settings.gradient_norms))
                if self.settings.weights_digest is not None:
                    path, at = Path(self.settings.weights_digest), self.settings.weights_digest_at
                    self._digest = DigestFile(chunks, flex.session.mesh, path, at)
                if self.settings.control is not None:
                    self._control = Control(flex, self.settings.control)
        except BaseException:
            flex.session.close(failed=True)
            raise
        self.flex, self._trained = flex, False
        return flex

    def step_begins(self, iteration: int | None = None) -> None:
        """Begin a training step; `iteration` is the loop's count from 0, None if the loop does not count.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.step_begins(1000)  # the number that dumps and captures have
            >>> train_step(chunks)
            >>> running.step_ends()
        """
        self._trained = True
        if self.flex is not None:
            self.flex.session.clock.given_iteration = iteration
        if self._control is not None:
            self._control.step_begins(iteration)
        if self._digest is not None:
            self._digest.step_begins(iteration)

    def step_ends(self) -> None:
        """End the training step, after its backward passes and the optimizer's update.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.step_begins(0)
            >>> train_step(chunks)
            >>> running.step_ends()
        """
        if self._norms is not None and self.flex is not None:
            self._norms.write(self.flex)
        if self._unverified and self.flex is not None:
            self.flex.session.compare_norms()
            self._unverified -= 1
            if not self._unverified:
                self.report.write_line(_describe_verified(self.flex, self.settings.verify))

    def training_ends(self) -> None:
        """Write the last step's statistics and the digest of weights, before the loop closes its loggers.

        Collective over the job.

        The statistics of a step are else written when the next one ends. Further steps may follow.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> train_step(chunks)
            >>> running.training_ends()
        """
        if self.flex is not None:
            self.flex.session.sinks.deliver_statistics()
        if self._digest is not None:
            self._digest.training_ends()

    def evaluation(self, on: bool) -> None:
        """Begin (`on`) or end an evaluation: edits remain active; dumps and statistics are inactive.

        In a run that only evaluates, dumps and statistics are active too.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.evaluation(True)
            >>> train_step(chunks)
            >>> running.evaluation(False)
        """
        if self.flex is None or not self._trained:
            return
        registry = self.flex.session.registry
        if on:
            self._before_evaluation = before = registry.selection
            if not before.complement:
                registry.selection = replace(before, without=before.without | GROUPS_OFF_IN_EVALUATION)
        elif self._before_evaluation is not None:
            registry.selection, self._before_evaluation = self._before_evaluation, None

    def finish(self) -> None:
        """Remove all hooks, and wait until all files are written. Collective; does nothing if not attached.

        Raises:
            FlexError: on all ranks: a hook was never called, or a file could not be written. The model is
                restored in this case too.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.finish()
        """
        self._close_files()
        flex, self.flex = self.flex, None
        digest, self._digest = self._digest, None
        if flex is None:
            return
        dumps = list(flex.session.sinks.dumps)
        try:
            flex.restore()
            if digest is not None:
                digest.close()
            for line in describe_end(dumps, flex.session.mesh):
                self.report.write_line(line)
        except FlexError as error:
            self.report.note_error(error)
            raise
        finally:
            self.report.close()

    def abort(self) -> None:
        """Remove all hooks after a training that failed, perhaps on this rank only. Not collective.

        Complete dumps remain.

        Examples:
            >>> from megatron_flex.launch import Settings, TrainingRun
            >>> running = TrainingRun(Settings())
            >>> flex = running.attach(chunks)
            >>> running.abort()
        """
        self._close_files()
        flex, self.flex, self._digest = self.flex, None, None
        if flex is not None:
            flex.session.close(failed=True)
        self.report.close()

    def _close_files(self) -> None:
        if self._norms is not None:
            self._norms.close()
            self._norms = None
        if self._control is not None:
            self._control.close()
            self._control = None


def _describe_verified(flex: FlexModel, steps: int) -> str:
    """A verification that found nothing; a finding is an error of its step."""
    sites = sum(not site.hidden for site in flex.sites())
    compared = f"the ranks' tensors at {count_words(sites, 'site')}, and their copies of parameters,"
    return f"--flex-verify: in {count_words(steps, 'step')} {compared} agreed with their layouts"


def _add_edit_hooks(flex: FlexModel, resolved: ResolvedSettings) -> None:
    for hook in resolved.edits:
        flex.session.hooks.add(hook)
