"""A GPTModel's names on models whose layers are attention or MLP."""

from __future__ import annotations

import pytest

from megatron_flex.errors import SiteError
from megatron_flex.gpt_names import GptNames, layer_pattern, own_name
from megatron_flex.layout import replicated
from megatron_flex.sites import Site, SiteTable, check_pattern, find_recorded_names
from tests.support.messages import raises

LAYERS = [
    "input",
    "output",
    "input_layernorm:output",
    "self_attention:output",
    "self_attention.linear_qkv:q",
]
MLP = ["input", "output", "pre_mlp_layernorm:output", "mlp:output", "mlp.linear_fc1:input"]
HYBRID = [
    "embedding:output",
    *(f"decoder.layers.{n}{'.' if ':' in p else ':'}{p}" for n in (0, 2) for p in LAYERS),
    *(f"decoder.layers.{n}{'.' if ':' in p else ':'}{p}" for n in (1, 3) for p in MLP),
    "decoder:output",
    "decoder.final_norm:input",
    "loss:output",
]
# What a GPTModel calls them, written down by hand.
GPT = [
    "embedding:output",
    *(
        name
        for k in (0, 1)
        for name in (
            f"decoder.layers.{k}:input",
            f"decoder.layers.{k}:mid",
            f"decoder.layers.{k}.input_layernorm:output",
            f"decoder.layers.{k}.self_attention:output",
            f"decoder.layers.{k}.self_attention.linear_qkv:q",
        )
    ),
    *(
        name
        for k in (0, 1)
        for name in (
            None,
            f"decoder.layers.{k}:output",
            f"decoder.layers.{k}.pre_mlp_layernorm:output",
            f"decoder.layers.{k}.mlp:output",
            f"decoder.layers.{k}.mlp.linear_fc1:input",
        )
    ),
    "decoder:output",
    "decoder.final_layernorm:input",
    "loss:output",
]


def table(names: list[str]) -> SiteTable:
    return SiteTable(Site(n, replicated("s", "b", "h"), ("s", "b", 8)) for n in names)


def found(pattern: str, point: str | None = None, names: list[str] = HYBRID) -> list[str]:
    return [s.name for s in table(names).match(pattern, point)]


@pytest.mark.parametrize("ending", ["", ".grad", "#1", ".grad#1", "[1]", ".edited"])
def test_each_name_has_its_counterpart(ending: str) -> None:
    names = GptNames(layer_pattern(HYBRID))
    assert names.pattern == "*-*-"
    for own, theirs in zip(HYBRID, GPT, strict=True):
        found = names.to_gpt(own + ending)
        assert found == (None if theirs is None else theirs + ending)
        assert theirs is None or names.to_model(theirs + ending) == own + ending


PREDICTION = "mtp.layers.0.mtp_model_layer"
# The layers in a module of multi-token prediction, and what a GPTModel calls them, written down by hand.
PREDICTED = {
    "mtp.layers.0:output": "mtp.layers.0:output",
    "mtp.layers.0.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
    f"{PREDICTION}.layers.0:input": f"{PREDICTION}:input",
    f"{PREDICTION}.layers.0:output": f"{PREDICTION}:mid",
    f"{PREDICTION}.layers.0.self_attention.linear_qkv:q": f"{PREDICTION}.self_attention.linear_qkv:q",
    f"{PREDICTION}.layers.1:output": f"{PREDICTION}:output",
    f"{PREDICTION}.layers.1.mlp.linear_fc1.weight": f"{PREDICTION}.mlp.linear_fc1.weight",
    "mtp.layers.0.final_layernorm:input": "mtp.layers.0.final_layernorm:input",
}


def test_layers_of_prediction_have_counterparts_too() -> None:
    names = GptNames(layer_pattern([*HYBRID, *PREDICTED]))
    assert names.pattern == "*-*-/*-"
    for own, theirs in PREDICTED.items():
        assert names.to_gpt(own) == theirs
        assert names.to_model(theirs) == own
    assert names.to_model(PREDICTION) == f"{PREDICTION}.layers.1"
    assert names.to_gpt(f"{PREDICTION}.layers.1:input") is None
    every = [*HYBRID, *PREDICTED]
    assert found(f"gpt:{PREDICTION}:mid", None, every) == [f"{PREDICTION}.layers.0:output"]
    assert found("gpt:**.mlp:output", None, every) == [n for n in HYBRID if n.endswith("mlp:output")]


def test_layers_of_prediction_that_are_no_pair() -> None:
    """The decoder's layers keep their counterparts."""
    names = GptNames("*-*-/?-")
    assert names.to_model("decoder.layers.1.mlp:output") == "decoder.layers.3.mlp:output"
    assert names.to_gpt(f"{PREDICTION}.layers.1.mlp:output") is None
    with raises(SiteError, "gpt:mtp.layers.0.mtp_model_layer.mlp:output", "*-", "?-"):
        names.to_model(f"{PREDICTION}.mlp:output")


def test_parameters_have_counterparts_too() -> None:
    parameters = [
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
        "decoder.final_norm.weight",
    ]
    assert (
        own_name("gpt:decoder.layers.0.mlp.router.weight", parameters) == "decoder.layers.1.mlp.router.weight"
    )
    assert own_name("gpt:decoder.final_layernorm.weight", parameters) == parameters[2]
    assert own_name("decoder.layers.0.mlp.weight", parameters) == "decoder.layers.0.mlp.weight"


def test_patterns_are_over_the_names_of_a_gpt_model() -> None:
    assert found("gpt:decoder.layers.*:mid") == ["decoder.layers.0:output", "decoder.layers.2:output"]
    assert found("gpt:decoder.layers.1", "output") == ["decoder.layers.3:output"]
    assert found("gpt:decoder.layers.1.mlp*", "output") == ["decoder.layers.3.mlp:output"]
    assert found("gpt:decoder.final_layernorm") == ["decoder.final_norm:input"]
    assert sorted(found("gpt:**")) == sorted(own for own, theirs in zip(HYBRID, GPT, strict=True) if theirs)
    assert found("decoder.layers.1.mlp", "output") == ["decoder.layers.1.mlp:output"], "its own name"


def test_the_prefix_changes_nothing_on_a_gpt_model() -> None:
    names = [n for n in GPT if n]
    assert layer_pattern(names) == "TT"
    for pattern in ("decoder.layers.*:mid", "decoder.layers.1.mlp", "**", "decoder.final_layernorm"):
        assert found(f"gpt:{pattern}", None, names) == found(pattern, None, names)


def test_a_module_that_is_called_gpt_keeps_its_points() -> None:
    assert found("gpt:output", None, ["gpt:output", "gpt.head:output"]) == ["gpt:output"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["0.mixer", "1.self_attention", "2.mlp"], ("0", "?*-")),
        (["0.self_attention", "1.self_attention", "2.mlp"], ("1", "**-")),
        (["0.self_attention", "1.mlp", "2.self_attention"], ("*-*",)),
        ([], ("decoder.layers",)),
    ],
)
def test_layers_that_are_no_pairs_are_refused(names: list[str], why: tuple[str, ...]) -> None:
    sites = ["embedding:output", *(f"decoder.layers.{n}:output" for n in names)]
    for pattern in ("gpt:decoder.layers.0.mlp", "gpt:embedding", "gpt:**"):
        with raises(SiteError, pattern, *why):
            found(pattern, None, sites)


def test_a_name_that_matches_nothing_is_answered_by_the_names_of_a_gpt_model() -> None:
    with raises(SiteError, "gpt:decoder.layers.2.mlp", "0-1"):
        found("gpt:decoder.layers.2.mlp")
    with raises(SiteError, "gpt:decoder.layers.1.mlp:gate", "decoder.layers.1.mlp:gate", "output"):
        found("gpt:decoder.layers.1.mlp:gate")
    with raises(SiteError, "gpt:", "decoder.layers.*"):
        found("gpt:")


def test_patterns_are_checked_without_a_model() -> None:
    check_pattern("gpt:decoder.layers.*:mid")
    for wrong in ("gpt:", "gpt:a:b:c", "other:decoder.layers.1:mid"):
        with raises(SiteError, wrong, "decoder.layers.*"):
            check_pattern(wrong)


def test_recorded_names_are_found_by_those_of_a_gpt_model() -> None:
    names = ["decoder.layers.2:output", "decoder.layers.3.mlp:output", "decoder.layers.3.mlp:output.grad"]
    assert find_recorded_names("gpt:decoder.layers.1:mid", names, "it", "*-*-") == names[:1]
    assert find_recorded_names("gpt:decoder.layers.1.mlp.grad", names, "it", "*-*-") == names[2:]
    assert find_recorded_names("gpt:decoder.layers.*.mlp", names, "it", "*-*-") == names[1:2]
    assert find_recorded_names("gpt:decoder.layers.0.mlp", names, "it", "*-*-") == []
    with raises(SiteError, "gpt:decoder.layers.2:output", "???-"):
        find_recorded_names("gpt:decoder.layers.1:mid", names, "it")
