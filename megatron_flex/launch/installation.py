"""`install()`: hooks for an unmodified Megatron training script, apart from the call of `install()` itself.

Functions of `megatron.training.training` are wrapped where Megatron looks them up, when that module is
imported: at that time no other module has bound the functions, so no other module must be patched.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from functools import wraps
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.schedules import current_iteration
from megatron_flex.cpu.patches import AfterImportFinder
from megatron_flex.errors import FlexError
from megatron_flex.launch import flags
from megatron_flex.launch.flags import (
    describe_foreign_flags,
    has_flags,
    is_own_flag,
    load_settings,
    settings_of,
)
from megatron_flex.launch.launch_settings import DEFAULT_REPORT_FILE, Settings
from megatron_flex.launch.rank_errors import print_notice
from megatron_flex.launch.settings_resolver import ResolvedSettings
from megatron_flex.launch.training_run import TrainingRun
from megatron_flex.model import FlexModel

MEGATRON_PACKAGE = "megatron"
TRAINING_MODULE = "megatron.training.training"
NEEDED_FUNCTIONS = ("setup_model_and_optimizer", "train_step", "evaluate", "train", "pretrain")
TrainingFunction = Callable[..., Any]


class Installation:
    """The patches of Megatron's training code.

    Attributes:
        settings: the settings; None until Megatron has parsed the flags that define them.
        running: the TrainingRun of these settings.
        failure: the FlexError that stopped the training or occurred at its end.
        holds: store an error at the training's end in `failure` instead of raising the error.

    Examples:
        >>> from megatron_flex.launch import Settings, install
        >>> installation = install(Settings(sites=("decoder.layers.*",)))
        >>> installation.settings.sites
        ('decoder.layers.*',)
        >>> installation.uninstall()
    """

    def __init__(self, settings: Settings | None, holds: bool = False) -> None:
        self.settings, self.holds = settings, holds
        self.running = TrainingRun(Settings() if settings is None else settings, Path(DEFAULT_REPORT_FILE))
        self.failure: FlexError | None = None
        self._undo: list[Callable[[], None]] = []
        self._inside = 0  # nesting depth: some wrappers of pretrain() call it again

    def install(self) -> None:
        """Patch Megatron's training code, now or when it is imported.

        Examples:
            >>> from megatron_flex.launch import Installation, Settings
            >>> installation = Installation(Settings(sites=("decoder.layers.*",)))
            >>> installation.install()
            >>> installation.uninstall()
        """
        if self.settings is not None and self.settings.cpu:
            cpu.enable()
            self._undo.append(cpu.disable)
        if self.settings is not None and self.settings.idle:
            return
        if TRAINING_MODULE in sys.modules:
            self._patch(sys.modules[TRAINING_MODULE])
        else:
            finder = AfterImportFinder(MEGATRON_PACKAGE, self._imported)
            sys.meta_path.insert(0, finder)
            self._undo.append(lambda: sys.meta_path.remove(finder))
        atexit.register(self._at_exit)
        self._undo.append(lambda: atexit.unregister(self._at_exit))

    def uninstall(self) -> None:
        """Remove the hooks from the model, then all patches. Every rank calls it.

        Raises:
            FlexError: for the same reasons as `finish`.

        Examples:
            >>> from megatron_flex.launch import Settings, install
            >>> installation = install(Settings(sites=("decoder.layers.*",)))
            >>> installation.uninstall()
        """
        _CurrentInstallation.installed = (
            None if _CurrentInstallation.installed is self else _CurrentInstallation.installed
        )
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.running.finish()

    # -- patches -----------------------------------------------------------------------------------------

    def _imported(self, module: ModuleType) -> None:
        if module.__name__ == TRAINING_MODULE:
            self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        missing = [name for name in NEEDED_FUNCTIONS if not callable(getattr(module, name, None))]
        if missing:
            raise FlexError(
                f"{module.__file__} has no {missing[0]}(): it is not Megatron-LM of 0.12 to 0.19; "
                "attach to the model in your script instead"
            )
        around = {
            "setup_model_and_optimizer": self._setup,
            "train_step": self._step,
            "evaluate": self._evaluate,
            "train": self._train,
            "pretrain": self._pretrain,
        }
        for name, wrapper in around.items():
            self._wrap(module, name, wrapper)
        if hasattr(module, "checkpoint_and_decide_exit"):
            self._wrap(module, "checkpoint_and_decide_exit", self._decide_exit)
        self._wrap(dist, "destroy_process_group", self._destroy)
        if hasattr(module, "ft_integration"):
            self._wrap(module.ft_integration, "shutdown", self._shutdown)

    def _wrap(self, module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function by `wrapper(original, *args)`, also in modules that have already bound it."""
        original = getattr(module, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        _rebind_everywhere(original, wrapped)
        self._undo.append(lambda: _rebind_everywhere(wrapped, original))

    def _setup(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        """Attach the hooks after the original, which builds the model and loads its checkpoint."""
        settings = self._remember_failure(self._parsed)
        if settings.idle:
            return original(*args, **kwargs)
        resolved = self._remember_failure(self.running.prepare)
        out = original(*args, **kwargs)
        previews = settings.list_sites is not None or settings.estimate or settings.align is not None
        flex = self._remember_failure(lambda: self.running.attach(out[0], write=not previews))
        if previews:
            self._look(flex, resolved)
        return out

    def _parsed(self) -> Settings:
        """The settings, read from Megatron's arguments if necessary."""
        if self.settings is None:
            from megatron.training import get_args

            namespace = get_args()
            self.settings = settings_of(namespace) if has_flags(namespace) else Settings()
            self.running = TrainingRun(self.settings, Path(DEFAULT_REPORT_FILE))
        return self.settings

    def _look(self, flex: FlexModel, resolved: ResolvedSettings) -> NoReturn:
        """Print the preview, and end all ranks before training and before any data are read."""
        from megatron.training import get_args

        from megatron_flex.launch.preview import describe_preview

        preview_text = self._remember_failure(
            lambda: describe_preview(flex, self.running.settings, resolved, get_args())
        )
        if dist.get_rank() == 0:
            sys.stdout.write(preview_text)
            sys.stdout.flush()
        self.running.report.note(preview_text)
        self.running.abort()
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)

    def _step(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        self._remember_failure(lambda: self.running.step_begins(current_iteration()))
        out = self._remember_failure(lambda: original(*args, **kwargs))
        self._remember_failure(self.running.step_ends)
        return out

    def _evaluate(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        self.running.evaluation(True)
        try:
            return self._remember_failure(lambda: original(*args, **kwargs))
        finally:
            self.running.evaluation(False)

    def _train(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        """Wrap `train()` as well as `pretrain()`: a script may have bound `pretrain` before the patch."""
        try:
            out = original(*args, **kwargs)
        except BaseException as error:
            if not _is_clean_exit(error):
                self.running.abort()
            raise
        self._remember_failure(self.running.training_ends)
        return out

    def _decide_exit(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        """Write the last statistics where `train()` closes W&B itself, and leaves by sys.exit()."""
        exits = original(*args, **kwargs)
        if exits:
            self._remember_failure(self.running.training_ends)
        return exits

    def _pretrain(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        self._inside += 1
        try:
            out = original(*args, **kwargs)
        except BaseException as error:
            self._inside -= 1
            if not _is_clean_exit(error):
                self.running.abort()
            elif not self._inside:
                self.finish()
            raise
        self._inside -= 1
        if not self._inside:
            self.finish()
        return out

    def _shutdown(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        """The last call in pretrain(): the end of a training whose pretrain() was bound before the patch."""
        if not self._inside:
            self.finish()
        return original(*args, **kwargs)

    def _destroy(self, original: TrainingFunction, group: Any = None) -> Any:
        """Finish dumps before the process groups are destroyed, because that is collective."""
        if group is None or group is dist.group.WORLD:
            if sys.exc_info()[0] is not None:
                self.running.abort()
            else:
                self.finish()
        return original(group)

    def _remember_failure(self, act: Callable[[], Any]) -> Any:
        """Call `act`, and store a FlexError that it raises."""
        try:
            return act()
        except FlexError as error:
            if error is not self.failure:
                self.running.report.note_error(error)
            self.failure = error
            raise

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the run after the training, on all ranks. Collective; a second call does nothing.

        Raises:
            FlexError: on all ranks, unless `holds`: a hook was never called, or a file could not be written.

        Examples:
            >>> from megatron_flex.launch import Settings, install
            >>> installation = install(Settings(sites=("decoder.layers.*",)))
            >>> installation.finish()
            >>> installation.uninstall()
        """
        try:
            self._remember_failure(self.running.finish)
        except FlexError:
            if not self.holds:
                raise

    def _at_exit(self) -> None:
        """Handle the end of the process where no patched function marked the end of the training."""
        if hasattr(sys, "last_value") or not dist.is_initialized():
            self.running.abort()
        else:
            self.finish()


class _CurrentInstallation:
    """The installation of this process: a process has one Megatron, so at most one installation."""

    installed: Installation | None = None


def install(settings: Settings | str | PathLike[str] | None = None, *, holds: bool = False) -> Installation:
    """Add hooks to a Megatron training script. Call it on every rank, before `pretrain()`.

    `install` does not import Megatron. A second call with the same settings does nothing.

    Args:
        settings: the settings, or a YAML file, to which MEGATRON_FLEX_FLAGS adds; if None, those of the
            command line and MEGATRON_FLEX_FLAGS. The `--flex-` flags are then removed from `sys.argv`.
        holds: store an error at the training's end (a hook that was never called, a file that could not be
            written) in `.failure` instead of raising the error in `pretrain()`.

    Returns:
        The installation; its `uninstall()` removes all patches.

    Raises:
        FlexError: other settings are installed already, or the flags are invalid.

    Examples:
        >>> from megatron_flex.launch import Settings, install
        >>> installation = install(Settings(sites=("decoder.layers.*",)))
        >>> # pretrain(...)
        >>> installation.uninstall()
    """
    existing = _CurrentInstallation.installed
    if existing is not None and existing.settings is None:  # settings that Megatron's parser would have read
        existing.uninstall()
        existing = None
    if settings is None:
        if existing is not None and not any(map(is_own_flag, sys.argv[1:])):
            return existing
        settings, sys.argv[1:] = flags.settings_from_argv(sys.argv[1:])
        print_notice(describe_foreign_flags(sys.argv[1:]))
    elif not isinstance(settings, Settings):
        settings = load_settings(settings)
    if existing is not None:
        if existing.settings == settings:
            return existing
        raise FlexError("megatron_flex.launch is installed with other settings; uninstall() those first")
    new = Installation(settings, holds)
    new.install()
    _CurrentInstallation.installed = new
    return new


def install_when_parsed() -> None:
    """Install with the settings that Megatron's own parser reads, when Megatron builds the model.

    An existing installation takes precedence. With --flex-cpu on the command line the CPU runtime is enabled.
    """
    if _CurrentInstallation.installed is None:
        if {"--flex-cpu", "--megatron-flex-cpu"} & set(sys.argv[1:]) and not cpu.is_enabled():
            cpu.enable()
        _CurrentInstallation.installed = Installation(None)
        _CurrentInstallation.installed.install()


def _rebind_everywhere(old: Any, new: Any) -> None:
    """Rebind every global name in loaded modules from `old` to `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(module, ModuleType) and names is not None:
            for name in [n for n, value in list(names.items()) if value is old]:
                names[name] = new


def _is_clean_exit(error: BaseException) -> bool:
    """Whether an exception is a normal exit of all ranks: Megatron leaves its loop by sys.exit()."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
