"""A callback for Megatron-Bridge: `pretrain(cfg, forward_step, callbacks=[FlexCallback(settings)])`.

Bridge takes any object with its events as methods, so that nothing of it is imported. It fetches the schedule
before its first event; so what can be followed is made when the callback is.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.schedule import keep_schedules_watchable
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError
from megatron_flex.launch import flags
from megatron_flex.launch.preview import describe_sites
from megatron_flex.launch.training_run import Running
from megatron_flex.launch.launch_settings import Settings

GROUP_DESTROYERS = ((dist, "destroy_process_group"), (dist.distributed_c10d, "_abort_process_group"))


class FlexCallback:
    """Edits, dumps and statistics beside a training by Megatron-Bridge.

    Every rank makes one, before it calls `pretrain()`.

    Hooks stand from `on_train_start`, when the checkpoint has been loaded, to `on_train_end`; the validation
    and test that Bridge does after that run without. In evaluations between, edits count, and nothing is
    dumped or measured. An iteration's number is `train_state.step` before it is counted up, from 0 on. Where
    Bridge leaves its loop by `sys.exit()` (a signal, a duration, an interval) what is written is finished
    when the process groups go.

    Args:
        settings: what is wanted; else what the command line and MEGATRON_FLEX_FLAGS say. The `--flex-` flags
            are taken out of `sys.argv`.

    Attributes:
        settings: what is wanted.
        running: what it is beside the training.

    Raises:
        FlexError: the settings cannot be; in `pretrain()` on all ranks, what they ask for cannot be.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is None:
            settings, sys.argv[1:] = flags.settings_from_argv(sys.argv[1:])
        if settings.plan:
            raise FlexError(
                "plan is made of Megatron-LM's arguments, which Megatron-Bridge has not; ask megatron-flex "
                "plan instead"
            )
        if settings.cpu and not cpu.is_enabled():
            cpu.enable()
        self.settings, self.running = settings, Running(settings)
        self._ended = False
        self._undo: list[Callable[[], None]] = [] if settings.idle else [keep_schedules_watchable()]

    def on_train_start(self, context: Any) -> None:
        """The model has its weights, and is about to be trained."""
        if self.settings.idle:
            return
        if self._ended:
            raise FlexError("this FlexCallback has been through a training; make one for each pretrain()")
        list_pattern = self.settings.list_sites
        flex = self.running.attach(list(context.model), write=list_pattern is None)
        if list_pattern is not None:
            listing = "\n".join(describe_sites(flex, list_pattern))
            self._end(finishes=False)
            if not dist.is_initialized() or dist.get_rank() == 0:
                sys.stdout.write(f"{listing}\n")
                sys.stdout.flush()
            sys.exit(0)
        if len(self._undo) == 1:  # and not where a training that failed is restarted
            self._undo += [intercept(owner, name, self._on_groups_destroyed) for owner, name in GROUP_DESTROYERS]
            atexit.register(self._at_exit)
            self._undo.append(lambda: atexit.unregister(self._at_exit))

    def on_train_step_start(self, context: Any) -> None:
        """A training step begins."""
        self.running.step_begins(int(context.state.train_state.step))

    def on_train_step_end(self, context: Any) -> None:
        """It is over."""
        self.running.step_ends()

    def on_eval_start(self, context: Any) -> None:
        """A validation begins."""
        self.running.evaluation(True)

    def on_eval_end(self, context: Any) -> None:
        """It is over."""
        self.running.evaluation(False)

    def on_test_start(self, context: Any) -> None:
        """A test begins."""
        self.running.evaluation(True)

    def on_test_end(self, context: Any) -> None:
        """It is over."""
        self.running.evaluation(False)

    def on_train_end(self, context: Any) -> None:
        """The training loop is through: take everything out, and wait until all is written.

        Raises:
            FlexError: on all ranks: a hook never fired, or something could not be written.
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
        """What is written is finished by all ranks together, which takes the groups that go here."""
        if group is None or group is dist.group.WORLD:
            error = sys.exc_info()[1]
            clean = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            self._end(finishes=clean)
        return original(group)

    def _at_exit(self) -> None:
        failed = hasattr(sys, "last_value") or not dist.is_initialized()
        self._end(finishes=not failed)
