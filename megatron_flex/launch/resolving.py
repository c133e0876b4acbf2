"""From settings to what they mean: hooks that edit, dumps, statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import abspath, expanduser
from typing import Any

from megatron_flex.dump import Dump
from megatron_flex.dump.said import parse_number_setting, parse_token_setting
from megatron_flex.errors import FlexError
from megatron_flex.launch.naming import load_function
from megatron_flex.launch.launch_settings import DumpSettings, EditSettings, Settings, StatisticsSettings
from megatron_flex.runtime import HookFunction
from megatron_flex.statistics import Statistics

EDIT_TAG, DUMP_TAG, STATISTICS_TAG = "edit", "dump", "stats"  # the groups that all of a kind are in


@dataclass(frozen=True)
class ResolvedSettings:
    """What settings mean.

    Attributes:
        edits: hooks, in the order in which they run where they meet.
        waiting: those of them that are off until they are switched on.
        dumps: all alike on every rank.
        statistics: likewise.
    """

    edits: tuple[HookFunction, ...] = ()
    waiting: tuple[HookFunction, ...] = ()
    dumps: tuple[Dump, ...] = ()
    statistics: tuple[Statistics, ...] = ()


def resolve_settings(settings: Settings) -> ResolvedSettings:
    """Make what settings ask for. Modules and files that they name are imported here.

    Raises:
        FlexError: they ask for nothing, say no sites, or name what there is not or cannot be.
    """
    _check_settings(settings)
    edits = [(hook, e.enabled) for e in settings.edits for hook in _make_edit_hooks(e, settings)]
    return ResolvedSettings(
        tuple(hook for hook, _ in edits),
        tuple(hook for hook, enabled in edits if not enabled),
        tuple(_make_dump(d, settings) for d in settings.dumps),
        () if settings.statistics is None else (_make_statistics(settings.statistics, settings),),
    )


def _check_settings(settings: Settings) -> None:
    wanted = settings.edits or settings.dumps or settings.statistics is not None
    if not settings.idle and not (wanted or settings.list_sites or settings.plan or settings.verify):
        raise FlexError(
            "nothing is asked for: say what to do, with --flex-dump, --flex-stats, --flex-edit, "
            "--flex-list-sites, --flex-plan or --flex-verify"
        )
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
    if not sites:
        raise FlexError(f"{flag}: no site is named, neither there nor by --flex-sites")
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
                tags=(EDIT_TAG, *edit.tags),
                enabled=edit.enabled,
            )
    except FlexError as error:
        raise type(error)(f"{flag}: {error}") from error


def _make_dump(dump: DumpSettings, settings: Settings) -> Dump:
    flag = f"--flex-dump {dump.path}"
    common = _common_options(dump, settings, flag)
    try:
        return Dump(
            **common,
            iterations=parse_number_setting(dump.iterations, "iterations"),
            microbatches=parse_number_setting(dump.microbatches, "microbatches"),
            samples=parse_number_setting(dump.samples, "samples"),
            tokens=parse_token_setting(
                settings.tokens if dump.tokens is None else dump.tokens, "tokens", fractions=False
            ),
            reduce=dump.reduce,
            dtype=dump.dtype,
            when_full=dump.when_full,
            replicas=dump.replicas,
            durable=dump.durable,
            tags=(DUMP_TAG, *dump.tags),
        )
    except FlexError as error:
        raise type(error)(f"{flag}: {error}") from error


def _make_statistics(statistics: StatisticsSettings, settings: Settings) -> Statistics:
    flag = f"--flex-stats {statistics.path}"
    common = _common_options(statistics, settings, flag)
    try:
        return Statistics(
            **common,
            histogram=statistics.histogram,
            format=statistics.format,
            writers=statistics.writers,
            tags=(STATISTICS_TAG, *statistics.tags),
        )
    except FlexError as error:
        raise type(error)(f"{flag}: {error}") from error


def _common_options(part: DumpSettings | StatisticsSettings, settings: Settings, flag: str) -> dict[str, Any]:
    """What dumps and statistics both have, from the settings where they do not say it themselves."""
    sites: Sequence[str] = part.sites or settings.sites
    if not sites and not part.parameters:
        raise FlexError(f"{flag}: nothing is named; say --flex-sites PATTERN, or parameters")
    return {
        "path": expanduser(part.path),
        "sites": list(dict.fromkeys(sites)),
        "parameters": list(part.parameters),
        "every": settings.every if part.every is None else part.every,
        "gradients": settings.gradients if part.gradients is None else part.gradients,
    }
