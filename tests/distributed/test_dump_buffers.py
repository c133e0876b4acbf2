"""Buffers in dumps: the biases of routers, which a step updates from the tokens of all ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import gpt, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.training import Trainer

pytest.importorskip("megatron.core")

STEPS = 3
BIASES = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
LAYOUTS = [
    Case("dp2 ep2", dp=2, ep=2),
    Case("tp2 sp pp2", tp=2, sp=True, pp=2),
]
CASES = [replace(case, experts=4, layers=2, extra=BIASES) for case in LAYOUTS]


def state(case: Case) -> dict[str, Tensor]:
    """Weights of one process."""
    return gpt.randomize(ranks.start(case)[0])


def trained(case: Case, weights: dict[str, Tensor], path: str, local_counts: bool) -> list[dict[str, Tensor]]:
    """The biases on this rank before each step of a run that is dumped; with an error in their update."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, weights)
    trainer = Trainer(case, chunks, ranks.mine(chunks))
    before = []
    undo = _count_own_tokens() if local_counts else lambda: None
    try:
        with mf.attach(trainer.models, dumps=mf.Dump(path, parameters="**", gradients=True)):
            for _ in range(STEPS):
                before.append(_biases(chunks))
                trainer.step()
    finally:
        undo()
    return before


def _biases(chunks: list[nn.Module]) -> dict[str, Tensor]:
    routers = [m for chunk in chunks for m in chunk.modules() if getattr(m, "expert_bias", None) is not None]
    return {
        f"decoder.layers.{r.layer_number - 1}.mlp.router.expert_bias": r.expert_bias.clone() for r in routers
    }


def _count_own_tokens() -> Any:
    """Each rank updates the biases by its own tokens; returns how to undo that."""
    module: Any = import_module("megatron.core.distributed.finalize_model_grads")
    real = module.get_updated_expert_bias

    def local(tokens: Tensor, bias: Tensor, rate: float, **_: Any) -> Tensor:
        load = tokens.sum(-1, keepdim=True) / tokens.shape[-1] - tokens
        return bias + torch.sign(load) * rate

    module.get_updated_expert_bias = local
    return lambda: setattr(module, "get_updated_expert_bias", real)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_biases_of_routers_are_dumped(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf
    from megatron_flex.compare import compare

    weights = truths.once(state, case.single())
    [alone] = run(1, trained, case.single(), weights, str(tmp_path / "one"), False)
    answers = run(case.world, trained, case, weights, str(tmp_path / "d"), False)
    with mf.open_dump(tmp_path / "d") as dump:
        names = [n for n in dump.parameters if n.endswith("router.expert_bias")]
        assert len(names) == case.layers
        for name in names:
            got = dump.parameter(name).torch()
            for answer in answers:
                held = [step[name] for step in answer if name in step]
                assert not held or torch.equal(got, torch.stack(held)), name
            assert torch.equal(got, torch.stack([step[name] for step in alone])), name
            assert got[1:].any()
            with pytest.raises(mf.FlexError):
                dump.parameter(name, gradient=True).torch()
    comparison = compare(tmp_path / "one", tmp_path / "d")
    assert comparison.first is None, str(comparison)
    assert {row.name for row in comparison.rows} >= set(names)


def test_a_bias_that_counts_the_tokens_of_one_rank(tmp_path: Path) -> None:
    from megatron_flex.compare import compare

    case = CASES[0]
    weights = truths.once(state, case.single())
    run(1, trained, case.single(), weights, str(tmp_path / "one"), False)
    run(case.world, trained, case, weights, str(tmp_path / "d"), True)
    first = compare(tmp_path / "one", tmp_path / "d").first
    assert first is not None
    assert first.name.endswith(".mlp.router.expert_bias")
    assert (first.kind, first.iteration) == ("parameter", 1)


def dumped(case: Case, path: str) -> None:
    """A step with a dump of nothing but the biases."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks, dumps=mf.Dump(path, sites=[], parameters="**.router.expert_bias")):
        gpt.step(case, chunks, ranks.mine(chunks))


def test_a_pattern_of_buffers_alone(tmp_path: Path) -> None:
    import megatron_flex as mf

    case = CASES[1]
    run(case.world, dumped, case, str(tmp_path / "d"))
    with mf.open_dump(tmp_path / "d") as dump:
        assert list(dump.parameters) == [f"decoder.layers.{n}.mlp.router.expert_bias" for n in range(2)]


def loaded(case: Case, path: str) -> dict[str, list[float]]:
    """The biases that a run of this layout takes over from a dump."""
    import megatron_flex as mf
    from megatron_flex.compare import load_parameters

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex:
        assert any(name.endswith("expert_bias") for name in load_parameters(flex, path, STEPS - 1))
        names = flex.session.parameters.buffers.sites
        full = {name: flex.get_module_parameter(name, everywhere=True) for name in names}
    for name, bias in _biases(chunks).items():
        assert torch.equal(bias, full[name])
    return {name: bias.tolist() for name, bias in full.items() if bias is not None}


def test_an_isolated_step_begins_with_the_biases(tmp_path: Path) -> None:
    import megatron_flex as mf

    weights = truths.once(state, CASES[0].single())
    run(2, trained, CASES[0], weights, str(tmp_path / "d"), False)
    answers = run(CASES[1].world, loaded, CASES[1], str(tmp_path / "d"))
    with mf.open_dump(tmp_path / "d") as dump:
        for answer in answers:
            assert answer
            for name, values in answer.items():
                assert dump.parameter(name).torch()[-1].tolist() == values
