"""`megatron-flex patch` and `scripts/patch_upstream`: add hook points and flags to source, or remove them."""

from __future__ import annotations

import argparse
import difflib
import io
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

from megatron_flex_patches import VERSION
from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.files import Change, applied, reverted, write
from megatron_flex_patches.finding import find

ABOUT = (
    "Write megatron_flex's hook points into Megatron's or fairscale's parallel layers, and its flags into "
    "launchers, or remove them again. Needs LibCST; neither torch nor the patched package is imported."
)
PATCHED, NOT_PATCHED, CANNOT = 0, 1, 2


def main(arguments: Sequence[str] | None = None, program: str = "patch_upstream") -> int:
    """Run the command.

    Args:
        arguments: the words after the command; None for those of `sys.argv`.
        program: the command as the user calls it, for messages.

    Returns:
        Its exit status: 0 if done (or all patched, of --check), 1 if --check found a file that is not
        patched, 2 if something cannot be done, which one line on stderr says; then nothing is written.
    """
    parser = argparse.ArgumentParser(prog=program, description=ABOUT, allow_abbrev=False)
    doing = parser.add_mutually_exclusive_group(required=True)
    doing.add_argument(
        "--check",
        action="store_true",
        help="list which files are patched; exit status 0 if all are, 1 if not, 2 on an error",
    )
    doing.add_argument("--diff", action="store_true", help="print the patch as a diff, and write nothing")
    doing.add_argument(
        "--apply",
        action="store_true",
        help="apply the patch; files that are patched already stay as they are",
    )
    doing.add_argument(
        "--revert",
        action="store_true",
        help="remove the patch; the original files are restored byte for byte",
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="a checkout's root, an installed package's folder, or a file",
    )
    args = parser.parse_args(arguments)
    try:
        targets = list(dict.fromkeys(t for path in args.paths for t in find(path)))
        changes = [(reverted if args.revert else applied)(t) for t in targets]
        if args.check:
            return _checked(changes)
        if args.diff:
            for change in changes:
                sys.stdout.write(_diff(change, _relative_path(change.path, args.paths)))
            return PATCHED
        write(changes)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        print(f"{program}: needs LibCST; pip install libcst, or megatron-flex[patches]", file=sys.stderr)
        return CANNOT
    except (PatchError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return CANNOT
    for change in changes:
        print(f"{_done(change, args.revert)}: {change.path}{_note(change)}")
    return PATCHED


def _checked(changes: list[Change]) -> int:
    for change in changes:
        print(f"{_state(change)}: {change.path}{_note(change)}")
    return PATCHED if all(c.nothing for c in changes) else NOT_PATCHED


def _state(change: Change) -> str:
    taken = change.taken
    if taken is None:
        return "not patched"
    if change.nothing:
        return "patched" if taken.untouched else "patched, and changed otherwise since"
    if taken.version < VERSION:
        return f"patched by an older version ({taken.version}, this is {VERSION})"
    return "patched, but the lines are not what they should be"


def _done(change: Change, reverting: bool) -> str:
    taken = change.taken
    if reverting:
        if taken is None:
            return "not patched"
        if taken.untouched:
            return "removed; the file is byte for byte what it was"
        return "removed; the file was changed otherwise since, and these changes stay"
    if change.nothing:
        return "patched already"
    return "patched" if taken is None else "patched anew"


def _note(change: Change) -> str:
    if change.target.installed:
        return " (of an installed package: installing it again takes the patch away)"
    return ""


def _relative_path(file: Path, given: Sequence[Path]) -> str:
    """The path for `git apply`: from the root of the file's repository, or from the folder that was given."""
    repositories = (folder for folder in file.parents if (folder / ".git").exists())
    folders = (folder for path in given if (folder := path.resolve()) in file.parents)
    root = next(repositories, None) or next(folders, file.parent)
    return file.relative_to(root).as_posix()


def _diff(change: Change, path: str) -> str:
    """As in `diff -u`; empty if nothing changes."""
    now, then = (_text(content).splitlines(keepends=True) for content in (change.now, change.then))
    lines = difflib.unified_diff(now, then, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _text(content: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding)
