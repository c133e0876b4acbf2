"""What is missing of a dump, as text: found by manifests and the names of files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from math import gcd
from pathlib import Path
from typing import Any

from megatron_flex.dump.file_names import parse_iteration_folder
from megatron_flex.dump.run_folders import (
    DumpRun,
    IterationKey,
    StoredIteration,
    describe_iteration,
    list_missing_parts,
    renamed_runs,
    scan_runs,
)
from megatron_flex.dump.schema import Manifest
from megatron_flex.errors import list_some
from megatron_flex.ranges import describe_numbers

MAX_DETAILED = 8  # iterations whose missing ranks are listed


def missing(path: Path, runs: Sequence[DumpRun], complete: Collection[IterationKey]) -> list[str]:
    """Runs without a manifest, and iterations that are incomplete or missing in all runs.

    Args:
        path: the dump's folder.
        runs: those that are read.
        complete: the iterations that are complete in some run.

    Raises:
        DumpError: a folder cannot be read.
    """
    known = {run.folder.name for run in runs}
    others = [run.folder.name for run in scan_runs(path) if run.folder.name not in known]
    out = [f"{name} has no manifest and cannot be read" for name in others]
    out += [renamed.text for renamed in renamed_runs(path)]
    for run in runs:
        for which in run.iteration_keys:
            if which not in complete:
                stored = run.iteration(which) if len(out) < MAX_DETAILED else None
                out.append(_describe(run, which, [] if stored is None else list(stored.missing())))
    text = describe_gaps(runs)
    out += [text] if text else []
    return out if complete else [*out, "no iteration is complete: nothing can be read yet"]


def lost(runs: Sequence[DumpRun], complete: Collection[IterationKey]) -> list[str]:
    """Iterations that are incomplete in all runs, though the writer continued after them: parts are lost.

    What a killed run was writing, and what the newest run may be writing still, is not among them.

    Raises:
        DumpError: a folder cannot be read.
    """
    out = []
    for run in runs:
        first = next((which for which in run.iteration_keys if which not in complete), None)
        if first is None:
            continue
        later = [run.iteration(which) for which in run.iteration_keys if which >= first]
        gone: dict[IterationKey, list[int]] = {}
        for absent in list_missing_parts(stored for stored in later if stored is not None):
            if absent.stored.key not in complete and not absent.stopped:
                gone.setdefault(absent.stored.key, []).append(absent.rank)
        out += [_describe(run, which, ranks) for which, ranks in gone.items()]
    return out


def replaced(runs: Sequence[DumpRun], complete: Mapping[IterationKey, StoredIteration]) -> list[str]:
    """The iterations of each run that are read from a later one, which has completed them too.

    Raises:
        DumpError: a folder cannot be read.
    """
    out = []
    for run in runs:
        later: dict[str, list[int]] = {}
        for which in run.iteration_keys:
            read = complete.get(which)
            if read is not None and read.run is not run and run.complete_iteration(which) is not None:
                later.setdefault(read.run.folder.name, []).append(which[0])
        for name, numbers in later.items():
            out.append(f"{describe_numbers('iteration', numbers)} of {run.folder.name} are read from {name}")
    return out


def _describe(run: DumpRun, which: IterationKey, ranks: Sequence[int]) -> str:
    text = f"{describe_iteration(which)} of {run.folder.name} is incomplete"
    return text + (f": parts of rank {list_some(ranks, 6)} are missing" if ranks else "")


MAX_GAPS = 1000  # iterations that are not there, of a run


def gaps(runs: Iterable[tuple[Manifest, Sequence[int]]]) -> list[int]:
    """Iterations that have no folder in any run: between the first and the last of a run, or between the last
    of a run and the first of the next one with the same settings.

    They were dropped, could not be written, were pruned, or somebody removed them: no file says which. Which
    iterations there should be is known by the settings, by what later runs left out as earlier ones had it,
    or else by the steps between the existing ones.

    Args:
        runs: the manifest of each, and the numbers of the iterations that have a folder in it; in the order
            of the runs.
    """
    several = [(manifest, set(numbers)) for manifest, numbers in runs]
    present = {number for _, numbers in several for number in numbers}
    out: set[int] = set()
    previous: tuple[Mapping[str, Any], list[int]] | None = None
    for manifest, numbers in several:
        skipped = {
            parsed[0] for name in manifest.skipped if (parsed := parse_iteration_folder(name)) is not None
        }
        out |= skipped - present
        settings, dumped = manifest.settings, sorted(numbers | skipped)
        if not dumped:
            continue
        expected = [_expected_iterations(settings, dumped, dumped[0], dumped[-1])]
        if previous is not None and _same_iterations(previous[0], settings):
            earlier = previous[1]
            # A run of one iteration does not say by which steps iterations follow one another.
            by = earlier if len(earlier) > 1 else dumped
            expected.append(_expected_iterations(settings, by, earlier[-1], dumped[0]))
        previous = settings, dumped
        out.update(islice((n for n in chain(*expected) if n not in present), MAX_GAPS))
    return sorted(out)


def _same_iterations(settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(settings.get(name) == other.get(name) for name in ("every", "iterations"))


def _expected_iterations(
    settings: Mapping[str, Any], numbers: Sequence[int], first: int, last: int
) -> Iterable[int]:
    """The iterations that a run with these numbers of iterations dumps, from `first` to `last`."""
    every, several = settings.get("every"), settings.get("iterations")
    every = every if type(every) is int and every > 0 else 1
    if isinstance(several, list):
        return [n for n in several if type(n) is int and first <= n <= last and n % every == 0]
    steps = every if every > 1 and several is None else gcd(*(n - numbers[0] for n in numbers))
    return range(first, last + 1, steps) if steps and (last - first) % steps == 0 else ()


def describe_gaps(runs: Iterable[DumpRun], most: int = 8) -> str:
    """One line that names the iterations missing in the runs with a manifest; empty where none is missing."""
    readable = [run for run in runs if not run.damage]
    numbers = gaps((run.manifest, [number for number, _ in run.iteration_keys]) for run in readable)
    if not numbers:
        return ""
    word, verb = ("iteration", "is") if len(numbers) == 1 else ("iterations", "are")
    listed = list_some(numbers, most)
    return f"{word} {listed} {verb} missing between others (skipped, pruned or deleted)"
