"""Process-wide settings that are not arguments. Set them in the environment before the import."""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE_BYTES = 20_000_000  # maximum size of an HTML page, unless a larger one is requested


def _read_number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(
            f"environment variable {name}={text!r} must be a number; unset it or write one"
        ) from None


@dataclass
class FlexConfig:
    """Settings of the process.

    Attributes:
        adapters_off: names of third-party adapters to ignore, separated by commas (FLEX_ADAPTERS_OFF).
        agree_seconds: how long a rank waits for the others when hooks are compared, in seconds; 0 for the
            timeout of the default process group, and at least 600 (FLEX_AGREE_SECONDS).
        bucket_bytes: maximum bytes of one message of a rank; shards are gathered together up to this size,
            and a larger shard alone (FLEX_BUCKET_BYTES).
        debug: whether each call of a hook is logged to stderr, with what it sent (FLEX_DEBUG=1: yes).
        debug_port: the port where `breakpoint()` listens on localhost instead of using the terminal; 0 for
            any free port, -1 for none (FLEX_DEBUG_PORT).
        dry_run: whether editing functions that only compute are tried on a small tensor when they are
            registered (FLEX_DRY_RUN=0: no).
        dump_seconds: how long a dump waits for a disk that accepts no data, in seconds (FLEX_DUMP_SECONDS).
        node: identifies the ranks that share memory, where the system's answer is wrong (FLEX_NODE).
        pending_bytes: captured shards are sent to the leader at the end of a microbatch once their full
            tensors together exceed this size, and otherwise at the end of the step (FLEX_PENDING_BYTES).
        progress: whether progress is shown on stderr: -1 on a terminal only, 0 never, 1 always, as plain
            lines where it is not a terminal (FLEX_PROGRESS).
        seed: the seed of the random streams of editing functions (FLEX_SEED).
        shared_bytes: maximum shared memory for the reads of one leader on a node; 0 for none, so that all
            reads are gathered (FLEX_SHARED_BYTES).
        shared_folder: the folder for shared memory (FLEX_SHARED_FOLDER).
        untested: whether framework versions outside the tested range are hooked, with a warning
            (FLEX_UNTESTED=1: yes).
    """

    adapters_off: str = os.environ.get("FLEX_ADAPTERS_OFF", "")
    agree_seconds: float = _read_number("FLEX_AGREE_SECONDS", 0.0)
    bucket_bytes: int = int(_read_number("FLEX_BUCKET_BYTES", 256 << 20))
    debug: bool = _read_number("FLEX_DEBUG", 0) != 0
    debug_port: int = int(_read_number("FLEX_DEBUG_PORT", -1))
    dry_run: bool = _read_number("FLEX_DRY_RUN", 1) != 0
    dump_seconds: float = _read_number("FLEX_DUMP_SECONDS", 120.0)
    node: str = os.environ.get("FLEX_NODE", "")
    pending_bytes: int = int(_read_number("FLEX_PENDING_BYTES", 1 << 30))
    progress: int = int(_read_number("FLEX_PROGRESS", -1))
    seed: int = int(_read_number("FLEX_SEED", 0))
    shared_bytes: int = int(_read_number("FLEX_SHARED_BYTES", 4 << 30))
    shared_folder: str = os.environ.get("FLEX_SHARED_FOLDER", "/dev/shm")
    untested: bool = _read_number("FLEX_UNTESTED", 0) != 0


flex_config = FlexConfig()
