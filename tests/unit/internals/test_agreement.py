"""Ranks that compare and meet through the store: late ranks, ranks that end, and counts that race."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flex.collectives import (
    Agreement,
    agreement_seconds,
    max_over_ranks,
    rank_agreement,
    rank_liveness,
)
from megatron_flex.collectives.store_round import StoreRound
from megatron_flex.errors import HookError
from megatron_flex.layout import Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.layout_inference import LayoutInference
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import RankError, run
from tests.support.rank import changes

HOOKS = "forward on decoder.layers.0"


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except HookError as error:
        return str(error)
    return ""


def late(tries: int, folder: str) -> list[str]:
    """Rank 0 compares `tries` times in vain before rank 1 comes; then both compare twice more."""
    mark, agreement = Path(folder, "gave up"), Agreement("late", 1.0)
    found = []
    if dist.get_rank() == 0:
        found += [outcome(lambda: agreement.compare(HOOKS)) for _ in range(tries)]
        mark.touch()
    else:
        while not mark.exists():
            time.sleep(0.01)
        found.append(outcome(lambda: agreement.compare(HOOKS)))
    agreement.seconds = 60.0
    found += [outcome(lambda: agreement.compare(HOOKS)) for _ in range(2)]
    return found


@pytest.mark.parametrize("tries", [1, 3])
def test_a_rank_that_comes_late(tries: int, tmp_path: Path) -> None:
    first, other = run(2, late, tries, str(tmp_path))
    assert len(first) == tries + 2
    for text in first[:tries]:
        assert_names(text, "rank 1", "1 s", "flex.step()")
    assert_names(other[0], "rank 0", "rank 1", HOOKS, "1 s", "FLEX_AGREE_SECONDS")
    assert first[tries:] == other[1:] == ["", ""], "all ranks begin the next comparison together"


def racing(threads: int) -> list[int | None]:
    """Many ranks lower one number at the same time; each is a thread here."""
    store = rank_liveness.rank_liveness().store
    steps = list(range(100, 100 + threads))
    found = []
    for turn in range(20):
        at = StoreRound(store, f"race/{turn}", 2, dist.get_rank())
        workers = [
            threading.Thread(target=at.announce_wait, args=("place", s))
            for s in steps[turn % threads :] + steps[: turn % threads]
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        dist.barrier()
        found.append(at.find_waiting("place"))
        dist.barrier()
    return found


def test_the_least_step_is_stored_whoever_comes_last() -> None:
    for found in run(2, racing, 4):
        assert found == [100] * 20


def ending(how: str, folder: str) -> None:
    """Rank 1 ends between its last step and `restore()`; the others write what they are told, and when."""
    changes.setattr(rank_agreement, "MIN_WAIT", 600.0)
    agreement = Agreement("ending", agreement_seconds())
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "says so":
            rank_liveness.rank_liveness().tell_end("it raised KeyboardInterrupt")
            time.sleep(3600)
        os._exit(7)
    begun = time.monotonic()
    text = outcome(lambda: agreement.barrier("restore()", "after step 3", (3, 0)))
    Path(folder, str(dist.get_rank())).write_text(f"{time.monotonic() - begun} {text}")
    os._exit(0)


@pytest.mark.parametrize(("how", "why"), [("dies", rank_liveness.KILLED), ("says so", "KeyboardInterrupt")])
def test_a_rank_that_ends_is_noticed_within_a_minute(how: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run(3, ending, how, str(tmp_path), timeout=60, alone=True)
    for rank in (0, 2):
        seconds, _, text = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 50, "a collective would wait for half an hour"
        assert_names(text, "rank 1", why, "restore()")


def waits() -> tuple[float, float]:
    default = agreement_seconds()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=20), dist.group.WORLD)
    return default, agreement_seconds()


def test_ranks_wait_as_long_as_collectives_and_ten_minutes_at_least() -> None:
    (most, least), _ = run(2, waits, alone=True)
    assert least == 600
    assert most >= 600


class Registry:
    """Hooks whose tensors the ranks compare."""

    expects, compares = False, True


def inferring(differs_on: int) -> tuple[str, list[int]]:
    """What ranks (cp, tp) conclude where the tensors of one tp rank differ along cp, and a later exchange."""
    rank = dist.get_rank()
    cp, tp = divmod(rank, 2)
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
    along = (tp, tp + 2), (2 * cp, 2 * cp + 1)
    mesh = Mesh(
        (
            Axis("pp", 1, 0, None, (rank,)),
            Axis("dp", 1, 0, None, (rank,)),
            Axis("cp", 2, cp, groups[along[0]], along[0]),
            Axis("tp", 2, tp, groups[along[1]], along[1]),
        )
    )
    inference = LayoutInference(Registry(), None, mesh)  # type: ignore[arg-type]
    local = torch.ones(4, 4) * (1 + cp if tp == differs_on else 1)
    inference.note_layout("act:output", Layout((Dim("s"), Dim("h"))), local)
    at = "the end of a step, in step 0"
    return inference.compare(), max_over_ranks([int(rank == 3)], mesh, at)


@pytest.mark.parametrize("differs_on", [0, 1])
def test_ranks_that_infer_differently_stay_together(differs_on: int) -> None:
    answers = run(4, inferring, differs_on)
    assert [after for _, after in answers] == [[1]] * 4, "no rank is at another exchange"
    named = [text for text, _ in answers if text]
    assert len(named) >= 2
    for text in named:
        assert_names(text, "act:output", "expected_shape")


def interrupted(case: Case, folder: str) -> None:
    """Rank 1 is interrupted inside a step, restores the model and ends; rank 0 waits for it in the model."""
    import megatron_flex as mf

    changes.setattr(rank_agreement, "FAILED_MEETING", 2.0)
    rank, chunks = dist.get_rank(), ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction("decoder.layers.*")])
    gpt.step(case, chunks, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = chunks[0].register_forward_pre_hook(interrupt) if rank == 1 else None
    begun, errors = time.monotonic(), []
    for call in (lambda: gpt.step(case, chunks, 0), flex.restore):
        try:
            call()
        except (KeyboardInterrupt, Exception) as error:
            errors.append(f"{type(error).__name__}: {error}")
    del handle
    Path(folder, str(rank)).write_text("\n".join([str(time.monotonic() - begun), *errors]))
    os._exit(3)


def test_an_interrupted_rank_ends_and_the_others_notice(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(RankError):
        run(2, interrupted, Case("tp2", tp=2, layers=1), str(tmp_path), timeout=60, alone=True)
    waited, step, restored = (tmp_path / "1").read_text().splitlines()
    assert step.startswith("KeyboardInterrupt")
    assert_names(restored, "HookError", "rank 0", "2 s", "restore()")
    assert float(waited) < 50, "it would wait for half an hour for a rank that waits for it"
    waited, step, restored = (tmp_path / "0").read_text().splitlines()
    assert step.startswith("RuntimeError"), "gloo's, as the connection is closed"
    assert_names(restored, "HookError", "rank 1", "restore()")
    assert float(waited) < 50
