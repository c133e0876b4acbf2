"""The few settings that are not arguments. Each may be set in the environment before import."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
        adapters_off: names of other people's adapters that are not asked, with commas between
            (FLEX_ADAPTERS_OFF).
        agree_seconds: how long a rank waits for the others when hooks are compared (FLEX_AGREE_SECONDS).
        bucket_bytes: most bytes of one message of a rank; shards that are gathered travel together up to
            this, and a larger one alone (FLEX_BUCKET_BYTES).
        debug: whether each firing of a hook is told on stderr, with what it sent (FLEX_DEBUG=1: yes).
        debug_port: where `breakpoint()` listens on localhost instead of taking the terminal; 0 for any free
            port, -1 for none (FLEX_DEBUG_PORT).
        dry_run: whether editing functions that can do no harm are tried on a small tensor when they are
            registered (FLEX_DRY_RUN=0: no).
        dump_seconds: how long a dump waits for a disk that takes nothing (FLEX_DUMP_SECONDS).
        node: what ranks that share memory have in common, if not what the system says of it (FLEX_NODE).
        pending_bytes: read shards are sent to the leader at a microbatch's end once their wholes are
            together larger than this, and at the step's end otherwise (FLEX_PENDING_BYTES).
        progress: whether stderr shows how far long work is: -1 where it is a terminal, 0 never, 1 always, as
            plain lines where it is none (FLEX_PROGRESS).
        seed: where the random streams of editing functions start (FLEX_SEED).
        shared_bytes: how much shared memory the reads of one leader may take on a node; 0 for none, so that
            all reads are gathered (FLEX_SHARED_BYTES).
        shared_folder: where shared memory is (FLEX_SHARED_FOLDER).
        untested: whether versions of frameworks outside the tested range are hooked, with a warning
            (FLEX_UNTESTED=1: yes).
    """

    adapters_off: str = os.environ.get("FLEX_ADAPTERS_OFF", "")
    agree_seconds: float = _read_number("FLEX_AGREE_SECONDS", 60.0)
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
