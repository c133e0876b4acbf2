"""`install()`: hooks for a training script of Megatron's, which is not edited but for this line, if at all.

Functions of `megatron.training.training` are wrapped where Megatron itself looks them up, when that module is
imported: by then nothing has bound them, and no other place has to know.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.schedule import current_iteration
from megatron_flex.cpu.importing import AfterImportFinder
from megatron_flex.errors import FlexError
from megatron_flex.launch import flags
from megatron_flex.launch.argparse_flags import has_flags, settings_of
from megatron_flex.launch.resolving import ResolvedSettings
from megatron_flex.launch.training_run import Running
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.table import FLAG_PREFIX
from megatron_flex.model import FlexModel

MEGATRON_PACKAGE = "megatron"
TRAINING_MODULE = "megatron.training.training"
NEEDED_FUNCTIONS = ("setup_model_and_optimizer", "train_step", "evaluate", "train", "pretrain")
TrainingFunction = Callable[..., Any]


class Installed:
    """What stands in Megatron's training code.

    Attributes:
        settings: what is wanted; None until Megatron has parsed the flags that say it.
        running: what it is beside the training.
        failure: the error of ours that stopped the training, or stands at its end.
        holds: whether an error at the training's end is kept in `failure`, and not raised.
    """

    def __init__(self, settings: Settings | None, holds: bool = False) -> None:
        self.settings, self.holds = settings, holds
        self.running = Running(Settings() if settings is None else settings)
        self.failure: FlexError | None = None
        self._undo: list[Callable[[], None]] = []
        self._inside = 0  # pretrain() in pretrain(), as some wrappers of it do

    def install(self) -> None:
        """Patch Megatron's training code, now or when it is imported."""
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
        """Put everything back as it was. Every rank calls it; what is in a model is taken out first.

        Raises:
            FlexError: as at a training's end.
        """
        _CurrentInstallation.installed = None if _CurrentInstallation.installed is self else _CurrentInstallation.installed
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
                f"{module.__file__} has no {missing[0]}(): it is no Megatron-LM of 0.12 to 0.19; "
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
        self._wrap(dist, "destroy_process_group", self._destroy)
        if hasattr(module, "ft_integration"):
            self._wrap(module.ft_integration, "shutdown", self._shutdown)

    def _wrap(self, module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `wrapper(original, *args)` stand for a function, also where its name was bound already."""
        original = getattr(module, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        _rebind_everywhere(original, wrapped)
        self._undo.append(lambda: _rebind_everywhere(wrapped, original))

    def _setup(self, original: TrainingFunction, *args: Any, **kwargs: Any) -> Any:
        """The model is built and its checkpoint loaded when the original returns."""
        settings = self._remember_failure(self._parsed)
        if settings.idle:
            return original(*args, **kwargs)
        found = self._remember_failure(self.running.prepare)
        out = original(*args, **kwargs)
        previews = settings.list_sites is not None or settings.plan
        flex = self._remember_failure(lambda: self.running.attach(out[0], write=not previews))
        if previews:
            self._look(flex, found)
        return out

    def _parsed(self) -> Settings:
        """The settings, which Megatron's own arguments may tell."""
        if self.settings is None:
            from megatron.training import get_args

            namespace = get_args()
            self.settings = settings_of(namespace) if has_flags(namespace) else Settings()
            self.running = Running(self.settings)
        return self.settings

    def _look(self, flex: FlexModel, found: ResolvedSettings) -> NoReturn:
        """Say what is asked for, and end all ranks before training, and before data are touched."""
        from megatron.training import get_args

        from megatron_flex.launch.preview import describe_preview

        preview_text = self._remember_failure(lambda: describe_preview(flex, self.running.settings, found, get_args()))
        self.running.abort()
        if dist.get_rank() == 0:
            sys.stdout.write(preview_text)
            sys.stdout.flush()
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
        """It is watched as well as pretrain(), of which a script may have a name that is not seen."""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if not _is_clean_exit(error):
                self.running.abort()
            raise

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
        """The last that pretrain() calls: the end of one that ran, or was bound, before the patch."""
        if not self._inside:
            self.finish()
        return original(*args, **kwargs)

    def _destroy(self, original: TrainingFunction, group: Any = None) -> Any:
        """Dumps are finished by all ranks together, which takes the groups that go here."""
        if group is None or group is dist.group.WORLD:
            if sys.exc_info()[0] is not None:
                self.running.abort()
            else:
                self.finish()
        return original(group)

    def _remember_failure(self, act: Callable[[], Any]) -> Any:
        """Remember an error that is ours."""
        try:
            return act()
        except FlexError as error:
            self.failure = error
            raise

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The training is over on all ranks. Collective; nothing if that was known.

        Raises:
            FlexError: on all ranks, unless it is held: a hook never fired, or something was not written.
        """
        try:
            self._remember_failure(self.running.finish)
        except FlexError:
            if not self.holds:
                raise

    def _at_exit(self) -> None:
        """The script is through, and nothing that is watched has told so."""
        if hasattr(sys, "last_value") or not dist.is_initialized():
            self.running.abort()
        else:
            self.finish()


class _CurrentInstallation:
    """A process has one Megatron, so one of it."""

    installed: Installed | None = None


def install(settings: Settings | None = None, *, holds: bool = False) -> Installed:
    """Give a Megatron training script hooks: call it on every rank, before `pretrain()`.

    Nothing of Megatron is imported. Calling it twice with the same settings does nothing.

    Args:
        settings: what is wanted; else what the command line and MEGATRON_FLEX_FLAGS say. The `--flex-` flags
            are taken out of `sys.argv`.
        holds: whether an error at the training's end, of a hook that never fired or a file that could not be
            written, is kept in `.failure` instead of raised by `pretrain()`.

    Returns:
        What was installed; its `uninstall()` puts everything back.

    Raises:
        FlexError: something else is installed already, or the flags cannot be.
    """
    there = _CurrentInstallation.installed
    if there is not None and there.settings is None:  # which Megatron would have asked its own parser for
        there.uninstall()
        there = None
    if settings is None:
        if there is not None and not any(word.startswith(FLAG_PREFIX) for word in sys.argv[1:]):
            return there
        settings, sys.argv[1:] = flags.settings_from_argv(sys.argv[1:])
    if there is not None:
        if there.settings == settings:
            return there
        raise FlexError("megatron_flex.launch is installed with other settings; uninstall() those first")
    new = Installed(settings, holds)
    new.install()
    _CurrentInstallation.installed = new
    return new


def install_when_parsed() -> None:
    """Let Megatron's own parser say what is wanted: it is asked once a model is to be built.

    Where something is installed already, that counts. With --flex-cpu on the command line the CPU is enabled.
    """
    if _CurrentInstallation.installed is None:
        if "--flex-cpu" in sys.argv[1:] and not cpu.is_enabled():
            cpu.enable()
        _CurrentInstallation.installed = Installed(None)
        _CurrentInstallation.installed.install()


def _rebind_everywhere(old: Any, new: Any) -> None:
    """Let every name in loaded modules that means `old` mean `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(module, ModuleType) and names is not None:
            for name in [n for n, value in list(names.items()) if value is old]:
                names[name] = new


def _is_clean_exit(error: BaseException) -> bool:
    """Whether all ranks end alike, and without a failure: Megatron leaves its loop by sys.exit()."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
