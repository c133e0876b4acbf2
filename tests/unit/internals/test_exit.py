"""A process ends after a collective, while a worker thread of gloo still holds the tensors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flex.collectives import gloo_workers
from tests.support import gpt, pages, ranks
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

QUEUED = (  # what gloo's worker threads run; messages are sent by the thread that calls
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("broadcast", "reduce", "gather", "all_to_all_single", "reduce_scatter_tensor"),
)
# A daemon thread is ended as soon as the interpreter finalizes, and says nothing any more.
SCRIPT = """
import threading
import time
import torch
import torch.distributed as dist
from megatron_flex.collectives.gloo_workers import run_collective

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
works = [run_collective(dist.all_reduce, torch.ones(3), async_op=True)]

def release():
    time.sleep(1)
    works.clear()
    print("released", flush=True)

threading.Thread(target=release, daemon=True).start()
"""


def test_the_interpreter_ends_after_the_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "released\n"), done.stderr


def lending(waits: float) -> Any:
    """What exists of a collective's tensor while Python holds the work, and after the wait of the exit."""
    changes.setattr(gloo_workers, "EXIT_SECONDS", waits)
    tensor = torch.ones(3)
    works = [gloo_workers.run_collective(dist.all_reduce, tensor, async_op=True)]
    works[0].wait()
    (view,) = [r for r in gloo_workers._lent if r() is not None]
    held = view() is not None
    release = threading.Timer(0.5, works.clear)
    release.start()
    gloo_workers._await_workers()
    after = view() is not None
    release.join()
    return tensor.tolist(), held, after


@pytest.mark.parametrize(("waits", "after"), [(60.0, False), (0.0, True)])
def test_the_exit_waits_for_the_tensors_of_collectives(waits: float, after: bool) -> None:
    for tensor, held, then in run(2, lending, waits):
        assert tensor == [2.0] * 3
        assert held
        assert then is after


def watch_callers() -> set[str]:
    """The modules that call queued collectives from now on, a set that grows."""
    callers = set()

    def watched(call: Any) -> Any:
        @wraps(call)
        def watch(*args: Any, **kwargs: Any) -> Any:
            callers.add(sys._getframe(1).f_globals["__name__"])
            return call(*args, **kwargs)

        return watch

    for name in QUEUED:
        if hasattr(dist, name):
            changes.setattr(dist, name, watched(getattr(dist, name)))
    return callers


def calling(case: Case) -> set[str]:
    """The modules of ours that call queued collectives in steps with all kinds of hooks."""
    import megatron_flex as mf

    chunks, callers = ranks.start(case), watch_callers()
    hooks = [
        mf.HookFunction("decoder.layers.*"),
        mf.HookFunction("decoder.layers.*", hook_type="full_backward"),
        mf.HookFunction("decoder.layers.0.mlp.linear_fc1", editing_function=mf.edits.scale(2.0)),
        mf.HookFunction("decoder.layers.0", editing_function=lambda m, x, c, s: x - x.mean(0), run="once"),
    ]
    with mf.attach(chunks, hooks, verify=True) as flex:
        gpt.step(case, chunks, 0)
        for _ in flex.named_full_parameters():
            pass
    return {name for name in callers if name.startswith("megatron_flex.")}


def test_every_queued_collective_is_waited_for() -> None:
    pytest.importorskip("megatron.core")
    for callers in run(4, calling, Case("tp2 pp2", tp=2, pp=2, layers=2)):
        assert callers == {gloo_workers.__name__}


def gathering_unequal_shards() -> tuple[set[str], list[list[float]], list[float]]:
    """The modules of ours that call queued collectives for shards of unequal size; and what they give."""
    from megatron_flex import cpu

    cpu.enable()
    callers, rank = watch_callers(), dist.get_rank()
    gathered = [torch.zeros(1), torch.zeros(2)]
    dist.all_gather(gathered, torch.full((1 + rank,), 1.0 + rank))
    total = torch.zeros(1 + rank)
    dist.reduce_scatter(total, [torch.ones(1), torch.ones(2)])
    ours = {name for name in callers if name.startswith("megatron_flex.")}
    return ours, [t.tolist() for t in gathered], total.tolist()


def test_collectives_for_shards_of_unequal_size_are_waited_for() -> None:
    for rank, (callers, gathered, total) in enumerate(run(2, gathering_unequal_shards)):
        assert callers == {gloo_workers.__name__}
        assert gathered == [[1.0], [2.0, 2.0]]
        assert total == [2.0] * (1 + rank)
