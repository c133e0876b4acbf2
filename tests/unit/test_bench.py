"""scripts/bench: the bytes that it counts, and flags that it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.support.messages import assert_names
from tests.support.pool import run_alone as run

SCRIPTS = Path(__file__).parents[2] / "scripts" / "measure"


def sends() -> tuple[dict[str, int], float]:
    """A rank of three calls each collective with 12 or 4 bytes."""
    import torch.distributed as dist

    sys.path.insert(0, str(SCRIPTS))
    from bench_sent import counting

    three, one = torch.zeros(3), torch.zeros(1)
    with counting() as sent:
        dist.all_reduce(three)
        dist.all_gather([torch.zeros(1) for _ in range(3)], one)
        dist.gather(one, [torch.zeros(1) for _ in range(3)] if dist.get_rank() == 0 else None, dst=0)
        dist.broadcast(three, src=1)
        dist.barrier()
    dist.all_reduce(three)  # no one counts any more
    return dict(sent.calls), sent.nbytes


def test_bytes_are_counted_where_they_leave() -> None:
    (calls, first), (_, second), (_, third) = run(3, sends)
    assert calls == {"all_reduce": 1, "all_gather": 1, "gather": 1, "broadcast": 1, "barrier": 1}
    each = 12 * 2 * 2 / 3 + 4 * 2
    assert (first, second, third) == (each, each + 4 + 24, each + 4)


def test_a_wrong_flag_is_named() -> None:
    command = [sys.executable, str(SCRIPTS / "bench.py"), "--hooks", "--tp", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert_names(done.stderr, "--tp 3", "--hidden", "48")
