"""Every argument of Megatron-LM is in tests/data/arguments.toml; attach refuses what that says."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.model_sites import is_quantized
from megatron_flex.adapters.megatron_core.unsupported_settings import (
    FSDP_WRAPPERS,
    UNSUPPORTED_SETTINGS,
    refuse_settings,
    refuse_wrappers,
)
from megatron_flex.errors import FlexError
from tests.support import argument_table
from tests.support.messages import raises

CENSUS = argument_table.read()
NAMED = [flag for group in CENSUS["group"] for flag in group["flags"].split()]


def upstream() -> list[argparse.Action]:
    pytest.importorskip("megatron.training.arguments", reason="this megatron-core has no launcher")
    with cpu.runtime():
        from megatron.training.arguments import add_megatron_arguments

        parser: Any = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


def test_each_argument_is_in_one_group() -> None:
    assert len(NAMED) == len(set(NAMED))
    theirs = {action.option_strings[0].removeprefix("--") for action in upstream()}
    assert len(theirs) > 700
    assert sorted(theirs - set(NAMED)) == [], (
        "new arguments: say in tests/data/arguments.toml what they mean for hooks"
    )
    assert sorted(set(NAMED) - theirs) == [], "arguments that this Megatron no longer has"


def test_each_field_of_the_config_is_known() -> None:
    from megatron.core.transformer import TransformerConfig

    dests = {action.dest for action in upstream()}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    known = set(CENSUS["config"]["fields"].split())
    assert sorted(fields - dests - known) == [], "new fields: add them to tests/data/arguments.toml"
    assert sorted(known - fields) == []


def test_what_is_refused_is_what_attach_reads() -> None:
    listed = {name for g in CENSUS["group"] for name in g.get("settings", ())}
    assert listed == set(UNSUPPORTED_SETTINGS)
    assert all(g["status"] == "refused" for g in CENSUS["group"] if g.get("settings"))
    assert {g["status"] for g in CENSUS["group"]} == {"supported", "unaffected", "refused"}


@pytest.mark.parametrize("name", UNSUPPORTED_SETTINGS)
def test_a_setting_is_refused_with_its_remedy(name: str) -> None:
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    refuse_settings(config)
    value = {"cuda_graph_impl": "local"}.get(name, 2 if name.endswith("_size") else True)
    setattr(config, name, value)
    with pytest.raises(FlexError) as raised:
        refuse_settings(config)
    setting = UNSUPPORTED_SETTINGS[name]
    assert str(raised.value) == f"{name}={value!r} {setting.why}; {setting.instead}"


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", FSDP_WRAPPERS[0]),
        ("megatron.core.distributed.torch_fully_sharded_data_parallel", FSDP_WRAPPERS[1]),
    ],
)
def test_a_wrapper_is_refused(module: str, kind: str) -> None:
    found: Any = pytest.importorskip(module)
    wrapper = getattr(found, kind).__new__(getattr(found, kind))  # its constructor wants a GPU
    nn.Module.__init__(wrapper)
    with raises(FlexError, kind, "--use-distributed-optimizer"):
        refuse_wrappers([wrapper])


class Float8Like(nn.Parameter):
    """A parameter of a subclass, as Transformer Engine's, which are known by the package of their class."""


Float8Like.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"


def test_quantized_parameters_have_no_layout() -> None:
    assert is_quantized(Float8Like(torch.ones(2)))
    assert not is_quantized(nn.Parameter(torch.ones(2)))
