"""The first call of a kind is followed, and no other."""

from __future__ import annotations

import time

import pytest

import megatron_flex as mf
from tests.distributed.test_following import followed
from tests.support import fairscaled, llama
from tests.support.pool import run

pytest.importorskip("fairscale")


def _times() -> tuple[list[float], list[int]]:
    """Milliseconds of calls that are followed and of others, and how many marks there were."""
    model = fairscaled.llama_of(2)
    tokens, _ = llama.batch(0)
    times = []
    with followed(model, 2) as flex:
        flex.register_forward_hook(mf.HookFunction("layers.1:output"))
        for _ in range(5):
            start = time.perf_counter()
            model(tokens)
            times.append(1e3 * (time.perf_counter() - start))
        answers = flex.session.adapter.propagator._answers
    return times, [len(a) for a in answers.values()]


def test_one_call_is_followed() -> None:
    times, kinds = run(2, _times)[0]
    print("milliseconds of calls, the first of which was followed:", [round(t, 2) for t in times])
    assert kinds == [1]
