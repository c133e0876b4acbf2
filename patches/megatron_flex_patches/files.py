"""Files read, planned and written: all of them or none."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_flex_patches import VERSION
from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.finding import Target
from megatron_flex_patches.lines import Taken, is_patched, put_in, same_patch, take_out


@dataclass(frozen=True)
class Change:
    """A file and its planned change.

    Attributes:
        target: the file.
        now: its current content.
        then: its new content; the same if nothing changes.
        taken: the patch that was removed; None if there was none.
    """

    target: Target
    now: bytes
    then: bytes
    taken: Taken | None

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.target.path

    @property
    def nothing(self) -> bool:
        """Whether the file is unchanged."""
        return self.now == self.then


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Add the file to the start of an error."""
    try:
        yield
    except PatchError as error:
        raise PatchError(f"{path}: {error}") from error
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror or error}") from error


def applied(target: Target) -> Change:
    """The file with the patch; an older patch is replaced, the same one kept.

    Raises:
        PatchError: an anchor is not there, or a patch in it is damaged or newer than this one.
    """
    with told(target.path):
        now = target.path.read_bytes()
        taken = _taken(now)
        before = taken.before if taken else now
        then = put_in(before, target.insertions(before))
        kept = taken is not None and taken.version == VERSION and same_patch(now, then)
        return Change(target, now, now if kept else then, taken)


def reverted(target: Target) -> Change:
    """The file without the patch.

    Raises:
        PatchError: the patch in it is damaged or newer than this one.
    """
    with told(target.path):
        now = target.path.read_bytes()
        taken = _taken(now)
        return Change(target, now, taken.before if taken else now, taken)


def _taken(content: bytes) -> Taken | None:
    taken = take_out(content) if is_patched(content) else None
    if taken is not None and taken.version > VERSION:
        raise PatchError(
            f"has version {taken.version} of the patch, and this is version {VERSION}; take it out with the "
            "megatron_flex that put it in"
        )
    return taken


def write(changes: Iterable[Change]) -> None:
    """Replace the files, each atomically and with its mode; if one fails, none is replaced.

    Raises:
        PatchError: a file may not be written.
    """
    changes = [c for c in changes if not c.nothing]
    for change in changes:
        with told(change.path):
            _may_write(change.path)
    staged: list[tuple[Change, Path]] = []
    done: list[Change] = []
    try:
        for change in changes:
            with told(change.path):
                staged.append((change, _beside(change.path, change.then)))
        for change, new in staged:
            with told(change.path):
                if change.path.read_bytes() != change.now:
                    raise PatchError("was changed meanwhile; nothing is written, start again")
                os.replace(new, change.path)
                done.append(change)
    except PatchError:
        for change in done:
            os.replace(_beside(change.path, change.now), change.path)
        raise
    finally:
        for _, new in staged:
            new.unlink(missing_ok=True)


def _may_write(path: Path) -> None:
    mode = path.stat().st_mode
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(path, os.W_OK):
        raise PatchError("may not be written; make it writable (chmod u+w), or patch a copy")
    if not os.access(path.parent, os.W_OK):
        raise PatchError("is in a folder that may not be written; patch a copy")


def _beside(path: Path, content: bytes) -> Path:
    """A new file in the same folder with the content, and with the mode and owner of `path`."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    new, like = Path(name), path.stat()
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if (new.stat().st_uid, new.stat().st_gid) != (like.st_uid, like.st_gid):
            os.chown(new, like.st_uid, like.st_gid)
        new.chmod(stat.S_IMODE(like.st_mode))
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return new
