"""The folder of a new run: created beside the earlier runs of the same dump."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from megatron_flex.dump.file_names import RUN_DRAFT, format_run_draft, format_run_folder, parse_run_folder
from megatron_flex.dump.run_folders import DumpRun, IterationKey, scan_runs
from megatron_flex.dump.schema import Manifest
from megatron_flex.dump.writer.part_writer import sync_folder
from megatron_flex.errors import DumpError

VISIBLE_SECONDS = 120.0  # a network's file system may show a new folder after its caches expire, in 60 s
CHANGEABLE_SETTINGS = ("every", "iterations")  # settings in which runs of one dump may differ


def create_run(path: Path, manifest: Manifest) -> Manifest:
    """Make the folder of a new run, which has its name once its manifest is in it. One rank calls it.

    Args:
        path: the dump's folder.
        manifest: of the run; its number is determined here.

    Returns:
        The manifest as it was written.

    Raises:
        DumpError: the folder holds another model's dump or one of other settings, or cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        earlier = list_begun_runs(path)
        names = [f.name for f in path.iterdir() if not RUN_DRAFT.fullmatch(f.name)]
        foreign = [name for name in names if parse_run_folder(name) is None]
        if foreign and not earlier:
            raise DumpError(
                f"{path} is not a dump, and not empty ({min(foreign)!r}); name another folder", path=path
            )
        for run in earlier:
            check_same_dump(path, run.manifest, manifest)
        return _create_run_folder(path, manifest)
    except DumpError:
        raise
    except OSError as error:
        raise DumpError(
            f"{path}: no dump can be written there: {error.strerror or error}", path=path
        ) from error
    except (ValueError, TypeError) as error:  # raised on one rank; other ranks must learn of it
        raise DumpError(f"{path}: {error}", path=path) from error


class RunMade(NamedTuple):
    """A run of a dump, as other ranks recognise it.

    Attributes:
        run: the number of the run.
        created: when its manifest was made.
        rank: the rank that made it.
    """

    run: int
    created: str
    rank: int


def find_access_problem(path: Path, created: RunMade, seconds: float = VISIBLE_SECONDS) -> str:
    """Why this rank cannot write to a run that another one made, or nothing.

    Args:
        path: the dump's folder.
        created: the run.
        seconds: how long to wait for the folder.
    """
    folder = path / format_run_folder(created.run)
    until = time.monotonic() + seconds
    while True:
        try:
            os.listdir(path)  # makes such a file system look again
            if Manifest.read(folder).created != created.created:
                return "found another folder of that name"
            return "" if os.access(folder, os.W_OK | os.X_OK) else "may not write to it"
        except (OSError, DumpError):
            if time.monotonic() > until:
                return "cannot see it"
        time.sleep(0.1)


def _create_run_folder(path: Path, manifest: Manifest) -> Manifest:
    """Make the folder under the next number that is free; another job may be opening the dump too."""
    rough = path / format_run_draft()
    rough.mkdir()
    try:
        number = max((run.number for run in scan_runs(path)), default=-1) + 1
        while True:
            manifest = replace(manifest, run=number)
            manifest.write(rough)
            try:
                rough.rename(
                    path / format_run_folder(number)
                )  # which fails where a folder with anything in it is
                sync_folder(path)
                return manifest
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                number += 1
    except BaseException:
        rmtree(rough, ignore_errors=True)
        raise


def list_begun_runs(path: Path) -> list[DumpRun]:
    """The runs that have begun, in order. Raises DumpError if the folder cannot be read."""
    return [run for run in scan_runs(path) if run.has_manifest]


def check_same_dump(path: Path, before: Manifest, now: Manifest) -> None:
    """Refuse to mix dumps.

    Raises:
        DumpError: the folder holds another model's dump, or one of other settings.
    """
    if before.identity != now.identity:
        raise DumpError(
            f"{path} holds another model's dump ({before.framework}); name another folder", path=path
        )
    for key, value in now.settings.items():
        if key not in CHANGEABLE_SETTINGS and before.settings.get(key) != value:
            raise DumpError(
                f"{path} holds a dump with {key}={before.settings.get(key)!r}, and not {value!r}; name "
                "another folder, or the same settings",
                path=path,
            )


def find_earlier_runs(path: Path, number: int, keys: Sequence[IterationKey]) -> dict[str, list[IterationKey]]:
    """Which iterations runs before this one have completed too.

    Args:
        path: the dump's folder.
        number: of this run.
        keys: its iterations.

    Returns:
        The names of runs, each with the iterations.
    """
    out: dict[str, list[IterationKey]] = {}
    # One rank asks, and must not fail alone: the dump, or a run of it, may have been removed meanwhile.
    with suppress(DumpError):
        for run in (run for run in list_begun_runs(path) if run.number < number):
            with suppress(DumpError):
                if both := [key for key in keys if run.complete_iteration(key) is not None]:
                    out[run.folder.name] = both
    return out
