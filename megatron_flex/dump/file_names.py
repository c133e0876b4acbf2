"""The names of a dump's folders and files, formatted and parsed; nothing else of the package spells them.

PATH/run-0000/manifest.json                            what all ranks have in common, once for each run
PATH/run-0000/.writers                                 empty; the writers of the run hold a lock on it
PATH/run-0000/0000000100/00003-000.safetensors         what rank 3 wrote of iteration 100, first part
PATH/run-0000/0000000100/00003-001-of-002.safetensors  the second, which is the last
PATH/run-0000/0000000100.1/                            a second run of the schedule in iteration 100
PATH/run-0000/0000000100/.00003-000.safetensors.tmp    a part that is being written
PATH/.run-PID-RANDOM.tmp/                              a run whose manifest is being written
PATH/.pruned-PID/                                      what is being removed
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from secrets import token_hex

MANIFEST_NAME = "manifest.json"
WRITERS_LOCK = ".writers"
DRAFT_SUFFIX = ".tmp"
RUN_DRAFT = re.compile(r"\.run-.*\.tmp")
PRUNED_PREFIX = ".pruned-"  # readers do not look into such a folder

_RUN_FOLDER = re.compile(r"run-([0-9]{4,18})")
_ITERATION_FOLDER = re.compile(r"([0-9]{10,18})(?:\.([0-9]{1,9}))?")
_PART = re.compile(r"([0-9]{5,12})-([0-9]{3,9})(?:-of-([0-9]{3,9}))?\.safetensors")


# A number has one spelling: a name that is not what the number is formatted as is not parsed.


def format_run_folder(number: int) -> str:
    """The folder of a run."""
    return f"run-{number:04d}"


def parse_run_folder(name: str) -> int | None:
    """The number of a run by the name of its folder; None for other names."""
    matched = _RUN_FOLDER.fullmatch(name)
    return int(matched[1]) if matched is not None and format_run_folder(int(matched[1])) == name else None


def format_iteration_folder(iteration: int, run_of: int = 0) -> str:
    """The folder of an iteration, or of a further run of the schedule in it."""
    return f"{iteration:010d}" + (f".{run_of}" if run_of else "")


def parse_iteration_folder(name: str) -> tuple[int, int] | None:
    """The number of an iteration, and which run of the schedule, by the name of its folder."""
    matched = _ITERATION_FOLDER.fullmatch(name)
    if matched is None:
        return None
    out = int(matched[1]), int(matched[2] or 0)
    return out if format_iteration_folder(*out) == name else None


def format_part_name(rank: int, part: int, parts: int = 0) -> str:
    """The file of a part; the last of a rank's iteration has how many there are in its name."""
    end = f"-of-{parts:03d}" if parts else ""
    return f"{rank:05d}-{part:03d}{end}.safetensors"


def parse_part_name(name: str) -> tuple[int, int, int] | None:
    """Rank, part and parts (0 in all but the last) by the name of a file; None for other files."""
    matched = _PART.fullmatch(name)
    if matched is None:
        return None
    out = int(matched[1]), int(matched[2]), int(matched[3] or 0)
    return out if format_part_name(*out) == name else None


def format_part_draft(name: str) -> str:
    """The file of a part until all of it is written."""
    return f".{name}{DRAFT_SUFFIX}"


def format_run_draft() -> str:
    """A folder for a run until its manifest is written; no other process has the name."""
    return f".run-{os.getpid()}-{token_hex(4)}{DRAFT_SUFFIX}"


def is_draft(path: Path) -> bool:
    """Whether a file is one that a writer has not finished."""
    return path.is_file() and path.name.endswith(DRAFT_SUFFIX)
