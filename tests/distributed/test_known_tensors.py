"""Every parameter and buffer of every configuration in the tests is known, or refused with its reason."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_flex as mf
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
from tests.distributed.test_matrix import VERSION

pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="some configurations need megatron-core 0.19")
SINKS = "decoder.layers.0.self_attention.core_attention.softmax_offset"
FURTHER = [
    Case("attention sinks", layers=2, extra={"softmax_type": "learnable"}),
    Case(
        "biases of experts",
        layers=2,
        experts=4,
        extra={
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    Case("muP", layers=2, extra={"use_mup": True, "mup_base_hidden_size": 8}),
    Case("gates", layers=2, extra={"attention_output_gate": True}),
]


def configurations() -> list[Case]:
    """A case of each model among the cases of `tests/distributed`."""
    found: dict[str, Case] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.distributed.{path.stem}")
        lists = [value for value in vars(module).values() if isinstance(value, list)]
        for case in (c for listed in lists for c in listed if isinstance(c, Case)):
            alone = replace(case.single(), microbatches=1, joint=1, device="cpu")
            found.setdefault(repr(alone), replace(alone, name=case.name))
    return [*found.values(), *FURTHER]


def tensors(cases: list[Case], first: Case) -> dict[str, dict[str, Any]]:
    """Of each case what its models have and what is known of it: full shapes, owners, errors."""
    out: dict[str, dict[str, Any]] = {}
    for case in cases:
        chunks = ranks.start(case)
        with mf.attach(chunks, []) as flex:
            index = flex.session.parameters.index
            told = {}
            for name in [*index.unknown, *index.buffers]:
                try:
                    flex.get_module_parameter(name)
                except mf.SiteError as error:
                    told[name] = str(error)
            owners = {
                f"{path}.{name}".lstrip("."): type(module).__name__
                for path, module in chunks[0].named_modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            }
            known = {name: tuple(sites[0].shape) for name, sites in index.sites.items()}
            copies = {site.name for sites in index.sites.values() for site in sites}
            out[case.name] = {
                "parameters": sorted(name for name, _ in gpt.global_names(chunks[0])),
                "known": known,
                "copies": copies,
                "unknown": index.unknown,
                "buffers": owners,
                "told": told,
                "readable": sorted(flex.session.parameters.buffers.sites),
            }
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_every_parameter_and_buffer_is_known(tp: int) -> None:
    groups: dict[str, list[Case]] = {}
    for case in configurations():
        case = replace(case, tp=tp, sp=case.experts > 0 and tp > 1)
        groups.setdefault(case.topology, []).append(case)
    assert sum(map(len, groups.values())) > 40
    seen: set[str] = set()
    for cases in groups.values():
        answers = run(tp, tensors, cases, cases[0], timeout=300)
        assert all(answer.keys() == answers[0].keys() for answer in answers)
        for name, found in answers[0].items():
            listed = {*found["copies"], *found["unknown"]}
            assert set(found["parameters"]) <= listed, (name, set(found["parameters"]) - listed)
            assert not found["unknown"], (name, found["unknown"])
            for buffer, kind in found["buffers"].items():
                if buffer in found["readable"]:
                    continue  # such as the biases of routers
                assert_names(found["told"][buffer], buffer, kind, "get_buffer()")
            seen |= {buffer.rpartition(".")[2] for buffer in found["buffers"]}
    assert seen >= {"expert_bias", "local_tokens_per_expert"}


def sinks(case: Case) -> dict[str, Any]:
    """The full parameter, what setting it does, its gradient and its layout."""
    chunks = ranks.start(case)
    with mf.attach(chunks, []) as flex:
        before = torch.arange(gpt.HEADS).float()
        flex.set_module_parameter(SINKS, before)
        gpt.step(case, chunks, 0)
        return {
            "read": flex.get_module_parameter(SINKS, everywhere=True),
            "gradient": flex.get_module_parameter(SINKS, gradient=True, everywhere=True),
            "local": chunks[0].get_parameter(SINKS).tolist(),
        }


def test_attention_sinks_are_read_and_set_by_head() -> None:
    (want,) = run(1, sinks, FURTHER[0])
    for rank, got in enumerate(run(2, sinks, replace(FURTHER[0], name="sinks tp2", tp=2))):
        assert torch.equal(got["read"], want["read"])
        assert got["local"] == [2.0 * rank, 2.0 * rank + 1]
        assert got["gradient"].shape == (gpt.HEADS,)
