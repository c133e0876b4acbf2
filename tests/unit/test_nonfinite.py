"""Ranges of tensors on a simulated accelerator, and the verdict on the passes of several ranks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import megatron_flex as mf
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.nonfinite import Candidate, Neighbourhood, PassRange, pass_ranges, reach_verdict
from megatron_flex.nonfinite.pass_ranges import PassRanges, RangeQueue
from tests.support.accelerator import CUDA, simulated
from tests.support.messages import any_names, assert_names

NAN, INF = float("nan"), float("inf")
MESH = Mesh((Axis("tp", 2, 1, None, (0, 1)),))
LAYOUT = Layout((Dim("s"), Dim("h", (Cut("tp"),))))


def tensors(device: str) -> list[torch.Tensor]:
    out = [torch.full((3, 4), float(n), device=device) for n in range(4)]
    out[2][1, 3] = NAN
    out[2][2, 0] = INF
    out[3][0, 0] = NAN  # a consequence
    return out


def take_all(queue: RangeQueue, shards: list[torch.Tensor], layout: Layout = LAYOUT) -> list[PassRange]:
    into = PassRanges()
    for number, shard in enumerate(shards):
        queue.take(into, f"site{number}", 0, shard, layout)
    queue.finish()
    return into.ranges


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_entries_are_those_of_the_full_tensor(device: str) -> None:
    with simulated() as recording:
        ranges = take_all(RangeQueue(MESH), tensors(device))
        assert [r.finite for r in ranges] == [True, True, False, False]
        assert [(r.low, r.high) for r in ranges[:2]] == [(0.0, 0.0), (1.0, 1.0)]
        found = ranges[2].located
        assert found is not None
        assert (found.nans, found.infinities, found.entries) == (1, 1, 12)
        assert (found.indices, found.full, found.shape) == (((1, 7), (2, 4)), True, (3, 8))
        assert ranges[3].located is None
        assert recording.violations == []


def test_a_tensor_that_is_overwritten_before_its_range_arrives_has_no_entries() -> None:
    with simulated():
        queue, into, shard = RangeQueue(MESH), PassRanges(), tensors(CUDA)[2]
        queue.take(into, "site", 0, shard, LAYOUT)
        shard.zero_()
        queue.finish()
    (known,) = into.ranges
    assert not known.finite
    assert known.located is None
    assert into.neighbourhood == {}


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_ranges, "MAX_HELD_BYTES", 3 * 4 * 4)
    with simulated():
        queue, into = RangeQueue(MESH), PassRanges()
        for number, shard in enumerate(tensors(CUDA)):
            queue.take(into, f"site{number}", 0, shard, LAYOUT)
            assert queue.held <= 3 * 4 * 4
        queue.finish()
        assert [r.finite for r in into.ranges] == [True, True, False, False]
        assert queue.held == 0


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_pass_holds_no_tensor_when_another_follows(device: str) -> None:
    with simulated():
        queue, passes, shards = RangeQueue(MESH), [], []
        for microbatch in range(8):
            passes.append(PassRanges())
            shard = torch.full((3, 4), float(microbatch), device=device)
            shards.append(weakref.ref(shard))
            queue.take(passes[-1], "site", 0, shard, LAYOUT)
        del shard
        if device == CUDA:  # what the host has asked for twice has happened
            queue._settle(arrived=False)
            queue._settle(arrived=False)
        gc.collect()
        assert sum(ref() is not None for ref in shards) <= pass_ranges.RECENT + 2
        queue.finish()
        gc.collect()
        assert [ref() for ref in shards[:-1]] == [None] * 7
        assert [p.ranges[0].high for p in passes] == [float(n) for n in range(8)]


def test_many_ranges_and_empty_shards() -> None:
    queue, into = RangeQueue(MESH), PassRanges()
    count = pass_ranges.BLOCK_SLOTS + 3
    for number in range(count):
        queue.take(into, "site", number, torch.tensor([float(number), -1.0]), None)
    queue.take(into, "empty", 0, torch.zeros(0, 4), LAYOUT)
    queue.finish()
    assert [r.high for r in into.ranges[:count]] == [max(float(n), -1.0) for n in range(count)]
    assert into.ranges[-1].finite
    assert into.ranges[-1].empty


def test_an_uneven_dim_gives_the_entry_of_the_shard() -> None:
    layout = Layout((Dim("s", (Cut("tp"),), uneven=True), Dim("h")))
    (known,) = take_all(RangeQueue(MESH), [torch.tensor([[0.0, NAN]])], layout)
    assert known.located is not None
    assert (known.located.indices, known.located.full) == (((0, 1),), False)


def span(site: str, low: float, high: float | None = None, dtype: torch.dtype = torch.float32) -> PassRange:
    return PassRange(site, 0, low, low if high is None else high, dtype)


def test_ranks_without_an_expert_do_not_shift_the_order() -> None:
    forward = Candidate(False, 3, False, 1)
    with_expert = [span("a", 1), span("expert.fc1", NAN), span("expert.fc2", NAN), span("moe", NAN)]
    without = [span("a", 0.5, 2), span("moe", NAN)]
    verdict = reach_verdict(
        7, forward, [Neighbourhood(0, 0, without, ()), Neighbourhood(1, 0, with_expert, ())], 1.0
    )
    assert (verdict.site, list(verdict.located)) == ("expert.fc1", [1])
    assert verdict.inputs == {"a": (0.5, 2)}
    assert_names(verdict.describe(), 7, 3, "expert.fc1", "rank 1")


def test_inputs_are_those_of_the_replica() -> None:
    ranks = [
        Neighbourhood(0, 0, [span("a", -5), span("b", 1)], ()),
        Neighbourhood(1, 1, [span("a", 2, 3), span("b", NAN)], ["w"]),
    ]
    verdict = reach_verdict(0, Candidate(False, 0, False, 0), ranks, 1.0)
    assert verdict.inputs == {"a": (2, 3)}
    assert verdict.parameters == ["w"]


@pytest.mark.parametrize(
    ("dtype", "value", "near"),
    [
        (torch.float16, 9000.0, True),
        (torch.float16, 8000.0, False),
        (torch.bfloat16, 9000.0, False),
        (torch.float32, -1e38, True),
        (torch.float8_e4m3fn, 400.0, False),
    ],
)
def test_what_is_near_an_overflow(dtype: torch.dtype, value: float, near: bool) -> None:
    assert span("a", value, dtype=dtype).near_overflow == near


@pytest.mark.parametrize("mode", ["halt", "", None, 3])
def test_a_mode_that_is_unknown_is_refused(mode: object) -> None:
    with pytest.raises(mf.FlexError) as caught:
        mf.NonFinite(mode)  # type: ignore[arg-type]  # on purpose
    assert_names(caught.value, "stop", "warn")


def test_a_tensor_that_changed_is_measured_again() -> None:
    queue, into, shard = RangeQueue(MESH), PassRanges(), torch.ones(2, 3)
    queue.take(into, "first", 0, shard, LAYOUT)
    queue.take(into, "view", 0, shard.t(), LAYOUT)
    shard[0, 0] = NAN
    queue.take(into, "changed", 0, shard, LAYOUT)
    queue.finish()
    assert [r.finite for r in into.ranges] == [True, True, False]


def poisoned() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].bias.data[1] = INF
    return model


def test_a_plain_module() -> None:
    with mf.attach(poisoned(), nonfinite="stop") as flex:
        model = flex.chunks[0]
        with torch.no_grad(), pytest.raises(mf.NonFiniteError) as caught:
            model(torch.ones(4, 2))
        error = caught.value
        assert (error.site, error.rank, error.microbatch) == ("0:output", 0, 0)
        assert error.indices == ((0, 1), (1, 1), (2, 1), (3, 1))
        assert error.parameters == ("0.bias",)
        with pytest.raises(mf.NonFiniteError):  # gradients may follow the call of the model
            model(torch.ones(4, 2)).sum().backward()
        with pytest.raises(mf.NonFiniteError), flex.step():
            model(torch.ones(4, 2)).sum().backward()


def test_one_search_at_a_time_which_a_handle_ends() -> None:
    model = poisoned()
    with mf.attach(model) as flex:
        with flex.register_nonfinite():
            with pytest.raises(mf.FlexError) as caught:
                flex.register_nonfinite("warn")
            assert_names(caught.value, "NonFinite", "stop")
        with torch.no_grad():
            model(torch.ones(4, 2))
        flex.register_nonfinite(mf.NonFinite("stop", "2", gradients=False, parameters=False))
        with pytest.raises(mf.NonFiniteError) as caught, torch.no_grad():
            model(torch.ones(4, 2))
        assert caught.value.site == "2:output"


@pytest.mark.parametrize("given", ["halt", 3, mf.Statistics("nowhere", "0")])
def test_other_settings_are_refused(given: object) -> None:
    with mf.attach(poisoned()) as flex, pytest.raises(mf.FlexError) as caught:
        flex.register_nonfinite(given)  # type: ignore[arg-type]  # on purpose
    assert_names(caught.value, "stop", "warn")


def test_a_folder_for_shards_needs_a_search() -> None:
    pytest.importorskip("pydantic")
    from megatron_flex.launch import Settings
    from megatron_flex.launch.settings_resolver import resolve_settings

    with pytest.raises(mf.FlexError) as caught:
        resolve_settings(Settings(nonfinite_dir="shards"))
    assert_names(caught.value, "--flex-nonfinite-dir", "shards", "stop")
    resolved = resolve_settings(Settings(nonfinite="warn", nonfinite_dir="shards")).nonfinite
    assert resolved is not None
    assert (resolved.mode, resolved.path) == ("warn", "shards")


def test_a_rank_whose_step_fails_warns_of_its_own_first_tensor() -> None:
    def fail(flex: mf.FlexModel) -> None:  # as Megatron, where its own check finds a loss that is not finite
        with flex.step():
            flex.chunks[0](torch.ones(4, 2))
            raise ZeroDivisionError

    with mf.attach(poisoned(), nonfinite="stop") as flex:
        with pytest.warns(mf.FlexWarning) as caught, pytest.raises(ZeroDivisionError):
            fail(flex)
        assert any_names([str(w.message) for w in caught], "0:output", "rank 0", [0, 1])


def test_dims_and_replicas_are_named() -> None:
    (known,) = take_all(RangeQueue(MESH), [torch.tensor([[0.0, NAN]])])
    ranks = [Neighbourhood(0, 0, [span("a", 1)], ()), Neighbourhood(1, 1, [known._replace(site="a")], ())]
    verdict = reach_verdict(0, Candidate(False, 0, False, 0), ranks, 1.0)
    assert (verdict.replica, verdict.replicas) == (1, 2)
    assert_names(verdict.describe(), "replica 1", "rank 1", [0, 3], [1, 4], "s, h")
