"""The folder of a new run: created beside the earlier runs of the same dump."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import NamedTuple

from megatron_flex.dump.part_format import format_run_folder, list_complete_parts
from megatron_flex.dump.schema import MANIFEST_NAME, Manifest
from megatron_flex.dump.writer.part_writer import sync_folder
from megatron_flex.errors import DumpError

VISIBLE_SECONDS = 120.0  # a network's file system may show a new folder after its caches expire, in 60 s
CHANGEABLE_SETTINGS = ("every", "iterations")  # settings in which runs of one dump may differ


RUN_NAME = re.compile(r"run-[0-9]{4,}")


TEMPORARY_RUN_NAME = re.compile(r"\.run-.*\.tmp")  # a run that was being opened


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
        earlier = list(list_begun_runs(path))
        foreign = [
            f.name
            for f in path.iterdir()
            if not (RUN_NAME.fullmatch(f.name) or TEMPORARY_RUN_NAME.fullmatch(f.name))
        ]
        if foreign and not earlier:
            raise DumpError(
                f"{path} is not a dump, and not empty ({min(foreign)!r}); name another folder", path=path
            )
        for folder in earlier:
            check_same_dump(path, Manifest.read(folder), manifest)
        return _create_run_folder(path, manifest)
    except OSError as error:
        raise DumpError(
            f"{path}: no dump can be written there: {error.strerror or error}", path=path
        ) from error
    except (ValueError, TypeError) as error:  # raised on one rank; other ranks must learn of it
        raise error if isinstance(error, DumpError) else DumpError(f"{path}: {error}", path=path) from error


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
    rough = path / f".run-{os.getpid()}-{token_hex(4)}.tmp"
    rough.mkdir()
    try:
        number = max((int(f.name[4:]) for f in path.iterdir() if RUN_NAME.fullmatch(f.name)), default=-1) + 1
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


def list_begun_runs(path: Path) -> Iterator[Path]:
    """The folders of runs that have begun, in order."""
    folders = sorted(
        (f for f in path.glob("run-*") if RUN_NAME.fullmatch(f.name)), key=lambda f: int(f.name[4:])
    )
    return (f for f in folders if (f / MANIFEST_NAME).exists())


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


def find_earlier_runs(path: Path, run: int, names: Sequence[str]) -> dict[str, list[str]]:
    """Which iterations runs before this one have completed too.

    Args:
        path: the dump's folder.
        run: the number of this run.
        names: of the folders of its iterations.

    Returns:
        The names of runs, each with those of the iterations.
    """
    out: dict[str, list[str]] = {}
    for folder in list_begun_runs(path):
        if int(folder.name[4:]) >= run:
            break
        with suppress(OSError, DumpError):  # a run that was removed meanwhile, or cannot be read
            ranks = list(Manifest.read(folder).writers)
            both = [
                n
                for n in names
                if (folder / n).is_dir() and list_complete_parts(folder / n, ranks) is not None
            ]
            if both:
                out[folder.name] = both
    return out
