"""Ranges of tensors on a simulated accelerator, and the verdict on the passes of several ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron_flex as mf
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.nonfinite import Candidate, Neighbourhood, PassRange, pass_ranges, reach_verdict
from megatron_flex.nonfinite.pass_ranges import RangeReader, Slots
from tests.support.accelerator import CUDA, simulated
from tests.support.messages import assert_names

NAN, INF = float("nan"), float("inf")
MESH = Mesh((Axis("tp", 2, 1, None, (0, 1)),))
LAYOUT = Layout((Dim("s"), Dim("h", (Cut("tp"),))))


def tensors(device: str) -> list[torch.Tensor]:
    out = [torch.full((3, 4), float(n), device=device) for n in range(4)]
    out[2][1, 3] = NAN
    out[2][2, 0] = INF
    out[3][0, 0] = NAN  # a consequence
    return out


def take_all(reader: RangeReader, slots: Slots, shards: list[torch.Tensor]) -> list[PassRange]:
    for number, shard in enumerate(shards):
        reader.take(f"site{number}", 0, shard, LAYOUT, slots)
    slots.wait()
    return reader.finish()


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_entries_are_those_of_the_full_tensor(device: str) -> None:
    with simulated() as recording:
        ranges = take_all(RangeReader(MESH), Slots(), tensors(device))
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
        reader, slots, shard = RangeReader(MESH), Slots(), tensors(CUDA)[2]
        reader.take("site", 0, shard, LAYOUT, slots)
        shard.zero_()
        slots.wait()
        (known,) = reader.finish()
    assert not known.finite
    assert known.located is None


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_ranges, "MAX_HELD_BYTES", 3 * 4 * 4)
    with simulated():
        reader, slots, shards = RangeReader(MESH), Slots(), tensors(CUDA)
        for number, shard in enumerate(shards):
            reader.take(f"site{number}", 0, shard, LAYOUT, slots)
            assert reader._held <= 3 * 4 * 4
        slots.wait()
        assert [r.finite for r in reader.finish()] == [True, True, False, False]


def test_many_ranges_and_empty_shards() -> None:
    reader, slots = RangeReader(MESH), Slots()
    count = pass_ranges.BLOCK_SLOTS + 3
    for number in range(count):
        reader.take("site", number, torch.tensor([float(number), -1.0]), None, slots)
    reader.take("empty", 0, torch.zeros(0, 4), LAYOUT, slots)
    ranges = reader.finish()
    assert [r.high for r in ranges[:count]] == [max(float(n), -1.0) for n in range(count)]
    assert ranges[-1].finite
    assert ranges[-1].empty


def test_an_uneven_dim_gives_the_entry_of_the_shard() -> None:
    layout = Layout((Dim("s", (Cut("tp"),), uneven=True), Dim("h")))
    reader, slots = RangeReader(MESH), Slots()
    reader.take("site", 0, torch.tensor([[0.0, NAN]]), layout, slots)
    found = reader.finish()[0].located
    assert found is not None
    assert (found.indices, found.full) == (((0, 1),), False)


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
    reader, slots, shard = RangeReader(MESH), Slots(), torch.ones(2, 3)
    reader.take("first", 0, shard, LAYOUT, slots)
    reader.take("view", 0, shard.t(), LAYOUT, slots)
    shard[0, 0] = NAN
    reader.take("changed", 0, shard, LAYOUT, slots)
    assert [r.finite for r in reader.finish()] == [True, True, False]


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
