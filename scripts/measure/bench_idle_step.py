"""What valgrind runs for scripts/bench --idle: steps of a Megatron GPT on one rank, each counted by itself.

Instrumentation is off while Python and Megatron are imported, which would take many minutes under it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys

import torch.distributed as dist


def main(library: str, steps: int) -> None:
    """Run `steps` counted steps with nothing attached, attached and idle, and detached, in this order."""
    counter = ctypes.CDLL(library)
    import megatron_flex as mf
    from tests.support import gpt, ranks
    from tests.support.gpt import Case

    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    case = Case("idle", layers=2)
    chunks = ranks.start(case)
    gc.collect()
    gc.disable()  # else a collection falls into one step or another

    def counted(what: str) -> None:
        gpt.step(case, chunks, 0)
        for _ in range(steps):
            counter.begin()
            gpt.step(case, chunks, 0)
            counter.end(what.encode())

    counted("none")
    flex = mf.attach(chunks)
    counted("idle")
    flex.restore()
    counted("detached")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
