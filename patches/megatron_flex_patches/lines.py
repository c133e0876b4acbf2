"""Insertion of complete lines into a file, and their removal, byte for byte.

Every line of ours ends in MARK. The first of them says which version of the patch it is, how many lines
there are, and what the file was before. Nothing else in the file is touched, line ends and encoding included.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from megatron_flex_patches import VERSION
from megatron_flex_patches.errors import PatchError

MARK = b"# <megatron_flex>"
BOM = b"\xef\xbb\xbf"
HEADER = re.compile(rb"# megatron_flex patch (\d+), (\d+) lines, on sha256:([0-9a-f]{64})")
MARKED = re.compile(re.escape(MARK) + rb"[ \t]*(\r\n|\r|\n)?\Z")


@dataclass(frozen=True)
class Insertion:
    """Lines to insert into a file.

    Attributes:
        before: the number of the line before which they are inserted, from 1.
        indent: the indentation of each line.
        text: the lines, without ends; deeper ones begin with further indentation.
    """

    before: int
    indent: bytes
    text: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """A parsed patched file.

    Attributes:
        before: the file without the inserted lines.
        version: the version of the patch.
        untouched: whether it is byte for byte the file before the patch.
    """

    before: bytes
    version: int
    untouched: bool


def split(content: bytes) -> list[bytes]:
    """The lines with their ends, as Python counts them."""
    return content.splitlines(keepends=True)


def is_patched(content: bytes) -> bool:
    """Whether there is an inserted line."""
    return any(MARKED.search(line) for line in split(content))


def put_in(content: bytes, insertions: list[Insertion]) -> bytes:
    """The file with the lines in it.

    Raises:
        PatchError: there is no line after the position of an insertion.
    """
    start = BOM if content.startswith(BOM) else b""
    lines = split(content.removeprefix(BOM))
    count = 1 + sum(len(i.text) for i in insertions)
    before = hashlib.sha256(content).hexdigest()
    header = f"# megatron_flex patch {VERSION}, {count} lines, on sha256:{before}"
    out, done = [start], 0
    for number, one in enumerate(sorted(insertions, key=lambda i: i.before)):
        if one.before > len(lines):
            raise PatchError(f"nothing is behind line {len(lines)}; end the file with a newline and a line")
        out += lines[done : one.before - 1]
        done = one.before - 1
        end = lines[done][len(lines[done].rstrip(b"\r\n")) :] or _end(lines)
        text = (header, *one.text) if number == 0 else one.text
        out += [one.indent + line.encode("ascii") + b"  " + MARK + end for line in text]
    return b"".join([*out, *lines[done:]])


def _end(lines: list[bytes]) -> bytes:
    """The line ending of the file, for a line without one."""
    first = lines[0]
    return first[len(first.rstrip(b"\r\n")) :] or b"\n"


def take_out(content: bytes) -> Taken:
    """The file without the lines.

    Raises:
        PatchError: they are not all there, or not as they were written.
    """
    start = BOM if content.startswith(BOM) else b""
    lines = split(content.removeprefix(BOM))
    ours = [line for line in lines if MARKED.search(line)]
    found = [m for line in ours if (m := HEADER.search(line))]
    if len(found) != 1:
        raise PatchError(
            f"has {len(ours)} lines of a patch and {len(found)} lines that tell of it; take the lines that "
            f"end in {MARK.decode()} out by hand, or get the file from version control"
        )
    version, count, before = int(found[0][1]), int(found[0][2]), found[0][3].decode()
    if len(ours) != count:
        raise PatchError(
            f"has {len(ours)} of the {count} lines of the patch, the others were reformatted or merged; take "
            "them out by hand, or get the file from version control"
        )
    rest = start + b"".join(line for line in lines if not MARKED.search(line))
    return Taken(rest, version, hashlib.sha256(rest).hexdigest() == before)


def same_patch(left: bytes, right: bytes) -> bool:
    """Whether two files differ at most in the header's hash of the original."""
    return HEADER.sub(b"", left) == HEADER.sub(b"", right)
