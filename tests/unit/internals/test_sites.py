"""Names and patterns."""

from __future__ import annotations

from megatron_flex.errors import SiteError
from megatron_flex.layout import replicated
from megatron_flex.sites import Site, SiteTable, model_order
from tests.support.messages import raises

NAMES = [
    "embedding:output",
    *(f"decoder.layers.{n}:{p}" for n in range(12) for p in ("input", "mid", "output")),
    *(
        f"decoder.layers.{n}.mlp.{m}:{p}"
        for n in range(12)
        for m in ("fc1", "fc2")
        for p in ("input", "output")
    ),
    "loss:output",
]
TABLE = SiteTable(Site(n, replicated("s", "b", "h"), ("s", "b", 8)) for n in NAMES)


def found(pattern: str, point: str | None = None) -> list[str]:
    return [s.name for s in TABLE.match(pattern, point)]


def test_a_name_stands_for_itself() -> None:
    assert found("decoder.layers.1:mid") == ["decoder.layers.1:mid"]
    assert found("decoder.layers.1", "output") == ["decoder.layers.1:output"]
    assert found("decoder.layers.1") == [f"decoder.layers.1:{p}" for p in ("input", "mid", "output")]


def test_a_star_stays_within_one_step_of_the_path() -> None:
    assert found("decoder.layers.*", "output") == [f"decoder.layers.{n}:output" for n in range(12)]
    assert len(found("decoder.layers.*.mlp.*")) == 48
    assert found("*", "output") == ["embedding:output", "loss:output"]
    assert found("decoder.layers.1?", "mid") == ["decoder.layers.10:mid", "decoder.layers.11:mid"]
    assert found("decoder.layers.[0-1]", "mid") == ["decoder.layers.0:mid", "decoder.layers.1:mid"]
    assert len(found("decoder.layers.[!0-1]", "mid")) == 8


def test_two_stars_cross_steps() -> None:
    assert found("**") == NAMES
    assert len(found("decoder.**", "output")) == 36
    assert len(found("**.fc1:*put")) == 24


def test_nothing_found_names_the_nearest() -> None:
    with raises(SiteError, "decoder.layers.3.mpl.fc1", "decoder.layers.3.mlp.fc1"):
        TABLE.match("decoder.layers.3.mpl.fc1", "output")
    with raises(SiteError, "partial", "input", "output"):
        TABLE.match("decoder.layers.3.mlp.fc1", "partial")


def test_a_name_twice_is_an_error() -> None:
    site = Site("a:output", replicated("s"), ("s",))
    with raises(SiteError, "a:output"):
        SiteTable([site, site])


def test_model_order_is_by_layer_over_stages() -> None:
    mixed = [Site(n, replicated("s"), ("s",)) for n in reversed(NAMES)]
    ordered = [s.name.split(":")[0] for s in sorted(mixed, key=model_order)]
    assert ordered[0] == "embedding"
    assert ordered[-1] == "loss"
    layers = [int(n.split(".")[2]) for n in ordered[1:-1]]
    assert layers == sorted(layers)
