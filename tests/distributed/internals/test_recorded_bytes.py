"""How much of a tensor a rank records for a selection."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron_flex.runtime.recorder import Recorder
from tests.distributed.test_selecting import WIDTH, WISHES, step_with
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes
from tests.support.wishes import wished

pytest.importorskip("megatron.core")


def recorded(case: Case) -> dict[str, int]:
    """Of each selection the bytes that this rank records in a microbatch."""
    chunks = ranks.start(case)
    taken: list[int] = []
    shard = Recorder.shard

    def noted(self: Any, key: Any, local: Tensor, *more: Any, **named: Any) -> None:
        taken.append(local.nbytes)
        shard(self, key, local, *more, **named)

    changes.setattr(Recorder, "shard", noted)
    out = {}
    for name in WISHES:
        taken.clear()
        step_with(case, chunks, wished({name: WISHES[name]}, "forward"))
        out[name] = taken[0]
    return out


def test_no_more_is_recorded_than_was_selected() -> None:
    s, b, h = gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN
    shard = 2 * gpt.FFN // 2
    entries = {
        "last": b * h,
        "few": 3 * h,
        "every": 4 * b * h,
        "neurons": s * b * 12,  # the rank that has most of them
        "head": s * b * WIDTH,
        "keys": s * b * WIDTH,
        "packed": s * b * WIDTH,
        "scores": b * s,
        "partial": b * h,
        "mean": b * h,
        "both": shard // shard * shard,
        "norm": s * b,
        "norms": b * h,
        "summed": 2 * b * h,
        "halves": b * h,
        "dot": s * b,
        "dots": 2 * b * 3,
        "upon": s * b * h,
        "loss": s,
        "top": 2 * b * (gpt.VOCABULARY // 2),  # of 8 bytes each
        "low": 2 * 3 * b * h,
    }
    for answer in run(2, recorded, Case("tp2", tp=2, layers=2)):
        assert {n: answer[n] for n in entries} == {n: 4 * count for n, count in entries.items()}
