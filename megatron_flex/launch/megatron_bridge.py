"""A callback for Megatron-Bridge: `pretrain(cfg, forward_step, callbacks=[FlexCallback(settings)])`.

Bridge accepts any object with its events as methods, so this module does not import Bridge. Bridge fetches
the schedule before its first event; therefore the callback prepares the schedule when it is created.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.schedules import keep_schedules_watchable
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError
from megatron_flex.launch import flags
from megatron_flex.launch.launch_settings import DEFAULT_REPORT_FILE, Settings
from megatron_flex.launch.rank_errors import print_notice
from megatron_flex.launch.training_run import TrainingRun
from megatron_flex.sites import describe_sites

GROUP_DESTROYERS = ((dist, "destroy_process_group"), (dist.distributed_c10d, "_abort_process_group"))


class FlexCallback:
    """Edits, dumps and statistics in a training run of Megatron-Bridge.

    Every rank creates one, before it calls `pretrain()`.

    Hooks are registered from `on_train_start`, when the checkpoint has been loaded, to `on_train_end`; the
    validation and test after that run without hooks. In evaluations during training, edits are active, and
    dumps and statistics are not. The number of an iteration is `train_state.step` before Bridge increments
    it, starting at 0. Where Bridge leaves its loop by `sys.exit()` (a signal, a duration, an interval), files
    are completed before the process groups are destroyed.

    Args:
        settings: the settings; if None, those of the command line and MEGATRON_FLEX_FLAGS. The `--flex-`
            flags are removed from `sys.argv`.

    Attributes:
        settings: the settings.
        running: the TrainingRun of these settings.

    Raises:
        FlexError: the settings are invalid; or, in `pretrain()` on all ranks, do not fit the model.

    Examples:
        Pass it to Megatron-Bridge: `pretrain(config, forward_step, callbacks=[callback])`.

        >>> from megatron_flex.launch import Settings
        >>> from megatron_flex.launch.megatron_bridge import FlexCallback
        >>> callback = FlexCallback(Settings(sites="decoder.layers.*"))
    """

    def __init__(self, settings: Settings | None = None) -> None:
        report = Path(DEFAULT_REPORT_FILE) if settings is None else None
        if settings is None:
            settings, sys.argv[1:] = flags.settings_from_argv(sys.argv[1:])
            print_notice(flags.describe_foreign_flags(sys.argv[1:]))
        if settings.estimate:
            raise FlexError(
                "an estimate is made from Megatron-LM's arguments, which Megatron-Bridge has not; use "
                "`megatron-flex estimate` instead"
            )
        if settings.cpu and not cpu.is_enabled():
            cpu.enable()
        self.settings, self.running = settings, TrainingRun(settings, report)
        self._ended = False
        self._undo: list[Callable[[], None]] = [] if settings.idle else [keep_schedules_watchable()]

    def on_train_start(self, context: Any) -> None:
        """Attach the hooks: the model has its weights, and training is about to begin."""
        if self.settings.idle:
            return
        if self._ended:
            raise FlexError("this FlexCallback has been through a training; make one for each pretrain()")
        list_pattern = self.settings.list_sites
        flex = self.running.attach(list(context.model), write=list_pattern is None)
        if list_pattern is not None:
            listing = describe_sites(flex.sites(list_pattern), mesh=flex.session.mesh)
            self._end(finishes=False)
            if not dist.is_initialized() or dist.get_rank() == 0:
                sys.stdout.write(f"{listing}\n")
                sys.stdout.flush()
            sys.exit(0)
        if len(self._undo) == 1:  # not again when a failed training is restarted
            self._undo += [
                intercept(owner, name, self._on_groups_destroyed) for owner, name in GROUP_DESTROYERS
            ]
            atexit.register(self._at_exit)
            self._undo.append(lambda: atexit.unregister(self._at_exit))

    def on_train_step_start(self, context: Any) -> None:
        """Begin a training step."""
        self.running.step_begins(int(context.state.train_state.step))

    def on_train_step_end(self, context: Any) -> None:
        """End a training step."""
        self.running.step_ends()

    def on_eval_start(self, context: Any) -> None:
        """Begin a validation."""
        self.running.evaluation(True)

    def on_eval_end(self, context: Any) -> None:
        """End a validation."""
        self.running.evaluation(False)

    def on_test_start(self, context: Any) -> None:
        """Begin a test."""
        self.running.evaluation(True)

    def on_test_end(self, context: Any) -> None:
        """End a test."""
        self.running.evaluation(False)

    def on_train_end(self, context: Any) -> None:
        """After the training loop: remove all hooks, and wait until all files are written. Collective.

        Raises:
            FlexError: on all ranks: a hook was never called, or a file could not be written.
        """
        self._end(finishes=True)

    def _end(self, finishes: bool) -> None:
        undos, self._undo, self._ended = self._undo, [], True
        for undo in reversed(undos):
            undo()
        if finishes:
            self.running.finish()
        else:
            self.running.abort()

    def _on_groups_destroyed(self, original: Callable[..., Any], group: Any = None) -> Any:
        """Complete files before the process groups are destroyed, because that is collective."""
        if group is None or group is dist.group.WORLD:
            error = sys.exc_info()[1]
            clean = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            self._end(finishes=clean)
        return original(group)

    def _at_exit(self) -> None:
        failed = hasattr(sys, "last_value") or not dist.is_initialized()
        self._end(finishes=not failed)
