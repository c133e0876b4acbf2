"""Opening a dump to write: which run of the folder this is, and whether it belongs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_flex.dump.files import run_folder, whole_parts
from megatron_flex.dump.manifest import Manifest
from megatron_flex.errors import DumpError

FREE = ("every", "iterations")  # settings in which runs of one dump may differ


def open_run(path: Path, manifest: Manifest) -> Manifest:
    """Make the folder of a new run. One rank calls it.

    Args:
        path: the dump's folder.
        manifest: what the run says of itself; its number and what it skips are found here.

    Returns:
        The manifest as it was written.

    Raises:
        DumpError: the folder holds another model's dump or one of other settings, or cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not any(runs(path)) and any(path.iterdir()):
            raise DumpError(f"{path} is not empty, and no dump; name another folder")
        skipped: set[str] = set()
        for folder in runs(path):
            before = Manifest.read(folder)
            check_same(path, before, manifest)
            skipped |= whole_iterations(folder, before)
        number = sum(1 for _ in path.glob("run-*"))
        while True:
            folder = path / run_folder(number)
            try:
                folder.mkdir()
                break
            except FileExistsError:
                number += 1
        manifest = replace(manifest, run=number, skipped=tuple(sorted(skipped)))
        manifest.write(folder)
    except OSError as error:
        raise DumpError(f"{path}: no dump can be written there: {error.strerror or error}") from error
    return manifest


def runs(path: Path) -> Iterator[Path]:
    """The folders of runs that have begun, in order."""
    return (f for f in sorted(path.glob("run-*")) if (f / "manifest.json").exists())


def check_same(path: Path, before: Manifest, now: Manifest) -> None:
    """Refuse to mix dumps.

    Raises:
        DumpError: the folder holds another model's dump, or one of other settings.
    """
    if before.identity != now.identity:
        raise DumpError(f"{path} holds another model's dump ({before.framework}); name another folder")
    for key, value in now.settings.items():
        if key not in FREE and before.settings.get(key) != value:
            raise DumpError(
                f"{path} holds a dump with {key}={before.settings.get(key)!r}, and not {value!r}; name "
                "another folder, or say the same"
            )


def whole_iterations(folder: Path, manifest: Manifest) -> set[str]:
    """The names of a run's iterations that every rank has closed; a damaged part does not count."""
    out = set()
    for iteration in folder.iterdir():
        if iteration.is_dir() and whole_parts(iteration, [rank for rank, _ in manifest.ranks]):
            out.add(iteration.name)
    return out
