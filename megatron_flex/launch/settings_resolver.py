"""Resolution of settings: from settings to edit hooks, dumps and statistics.

Editing functions are loaded by name: `package.module:function`, `file.py:function`, or a preset.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from os.path import abspath, expanduser
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megatron_flex import edits
from megatron_flex.dump import Dump
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch.launch_settings import DumpSettings, EditSettings, Settings, StatisticsSettings
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime import HookFunction
from megatron_flex.runtime.debug.error_origin import format_user_line
from megatron_flex.settings import list_settings
from megatron_flex.statistics import Statistics

FILE_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[\w.]+)")
MODULE_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
FILE_MODULE_PREFIX = (
    "_megatron_flex_file_"  # prefix of the names of modules loaded from files, against name clashes
)


def load_function(reference: str) -> Any:
    """Load the editing function of an edit: a function, a preset, or a sequence of them joined by `|`.

    A file is imported under a unique module name, once.

    Raises:
        FlexError: the name does not exist, a module or file cannot be imported, or the object is not
            callable.
    """
    parts = [part.strip() for part in reference.split("|")]
    if len(parts) == 1:
        return _load_one(reference.strip())
    return edits.chain(*(_load_one(part) for part in parts))


def _load_one(reference: str) -> Any:
    in_file = FILE_FUNCTION.fullmatch(reference)
    matched = in_file or MODULE_FUNCTION.fullmatch(reference)
    if matched is None:
        _reject_missing_colon(reference)
        return edits.parse(reference)
    module = _import_file(matched["file"]) if in_file else _import_named_module(matched["module"])
    out = _find_attribute(module, matched["name"], reference.rpartition(":")[0])
    if not callable(out):
        raise FlexError(
            f"{reference} is of type {type(out).__name__}, not a function; name what can be called"
        )
    return out


def _reject_missing_colon(reference: str) -> None:
    """Raise for a reference that looks like a function but has no colon."""
    if re.search(r"\.py(:.*)?$", reference) and "=" not in reference:
        raise FlexError(f"{reference}: name the function in a file after a colon, file.py:function")
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", reference):
        module, _, name = reference.rpartition(".")
        raise FlexError(f"{reference}: name a function after a colon, {module}:{name}")


def _find_attribute(module: ModuleType, name: str, where: str) -> Any:
    out: Any = module
    for step in name.split("."):
        if not hasattr(out, step):
            public = [n for n in vars(out) if not n.startswith("_")] if hasattr(out, "__dict__") else []
            raise FlexError(f"{where} has no {name!r}{suggest_nearest(step, public)}")
        out = getattr(out, step)
    return out


def _import_named_module(name: str) -> ModuleType:
    with _report_import_errors(name):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise FlexError(
                f"no module {error.name!r} on Python's path; install it, or name a file: file.py:function"
            ) from None


def _import_file(reference: str) -> ModuleType:
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        raise FlexError(f"no file {reference} on this rank; every rank reads it, from the working directory")
    name = f"{FILE_MODULE_PREFIX}{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        with _report_import_errors(reference):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _report_import_errors(what: str) -> Iterator[None]:
    """Convert an exception in a user's module to an error of one line, with file and line number."""
    try:
        yield
    except FlexError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything, or be a script that exits
        if isinstance(error, SyntaxError) and error.filename:
            words, place = error.msg, f"{error.filename}:{error.lineno}"
        else:
            words, place = str(error), format_user_line(error)
        words = " ".join(words.split())
        raise FlexError(f"{what} cannot be imported: {type(error).__name__}: {words} ({place})") from error


EDIT_GROUP, DUMP_GROUP, STATISTICS_GROUP = "edit", "dump", "stats"  # every hook of a kind is in its group
NONFINITE_GROUP = "nonfinite"


SinkT = TypeVar("SinkT", Dump, Statistics)


@dataclass(frozen=True)
class ResolvedSettings:
    """The resolved settings.

    Attributes:
        edits: the edit hooks; at a common hook point they run in this order.
        waiting: those of the edits that are inactive until they are switched on.
        dumps: the dumps, the same on every rank.
        statistics: the statistics, the same on every rank.
        nonfinite: the search for values that are not finite; None without one.
    """

    edits: tuple[HookFunction, ...] = ()
    waiting: tuple[HookFunction, ...] = ()
    dumps: tuple[Dump, ...] = ()
    statistics: tuple[Statistics, ...] = ()
    nonfinite: NonFinite | None = None


def resolve_settings(settings: Settings) -> ResolvedSettings:
    """Resolve settings. Modules and files that the settings name are imported here.

    Raises:
        FlexError: the settings request nothing, name no sites, or name an object that does not exist or is
            invalid.
    """
    _check_settings(settings)
    statistics = () if settings.statistics is None else (settings.statistics,)
    edits = [(hook, e.enabled) for e in settings.edits for hook in _make_edit_hooks(e, settings)]
    return ResolvedSettings(
        tuple(hook for hook, _ in edits),
        tuple(hook for hook, enabled in edits if not enabled),
        tuple(_make_sink(Dump, part, settings, DUMP_GROUP) for part in settings.dumps),
        tuple(_make_sink(Statistics, part, settings, STATISTICS_GROUP) for part in statistics),
        _make_nonfinite(settings),
    )


def _check_settings(settings: Settings) -> None:
    if settings.nonfinite_dir is not None and settings.nonfinite is None:
        raise FlexError(f"--flex-nonfinite-dir {settings.nonfinite_dir} needs --flex-nonfinite stop or warn")
    if settings.weights_digest_at is not None and settings.weights_digest is None:
        raise FlexError(
            f"--flex-weights-digest-at {settings.weights_digest_at} needs --flex-weights-digest FILE"
        )
    has_hooks = settings.edits or settings.dumps or settings.statistics is not None or settings.nonfinite
    checks = (
        settings.list_sites
        or settings.estimate
        or settings.verify
        or settings.gradient_norms
        or settings.weights_digest
        or settings.align
    )
    if not settings.idle and not (has_hooks or checks):
        raise FlexError(
            "nothing to do; give --flex-dump, --flex-stats, --flex-edit, --flex-nonfinite, "
            "--flex-list-sites, --flex-estimate, --flex-verify, --flex-gradient-norms, "
            "--flex-weights-digest or --flex-align"
        )
    settings.check_sites()
    paths = [d.path for d in settings.dumps]
    if settings.statistics is not None:
        paths.append(settings.statistics.path)
    paths = [abspath(expanduser(p)) for p in paths]
    for path in paths:
        if paths.count(path) > 1:
            raise FlexError(f"{path} is the folder of two dumps, or of a dump and statistics; name two")


def _make_edit_hooks(edit: EditSettings, settings: Settings) -> Iterator[HookFunction]:
    """One hook for each pattern, all with the same function."""
    flag = f"--flex-edit {edit.edit}"
    sites = (edit.site,) if edit.site.strip() else tuple(dict.fromkeys(settings.sites))
    try:
        does = load_function(edit.edit)
        for site in sites:
            yield HookFunction(
                site,
                editing_function=does,
                hook_type=edit.hook_type,
                run=edit.run,
                save=False,
                on_error=settings.on_error,
                groups=(EDIT_GROUP, *edit.groups),
                enabled=edit.enabled,
            )
    except FlexError as error:
        raise type(error)(f"{flag}: {error}") from error


def _make_sink(
    declared: type[SinkT], part: DumpSettings | StatisticsSettings, settings: Settings, group: str
) -> SinkT:
    flag = "--flex-dump" if declared is Dump else "--flex-stats"
    try:
        return declared(**_arguments(declared, part, settings, group))
    except FlexError as error:
        raise type(error)(f"{flag} {part.path}: {error}") from error


def _make_nonfinite(settings: Settings) -> NonFinite | None:
    if settings.nonfinite is None:
        return None
    return NonFinite(settings.nonfinite, path=settings.nonfinite_dir, groups=(NONFINITE_GROUP,))


def _arguments(
    declared: type, part: DumpSettings | StatisticsSettings, settings: Settings, group: str
) -> dict[str, Any]:
    """The arguments of `Dump` or `Statistics`; shared settings that `part` lacks come from `settings`."""
    out: dict[str, Any] = {}
    for setting in list_settings(declared):
        value = getattr(part, setting.name)
        if setting.shared and value in (None, ()):
            value = getattr(settings, setting.name)
        out[setting.name] = setting.read(value)
    return {**out, "sites": list(dict.fromkeys(out["sites"])), "groups": (group, *part.groups)}
