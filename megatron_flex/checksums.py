"""Checksums of a dump: one for each block of a tensor, and one inside each header and JSON file.

All are XXH3-64, written as 16 hexadecimal digits, the most significant first. Checksums detect damage; they
do not protect against intended changes.
"""

from __future__ import annotations

import re

from xxhash import xxh3_64_hexdigest

# Bytes in one block, which has one checksum; the last block of a tensor may be shorter. xxhash holds the GIL
# for inputs of up to 64 KiB, and releases it for larger ones.
CHECKSUM_BLOCK = 1 << 17
CHECKSUM_DIGITS = 16
ZERO_CHECKSUM = b"0" * CHECKSUM_DIGITS
SEAL_REACH = 256  # bytes; a checksum of a JSON text lies that near to its front
_SEAL = re.compile(rb'"checksum": ?"([0-9a-f]{16})"')


def compute_checksum(data: bytes | memoryview) -> str:
    """The checksum of some bytes."""
    return xxh3_64_hexdigest(data)


def compute_block_checksums(data: memoryview) -> str:
    """The checksums of the blocks of a tensor's bytes, one after the other; of no bytes nothing."""
    return "".join(
        xxh3_64_hexdigest(data[at : at + CHECKSUM_BLOCK]) for at in range(0, len(data), CHECKSUM_BLOCK)
    )


def combine_block_checksums(blocks: str) -> str:
    """Return the checksum of a tensor: the checksum of the text of its blocks' checksums."""
    return xxh3_64_hexdigest(blocks.encode())


def get_block_checksum(blocks: str, number: int) -> str:
    """The checksum of one block among those of a tensor."""
    return blocks[number * CHECKSUM_DIGITS : (number + 1) * CHECKSUM_DIGITS]


def count_checksum_blocks(nbytes: int) -> int:
    """Return the number of blocks of so many bytes."""
    return -(-nbytes // CHECKSUM_BLOCK)


def seal_json(text: bytes) -> bytes:
    """Return a JSON text with its `checksum`, zeros in the argument, set to the argument's checksum.

    Raises:
        ValueError: the text has no place for a checksum near its start.
    """
    at = _find_seal(text)
    return text[:at] + compute_checksum(text).encode() + text[at + CHECKSUM_DIGITS :]


def is_sealed(text: bytes) -> bool:
    """Return whether the checksum in a JSON text is correct.

    Raises:
        ValueError: the text has no checksum near its start.
    """
    at = _find_seal(text)
    return (
        compute_checksum(text[:at] + ZERO_CHECKSUM + text[at + CHECKSUM_DIGITS :]).encode()
        == text[at : at + CHECKSUM_DIGITS]
    )


def _find_seal(text: bytes) -> int:
    matched = _SEAL.search(text, 0, SEAL_REACH)
    if matched is None:
        raise ValueError("it has no checksum")
    return matched.start(1)
